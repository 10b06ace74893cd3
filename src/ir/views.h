// What a view shares with what it was made of.
#pragma once
#include "ir/graph.h"

namespace vitrify::ir {

// Goes on from OpFlags and the flags of ir/faults.h.
enum ViewFlags : uint32_t {
  kMakesBits = 1 << 13,  // the result is a conjugate or negative view
};

// What it is a view of, or itself.
inline Value root_of(Value v) {
  while (v.node->op->flags & kView) v = std::get<Value>(v.node->args[0]);
  return v;
}

}  // namespace vitrify::ir
