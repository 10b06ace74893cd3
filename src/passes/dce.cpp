#include "passes/dce.h"

namespace vitrify::passes {

bool dce(ir::Graph& g, const Options&) { return g.remove_dead() > 0; }

}  // namespace vitrify::passes
