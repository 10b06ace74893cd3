// Merges nodes that compute the same thing: pure ops with equal arguments and result types. Two graph outputs that eager gives memory of
// their own keep it. Tests: tests/unit/passes/cse.cpp.
#pragma once
#include <unordered_set>

#include "ir/graph.h"
#include "support/options.h"

namespace vitrify::passes {

// apart: nodes that are merged with each other only.
bool cse(ir::Graph&, const Options&, const std::unordered_set<const ir::Node*>* apart = nullptr);

}  // namespace vitrify::passes
