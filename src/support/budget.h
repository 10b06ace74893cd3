// What one compile may cost. Work is counted where it is done, in units of about a microsecond: whether a program is compiled does not depend on the
// machine or on what else it does. The clock is the last guard. The same places let a door interrupt a compile.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>

#include "support/error.h"

namespace vitrify {

// A compile costs more than it may: the program runs eagerly.
struct BudgetError final : CaptureError {
  using CaptureError::CaptureError;
};

// Holds for this thread while it lives; one inside another changes nothing.
class Budget {
 public:
  // `clock` false: the time that passes is the user's as well, whose code takes signals itself.
  explicit Budget(double seconds, bool clock = true);
  ~Budget();
  Budget(const Budget&) = delete;

  // Throws BudgetError when this thread has a budget that is used up, and what the interrupt check throws.
  static void spend(uint64_t units) {
    if (Budget* b = current(); b && (b->spent_ += units) >= b->next_) b->look();
  }
  uint64_t spent() const { return spent_; }

 private:
  static Budget*& current();
  void look();

  double seconds_;
  uint64_t limit_, spent_ = 0, next_;
  std::chrono::steady_clock::time_point start_;
  bool clock_, outermost_;
};

// Called about every 20 ms of a compile, on its thread; what it throws ends the compile.
void set_interrupt_check(std::function<void()>);

// For handlers that try another way: rethrows the exception in flight where it is an interrupt and no failure of the program. A door says which are.
void rethrow_interrupt();
void set_interrupt_test(bool (*)(const std::exception&));

}  // namespace vitrify
