#include "torch/originals.h"

#include <algorithm>

#include "torch/slice.h"

namespace vitrify {

using ir::Node;
using ir::Value;

Originals::Originals(const ir::Graph& g) {
  std::vector<Value> inputs, outputs;
  for (const ir::Input& in : g.inputs) inputs.push_back(in.value);
  for (const Value& v : g.outputs)
    if (v) outputs.push_back(v);
  graph_ = extract(g, outputs, inputs, g.nodes(), &original_);  // no output needs what is there for its errors or effects alone
}

uint32_t Originals::num_inputs() const { return static_cast<uint32_t>(graph_->inputs.size()); }

void Originals::replaced(Value by, Value what) {
  if (const Value* v = original_.find(what)) original_[by] = Value(*v);
}

std::shared_ptr<const Originals::Ops> Originals::behind(const Node& call, uint32_t first_kept) const {
  std::vector<Value> outputs, given;
  auto ops = std::make_shared<Ops>();
  for (uint32_t i = 0; i < call.outs.size(); ++i) {
    const Value* v = original_.find(const_cast<Node&>(call).out(i));
    ops->results.push_back(v ? static_cast<int32_t>(outputs.size()) : -1);
    if (v) outputs.push_back(*v);
  }
  if (outputs.empty() || outputs[0].node->op->name == call.op->name) return nullptr;  // the call itself
  uint32_t operand = 0;
  ir::for_each_input(const_cast<Node&>(call), [&](Value& v) {
    const Value* of = original_.find(v);
    if (of && std::ranges::find(given, *of) == given.end() && std::ranges::find(outputs, *of) == outputs.end()) {
      given.push_back(*of);
      ops->sources.push_back({true, operand});
    }
    ++operand;
  });
  // Some of them may not be needed, or lie behind others.
  const ir::NodeSet need = nodes_behind(*graph_, outputs, given);
  std::vector<Value> ends = given;
  for (uint32_t i = 0; i < graph_->inputs.size(); ++i) {
    const Value in = graph_->inputs[i].value;
    if (!need.contains(in.node) || std::ranges::find(given, in) != given.end()) continue;
    if (i < first_kept) return nullptr;
    given.push_back(in);
    ops->sources.push_back({false, i});
  }
  for (const Node* n : graph_->nodes()) {
    const bool end = std::ranges::any_of(ends, [&](const Value& v) { return v.node == n; });
    if (need.contains(n) && !end && (n->op->flags & (ir::kRandom | ir::kEffect | ir::kDataDependent))) return nullptr;
  }
  ops->graph = extract(*graph_, outputs, given);
  return ops;
}

}  // namespace vitrify
