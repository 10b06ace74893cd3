#include "torch/absent.h"

#include <algorithm>

#include "torch/passes/match.h"
#include "torch/slice.h"
#include "torch/tangents.h"

namespace vitrify {

using ir::Node;
using ir::Value;

namespace {

// The other operand of the sum `n`, where it is of the sum's type.
Value added_to(const Node& n, Value tangent) {
  if (n.op->name != "aten::add.Tensor" || n.args.size() != 3 || !(n.args[2] == ir::Arg(sym::Int(1)))) return {};
  const Value *a = std::get_if<Value>(&n.args[0]), *b = std::get_if<Value>(&n.args[1]);
  if (!a || !b || !*a || !*b || (*a == tangent) == (*b == tangent)) return {};
  const Value other = *a == tangent ? *b : *a;
  return other.type() == n.outs[0] && tangent.type() == n.outs[0] ? other : Value{};
}

// The only thing done with a tangent, or with a view of it.
struct Use {
  Value of;
  Node* by = nullptr;
};
std::optional<Use> use_of(Value tangent, const match::Uses& uses) {
  for (Value v = tangent;;) {
    Node* by = match::sole_user(uses, v.node);
    if (!by) return std::nullopt;
    if (!(by->op->flags & ir::kView)) return Use{v, by};
    v = by->out();
  }
}

}  // namespace

void find_added(JointProgram& j, const std::unordered_set<uint32_t>& sums) {
  if (j.roots.size() < 2 || sums.empty()) return;
  const match::Uses uses = match::users(*j.program.graph);
  std::unordered_set<Value> owned;  // memory of gradients
  for (size_t o = j.num_forward; o < j.outputs.size(); ++o)
    if (j.outputs[o]) owned.insert(root_of(j.outputs[o]));
  for (JointProgram::Root& r : j.roots) {
    const auto use = use_of(r.tangent, uses);
    if (!use || !sums.contains(use->by->id)) continue;
    const Value sum = use->by->out(), other = added_to(*use->by, use->of);
    // A tangent itself may be undefined as well; a gradient that the caller gets has memory of its own.
    if (!other || is_input(*root_of(other).node)) continue;
    if (owned.contains(r.tangent) || owned.contains(root_of(other)) || owned.contains(sum)) continue;
    // Of three terms and more the first two decide the layout.
    r.added = std::ranges::none_of(uses.at(sum.node), [&](const Node* n) { return n && sums.contains(n->id); });
  }
}

std::optional<BackwardProgram> backward_without(const JointProgram& j, const BackwardProgram& all, const std::vector<size_t>& absent) {
  for (size_t k : absent)
    if (!j.roots[k].added) return std::nullopt;
  for (const ResultSpec& r : all.results)
    if (is_of_tangent(r) && std::ranges::find(absent, r.index) != absent.end()) return std::nullopt;
  auto copy = [](const ir::Graph& g, const std::vector<Value>& inputs) {
    std::vector<Node*> unordered;
    for (Node* n : g.nodes())
      if (n->op->flags & (ir::kRandom | ir::kEffect)) unordered.push_back(n);
    return extract(g, g.outputs, inputs, unordered);
  };
  std::vector<Value> inputs;
  for (const ir::Input& in : all.graph->inputs) inputs.push_back(in.value);
  const std::shared_ptr<ir::Graph> g = copy(*all.graph, inputs);
  std::vector<Value> tangents;
  for (size_t k : absent) tangents.push_back(g->inputs[all.saved.size() + k].value);
  const match::Uses uses = match::users(*g);
  ir::ValueMap<Value> without(*g);
  for (Value t : tangents) {
    const auto use = use_of(t, uses);
    const Value other = use ? added_to(*use->by, use->of) : Value{};  // passes may have changed layouts
    if (!other) return std::nullopt;
    without.emplace(use->by->out(), other);
  }
  g->replace_uses(without);
  inputs.clear();
  for (const ir::Input& in : g->inputs)
    if (std::ranges::find(tangents, in.value) == tangents.end()) inputs.push_back(in.value);
  g->remove_dead();
  BackwardProgram b = all;
  b.graph = copy(*g, inputs);
  return b;
}

}  // namespace vitrify
