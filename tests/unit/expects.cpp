#include "expects.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "support/eager.h"

namespace expects {
namespace {

struct Listener final : testing::EmptyTestEventListener {
  std::vector<std::string> parts;
  std::string why_none;
  std::map<std::string, uint64_t> reasons;
  uint64_t kernels = 0;

  static uint64_t launched() {
    for (auto& [name, n] : vitrify::lifetime_counters())
      if (name == "kernels_launched") return n;
    return 0;
  }
  void OnTestStart(const testing::TestInfo&) override {
    parts.clear();
    why_none.clear();
    reasons = vitrify::eager_reasons();
    kernels = launched();
  }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (!test.result()->Passed() || test.result()->Skipped()) return;
    std::vector<std::string> said;
    for (auto& [why, n] : vitrify::eager_reasons())
      if (n > reasons[why]) said.push_back(why);
    const auto has = [](const std::string& why, const std::string& part) { return why.find(part) != std::string::npos; };
    for (auto& why : said)
      if (std::none_of(parts.begin(), parts.end(), [&](auto& part) { return has(why, part); }))
        ADD_FAILURE() << "ran eagerly, and the test does not announce it: " << why;
    for (auto& part : parts)
      if (std::none_of(said.begin(), said.end(), [&](auto& why) { return has(why, part); }))
        ADD_FAILURE() << "the test announces that calls run eagerly, and none did for this reason: " << part;
    const bool ran = launched() != kernels;
    if (ran && !why_none.empty()) ADD_FAILURE() << "kernels ran, and the test announces none: " << why_none;
    if (!ran && why_none.empty() && parts.empty()) ADD_FAILURE() << "no kernel ran, and the test does not say why";
  }
};

Listener* const listener = [] {
  auto* made = new Listener;
  testing::UnitTest::GetInstance()->listeners().Append(made);
  return made;
}();

}  // namespace

void eager(const std::string& part) { listener->parts.push_back(part); }
void no_kernels(const std::string& why) { listener->why_none = why; }

}  // namespace expects
