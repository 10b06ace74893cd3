// Results of ATen ops in memory of our choice, for ops that have no out= kernel.
#pragma once
#include <c10/core/Allocator.h>

#include <cstddef>

namespace vitrify {

// While one lives, the first tensor of exactly `bytes` bytes that this thread gets from at::empty (or by resize_ of an empty one) on the CPU lies in
// `memory`, and owns it if that does. Others come from PyTorch's allocator. An op whose result has another size, or another allocator, is not an
// error: its result is elsewhere, and whoever placed it copies it.
class Placement {
 public:
  Placement(c10::DataPtr memory, size_t bytes);
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;
};

}  // namespace vitrify
