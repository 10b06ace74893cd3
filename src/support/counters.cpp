#include "support/counters.h"

#include <map>
#include <mutex>

#include "support/eager.h"

namespace vitrify {

namespace {
// What resets took off the counters.
Counters& before_resets() {
  static Counters* c = new Counters;
  return *c;
}
}  // namespace

void Counters::reset(){
#define _(n) before_resets().n.fetch_add(n.exchange(0, std::memory_order_relaxed), std::memory_order_relaxed);
    VT_COUNTERS(_)
#undef _
}

std::vector<std::pair<std::string, uint64_t>> lifetime_counters() {
  auto sum = counters().snapshot();
  const auto before = before_resets().snapshot();
  for (size_t i = 0; i < sum.size(); ++i) sum[i].second += before[i].second;
  return sum;
}

std::vector<std::pair<std::string, uint64_t>> Counters::snapshot() const {
  return {
#define _(n) {#n, n.load(std::memory_order_relaxed)},
      VT_COUNTERS(_)
#undef _
  };
}

// Never destroyed: threads may still count while the process ends.
Counters& counters() {
  static Counters* c = new Counters;
  return *c;
}

namespace {
struct StageTimes {
  std::mutex mutex;
  std::map<std::string, uint64_t> us;
};
StageTimes& times() {
  static StageTimes* t = new StageTimes;
  return *t;
}
}  // namespace

namespace {
constexpr size_t kMostReasons = 1000;
struct EagerReasons {
  std::mutex mutex;
  std::map<std::string, uint64_t> times;
};
EagerReasons& reasons() {
  static EagerReasons* r = new EagerReasons;
  return *r;
}
}  // namespace

void note_eager(std::string_view why) {
  EagerReasons& r = reasons();
  std::lock_guard lock(r.mutex);
  std::string key(why);
  ++r.times[r.times.size() < kMostReasons || r.times.count(key) ? key : "other reasons"];
}
std::map<std::string, uint64_t> eager_reasons() {
  EagerReasons& r = reasons();
  std::lock_guard lock(r.mutex);
  return r.times;
}

void add_stage_time(const std::string& stage, uint64_t us) {
  StageTimes& t = times();
  std::lock_guard lock(t.mutex);
  t.us[stage] += us;
}
std::vector<std::pair<std::string, uint64_t>> stage_times() {
  StageTimes& t = times();
  std::lock_guard lock(t.mutex);
  return {t.us.begin(), t.us.end()};
}
void reset_stage_times() {
  StageTimes& t = times();
  std::lock_guard lock(t.mutex);
  t.us.clear();
}

StageTimer::~StageTimer() {
  const auto time = std::chrono::steady_clock::now() - start_;
  add_stage_time(stage_, static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count()));
}

}  // namespace vitrify
