// Graph to loop nests: runs every node's lowering rule, makes buffers where memory is needed, calls ATen for the rest.
#pragma once
#include "ops/lowering.h"

namespace vitrify::schedule {

struct LowerOptions {
  int threads = 2;  // parallelism worth splitting a long reduction for
};

ops::LoopProgram lower_graph(const ir::Graph&, const LowerOptions& = {});

// Buffers a nest reads and writes, recomputed from its body.
void collect_accesses(ops::LoopNode&);
std::string print(const ops::LoopProgram&);

}  // namespace vitrify::schedule
