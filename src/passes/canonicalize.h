// Identities that are exactly what eager computes, result types included: copies and views that change nothing, views of views, transposes of
// transposes, x*1 and integer x+0, dropout in evaluation. A graph output keeps the memory of its own that eager gives it.
// Tests: tests/unit/passes/canonicalize.cpp.
#pragma once
#include "ir/graph.h"
#include "support/options.h"

namespace vitrify::passes {

bool canonicalize(ir::Graph&, const Options&);

}  // namespace vitrify::passes
