// In a Python process: how a step of Numbers becomes one of torch's symbolic floats, and back, and who asks of a size.
#pragma once
#include "torch/numbers.h"

#pragma GCC visibility push(default)
namespace vitrify::capture {

struct NumberHooks {
  c10::SymFloat (*wrap)(const std::shared_ptr<Numbers>&, uint32_t step) = nullptr;
  std::optional<uint32_t> (*step_of)(const c10::SymFloat&) = nullptr;
  // Whether the Python code that compares two sizes is the program's, which gets a bool as in eager, and not torch's own.
  bool (*compared_by_program)() = nullptr;
};
void set_number_hooks(NumberHooks);

}  // namespace vitrify::capture
#pragma GCC visibility pop
