// Merges nodes that compute the same thing: pure ops with equal arguments and result types. Two graph outputs that eager gives memory of
// their own keep it. Tests: tests/unit/passes/cse.cpp.
#pragma once
#include <functional>

#include "ir/graph.h"
#include "support/options.h"

namespace vitrify::passes {

// group: nodes are merged with those of their group only, below zero with none.
bool cse(ir::Graph&, const Options&, const std::function<int(const ir::Node&)>& group = {});

}  // namespace vitrify::passes
