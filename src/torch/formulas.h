// A derivative that cannot be captured, by autograd's own formulas.
#pragma once
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <vector>

#include "torch/split.h"

namespace vitrify {

bool draws(const ir::Graph&);  // random numbers, or has other effects

// The program once more, op by op, from what it was given, and its gradients for the defined tangents: one per JointProgram::gradients,
// differentiable. `saved`: the values `kept`; the random numbers that the program drew must be among them. `trace`: held while the graph is read.
torch::autograd::variable_list by_formulas(const JointProgram&, const std::vector<Saved>& kept, const std::vector<at::Tensor>& given,
                                           const std::vector<at::Tensor>& saved, const torch::autograd::variable_list& tangents, std::mutex& trace);

}  // namespace vitrify
