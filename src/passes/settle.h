// Sizes, strides and numbers that guards have fixed become constants. Not a stage that can be left out: rules tell dims that broadcast by their being
// the constant 1, and a guard may have found that only after the dim was recorded.
#pragma once
#include "ir/graph.h"

namespace vitrify::passes {

// What the run binds symbols by stays as it is: inputs, and results of calls whose sizes follow from content.
bool settle(ir::Graph&);

}  // namespace vitrify::passes
