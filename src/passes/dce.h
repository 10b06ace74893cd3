// Removes nodes whose results nobody uses; random draws and effects stay.
#pragma once
#include "ir/graph.h"
#include "support/options.h"

namespace vitrify::passes {

bool dce(ir::Graph&, const Options&);

}  // namespace vitrify::passes
