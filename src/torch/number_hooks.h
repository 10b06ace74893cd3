// In a Python process: how a step of Numbers becomes one of torch's symbolic floats, and back.
#pragma once
#include "torch/numbers.h"

#pragma GCC visibility push(default)
namespace vitrify::capture {

struct NumberHooks {
  c10::SymFloat (*wrap)(const std::shared_ptr<Numbers>&, uint32_t step) = nullptr;
  std::optional<uint32_t> (*step_of)(const c10::SymFloat&) = nullptr;
};
void set_number_hooks(NumberHooks);

}  // namespace vitrify::capture
#pragma GCC visibility pop
