#include "support/code_pages.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace vitrify {
namespace {

// KiB of this program's code that are in memory.
int64_t resident_code() {
  std::ifstream maps("/proc/self/smaps");
  std::string line, name = testing::internal::GetArgvs()[0];
  name = name.substr(name.rfind('/') + 1);
  int64_t kib = 0;
  bool code = false;
  while (std::getline(maps, line)) {
    if (line.find("-") < line.find(" ")) code = line.find(" r-xp ") != std::string::npos && line.ends_with("/" + name);
    if (code && line.starts_with("Rss:")) kib += std::stoll(line.substr(4));
  }
  return kib;
}

TEST(CodePages, LeaveMemoryAndComeBack) {
#ifndef NDEBUG
  GTEST_SKIP() << "builds with assertions keep their pages, for a debugger's breakpoints";
#endif
  const int64_t before = resident_code();
  ASSERT_GT(before, 0);
  return_code_pages(reinterpret_cast<const void*>(&resident_code));
  EXPECT_LT(resident_code(), before);  // counting brought some back
  return_code_pages(&before);          // on the stack: of no file
}

}  // namespace
}  // namespace vitrify
