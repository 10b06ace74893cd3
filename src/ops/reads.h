#pragma once
#include <string_view>

#include "ir/graph.h"

namespace vitrify::ops {

// How much of its operands an op reads, at least.
enum class Reads {
  All,       // every element
  AsResult,  // every element, where every element of its results is computed
  Some,
};
Reads reads_of(std::string_view name);

// Whether a call of this op may look at how its operands lie in memory: what it gives, draws or raises, or how its results are laid out, may follow
// from their strides. Such a call gets operands in eager's strides, whatever passes and the schedule have chosen. Views among them are not meant:
// their rules know elements only.
bool sees_layout(std::string_view name);

// Whether ATen's kernel trusts operand 0 to lie in memory as operand 1 does: eager's formula gives it no other.
bool lies_as_second(std::string_view name);

// A call of the program's own code (a custom op). It may look past the edges of the views that it is given, and keep them.
inline bool is_custom(const ir::Node& n) { return (n.op->flags & ir::kEffect) && sees_layout(n.op->name); }

}  // namespace vitrify::ops
