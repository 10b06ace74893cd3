// What an op of unknown code sees of its operands' memory.
#pragma once
#include "torch/tracer_impl.h"

namespace vitrify {

// What a program has written is a value of its own until the end of the run: a custom op sees that, not the argument's memory. Where both begin and
// end alike, it cannot tell.
void check_written_memory(Tracer::Impl&, const capture::OpInfo&, const at::Tensor& operand);

}  // namespace vitrify
