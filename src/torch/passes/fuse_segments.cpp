#include "torch/passes/passes.h"

namespace vitrify {
bool fuse_segments(ir::Graph&, const Options&, PassState&) { return false; }
}  // namespace vitrify
