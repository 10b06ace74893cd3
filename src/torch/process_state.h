// What of the process and of this thread decides which ops ATen runs and by which library, besides what a program's arguments and modes say: a
// compile may look at it, and what was compiled serves calls in the same state only.
#pragma once
#include <cstdint>

namespace vitrify {

uint64_t library_state();

}  // namespace vitrify
