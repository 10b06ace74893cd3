#include "torch/whole.h"

#include "ir/node_map.h"
#include "torch/slice.h"

namespace vitrify {

using ir::Value;

namespace {

// By what is kept: whether gradients through those roots need it.
std::vector<char> read_through(const std::vector<char>& live, const ir::Graph& derivative, size_t kept) {
  ir::NodeSet of_live(derivative), of_others(derivative), needed(derivative);
  for (size_t k = 0; k < live.size(); ++k) (live[k] ? of_live : of_others).insert(derivative.inputs[kept + k].value.node);
  auto reads = [](const ir::Node* n, const ir::NodeSet& set) {
    bool any = false;
    ir::for_each_input(const_cast<ir::Node&>(*n), [&](Value& v) { any = any || set.contains(v.node); });
    return any;
  };
  const auto& nodes = derivative.nodes();
  const auto follow = [&] {
    for (const ir::Node* n : nodes) {
      if (reads(n, of_live))
        of_live.insert(n);
      else if (reads(n, of_others))
        of_others.insert(n);
    }
  };
  follow();
  // Some formulas give zeros, or what they have saved, whatever they are given: gradients that follow from no root, as they are or added to others.
  bool any = false;
  const auto add_if_of_none = [&](Value v) {
    if (!v || of_live.contains(v.node) || of_others.contains(v.node)) return;
    if (is_input(*v.node))
      needed.insert(v.node);
    else
      any = of_live.insert(v.node);
  };
  for (Value v : derivative.outputs) add_if_of_none(v);
  for (const ir::Node* n : nodes)
    if (n->op->name == "aten::add.Tensor" && (of_live.contains(n) || of_others.contains(n)))
      for (size_t i : {0, 1})
        if (const auto* v = std::get_if<Value>(&n->args[i])) add_if_of_none(*v);
  if (any) follow();
  for (size_t i = nodes.size(); i-- > 0;)  // what keeps its order runs whether gradients follow from it or not
    if (of_live.contains(nodes[i]) || needed.contains(nodes[i]) || (nodes[i]->op->flags & (ir::kRandom | ir::kEffect)))
      ir::for_each_input(*nodes[i], [&](Value& v) {
        if (!of_others.contains(v.node)) needed.insert(v.node);
      });
  std::vector<char> r(kept);
  for (size_t k = 0; k < kept; ++k) r[k] = needed.contains(derivative.inputs[k].value.node);
  return r;
}

}  // namespace

std::vector<char> Whole::find_needed(const std::vector<char>& live, size_t kept) const {
  std::vector<char> needed = read_through(live, *graph_, kept);
  const auto uses = ir::count_uses(*graph_);  // what that does not read was kept for others
  for (size_t k = 0; k < kept; ++k) needed[k] = needed[k] || !uses.at(graph_->inputs[k].value.node)[0];
  for (const auto& [snapshot, now] : now_)
    if (needed[snapshot]) needed[now] = 1;
  return needed;
}

std::vector<char> Whole::needed_through(const std::vector<char>& live, size_t kept) const {
  constexpr size_t kMost = 64;  // of many roots, some of which are live in any order
  std::lock_guard lock(mutex_);
  if (const auto known = needed_.find(live); known != needed_.end()) return known->second;
  if (needed_.size() == kMost) needed_.clear();
  return needed_.emplace(live, find_needed(live, kept)).first->second;
}

}  // namespace vitrify
