#include "torch/formulas.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "support/counters.h"
#include "torch/slice.h"
#include "torch/tracer.h"

namespace vitrify {

using ir::Value;
using torch::autograd::variable_list;

bool draws(const ir::Graph& g) {
  return std::any_of(g.nodes().begin(), g.nodes().end(), [](const ir::Node* n) { return n->op->flags & (ir::kRandom | ir::kEffect); });
}

variable_list by_formulas(const JointProgram& joint, const std::vector<Saved>& kept, const std::vector<at::Tensor>& given,
                          const std::vector<at::Tensor>& saved, const variable_list& tangents, std::mutex& trace) {
  ++counters().fallbacks;
  std::vector<Value> inputs, heads;
  variable_list from, to, directions, all(joint.gradients.size());
  std::vector<int64_t> place(given.size(), -1);
  for (size_t i = 0; i < given.size(); ++i) {
    // What was kept of a value in between is no beginning: gradients go through it.
    if (!given[i].defined() || !(is_input(*joint.given[i].node) || (joint.given[i].node->op->flags & ir::kRandom))) continue;
    place[i] = static_cast<int64_t>(from.size());
    inputs.push_back(joint.given[i]);
    from.push_back(given[i].requires_grad() ? given[i].alias() : given[i]);  // not by way of what the caller made it of
  }
  for (size_t k = 0; k < kept.size(); ++k)
    if ((kept[k].value.node->op->flags & ir::kRandom) && std::find(inputs.begin(), inputs.end(), kept[k].value) == inputs.end()) {
      inputs.push_back(kept[k].value);
      from.push_back(saved[k]);
    }
  for (size_t k = 0; k < tangents.size(); ++k)
    if (tangents[k].defined()) {
      heads.push_back(joint.outputs[joint.roots[k].output]);
      directions.push_back(tangents[k]);
    }
  const auto graph = [&] {
    std::lock_guard lock(trace);
    return extract(*joint.program.graph, heads, inputs);
  }();
  TORCH_CHECK(!draws(*graph), "vitrify: a gradient of a gradient needs random numbers that were not kept");
  variable_list made = interpret(*graph, from, false, true);
  for (size_t i = made.size(); i-- > 0;)
    if (!made[i].requires_grad()) made.erase(made.begin() + i), directions.erase(directions.begin() + i);
  std::vector<size_t> which;
  for (size_t k = 0; k < all.size(); ++k)
    if (const int64_t at = place[joint.gradients[k].given]; at >= 0 && from[static_cast<size_t>(at)].requires_grad()) {
      to.push_back(from[static_cast<size_t>(at)]);
      which.push_back(k);
    }
  if (made.empty() || to.empty()) return all;
  const variable_list grads = torch::autograd::grad(made, to, directions, true, true, true);
  for (size_t i = 0; i < which.size(); ++i) all[which[i]] = grads[i];
  return all;
}

}  // namespace vitrify
