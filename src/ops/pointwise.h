// Shape rules of elementwise ops, shared by pointwise.cpp and activation.cpp.
#pragma once
#include "ops/shapes.h"

namespace vitrify::ops {

enum class PointwiseDType : uint8_t {
  Same,     // of operand 0
  Promote,  // of all tensors and numbers among the first `tensors` arguments
  Float,    // Promote, integers to float
  Bool,
  DivMode,    // Float when the mode (argument 2) is None, else Promote
  Clamp,      // Promote over the operand and the numbers after it
  Addcdiv,    // Promote; integers are an error
  FloatOnly,  // Promote; operand 0 must be floating
  NotBool,    // Promote; operand 0 must not be bool
};
// The first `tensors` arguments are operands (tensors or numbers).
Shape pointwise_shape(sym::Context&, ArgSpan args, PointwiseDType rule, int tensors);
Shape masked_fill_shape(sym::Context&, const TensorType& self, const Dims& sizes);
Shape formatted_shape(sym::Context&, const TensorType& x, ir::MemoryFormat);

}  // namespace vitrify::ops
