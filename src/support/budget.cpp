#include "support/budget.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

#include "support/counters.h"

namespace vitrify {

namespace {
constexpr uint64_t kLookEvery = 20'000;  // units
constexpr double kClock = 4;             // times the budget, by the clock

std::mutex interrupt_mutex;
std::function<void()>& interrupt() {
  static auto* f = new std::function<void()>;
  return *f;
}
}  // namespace

void set_interrupt_check(std::function<void()> f) {
  std::lock_guard lock(interrupt_mutex);
  interrupt() = std::move(f);
}

namespace {
std::atomic<bool (*)(const std::exception&)> is_interrupt = nullptr;
}

void set_interrupt_test(bool (*test)(const std::exception&)) { is_interrupt = test; }

void rethrow_interrupt() {
  const auto test = is_interrupt.load();
  if (!test) return;
  try {
    throw;
  } catch (const std::exception& e) {
    if (test(e)) throw;
  } catch (...) {
  }
}

Budget*& Budget::current() {
  static thread_local Budget* b = nullptr;
  return b;
}

Budget::Budget(double seconds, bool clock)
    : seconds_(seconds),
      limit_(static_cast<uint64_t>(std::min(seconds, 1e9) * 1e6)),
      next_(std::min(limit_, kLookEvery)),
      start_(std::chrono::steady_clock::now()),
      clock_(clock),
      outermost_(!current()) {
  if (outermost_) current() = this;
}
Budget::~Budget() {
  if (!outermost_) return;
  current() = nullptr;
  counters().compile_work += spent_;
}

void Budget::look() {
  next_ = spent_ + std::min(limit_, kLookEvery);
  const double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  if (spent_ > limit_ || (clock_ && passed > kClock * seconds_))
    throw BudgetError(fmt::format("compiling it takes more than it may (compile_budget_s is {:g})", seconds_));
  if (!clock_) return;
  std::function<void()> f;
  {
    std::lock_guard lock(interrupt_mutex);
    f = interrupt();
  }
  if (f) f();
}

}  // namespace vitrify
