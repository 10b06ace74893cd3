#include "torch/snapshots.h"

namespace vitrify {

using ir::Node;
using ir::Value;

bool Snapshots::is_view(const Node& n) const { return (n.op->flags & ir::kView) || layouts_.contains(&n); }

Value Snapshots::of(Value v, Node* before) {
  if (!is_view(*v.node)) {
    if (const Value* known = roots_.find(v)) return *known;
    const Value w = was_(v, before);
    roots_.emplace(v, w ? w : v);
    return w ? w : v;
  }
  if (const auto known = views_.find(v.node); known != views_.end()) return known->second->out(v.index);
  const Value base = std::get<Value>(v.node->args[0]), was = of(base, before);
  if (was == base) return v;
  std::vector<ir::Arg> args(v.node->args.begin(), v.node->args.end());
  args[0] = was;
  Node* view = g_.insert_before(before, v.node->op, std::move(args), v.node->outs);
  view->source = v.node->source;
  views_.emplace(v.node, view);
  return view->out(v.index);
}

void Snapshots::redirect(Node* n) {
  if (!is_view(*n)) ir::for_each_input(*n, [&](Value& v) { v = of(v, n); });
}

Value copy_before(ir::Graph& g, Node* before, Value v) {
  ir::TensorType type = v.type();
  type.wrapped_number = false;
  return g.insert_before(before, g.op("aten::clone"), {v, ir::MemoryFormat::Preserve}, {type})->out();
}

Value again_before(ir::Graph& g, Node* before, Value v) {
  Node* n = v.node;
  Node* made = g.insert_before(before, n->op, std::vector<ir::Arg>(n->args.begin(), n->args.end()), n->outs);
  made->source = n->source;
  made->as_contiguous = n->as_contiguous;
  return made->out(v.index);
}

}  // namespace vitrify
