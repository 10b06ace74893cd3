// Merges nodes that compute the same thing: pure ops with equal arguments and result types. Two graph outputs that eager gives memory of
// their own keep it. Tests: tests/unit/passes/cse.cpp.
#pragma once
#include "ir/graph.h"
#include "support/options.h"

namespace vitrify::passes {

bool cse(ir::Graph&, const Options&);

}  // namespace vitrify::passes
