#include "support/counters.h"

#include <map>
#include <mutex>

namespace vitrify {

void Counters::reset(){
#define _(n) n.store(0, std::memory_order_relaxed);
    VT_COUNTERS(_)
#undef _
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
