// A program with gradients, compiled: a forward plan, and a backward plan for each set of results that gradients come back through.
#pragma once
#include <functional>
#include <memory>

#include "torch/compiled.h"
#include "torch/joint.h"
#include "torch/tracer.h"

namespace vitrify {

// `trace`: the tracer that recorded the program; it lives on with the result, and is asked again when gradients come back through some results only.
// Results carry a grad_fn; its hooks, version checks and errors are eager's.
std::shared_ptr<CompiledGraph> compile_training(JointProgram, std::shared_ptr<Tracer> trace, const Options&);
bool is_training(const CompiledGraph&);

}  // namespace vitrify
