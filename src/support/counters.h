// Process-wide counters, readable from both doors. Relaxed atomics: exact once the threads that count have been joined.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace vitrify {

#define VT_COUNTERS(_) \
  _(captures)          \
  _(values_compiled)   \
  _(compile_work)      \
  _(kernels_built)     \
  _(kernels_launched)  \
  _(externs_called)    \
  _(graph_breaks)      \
  _(recompiles)        \
  _(eager_calls) _(fallbacks) _(cache_hits) _(cache_misses) _(compiled_calls) _(plans_shared) _(results_copied) _(weights_packed) _(weights_compared)

struct Counters {
#define _(n) std::atomic<uint64_t> n{0};
  VT_COUNTERS(_)
#undef _
  void reset();
  std::vector<std::pair<std::string, uint64_t>> snapshot() const;
};
Counters& counters();

// Compile time by stage, microseconds, summed over the process.
void add_stage_time(const std::string& stage, uint64_t us);
std::vector<std::pair<std::string, uint64_t>> stage_times();
void reset_stage_times();

// Adds the time it lives to a stage's.
class StageTimer {
 public:
  explicit StageTimer(std::string stage) : stage_(std::move(stage)), start_(std::chrono::steady_clock::now()) {}
  ~StageTimer();
  StageTimer(const StageTimer&) = delete;

 private:
  std::string stage_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace vitrify
