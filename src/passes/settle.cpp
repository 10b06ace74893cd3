#include "passes/settle.h"

#include <algorithm>

namespace vitrify::passes {

bool settle(ir::Graph& g) {
  const sym::Context& ctx = g.ctx();
  if (!ctx.dynamic() || ctx.guards().empty()) return false;
  bool changed = false;
  auto settle = [&](sym::Int& i) {
    const sym::Int now = ctx.settled(i);
    changed = changed || !(now == i);
    i = now;
  };
  for (ir::Node* n : g.nodes()) {
    for (ir::Arg& a : n->args) {
      if (auto* i = std::get_if<sym::Int>(&a)) settle(*i);
      if (auto* l = std::get_if<std::vector<sym::Int>>(&a)) std::ranges::for_each(*l, settle);
    }
    if (ir::is_input(*n) || (n->op->flags & (ir::kDataDependent | ir::kEffect))) continue;
    for (ir::TensorType& t : n->outs)
      for (ir::Dims* dims : {&t.sizes, &t.strides}) std::ranges::for_each(*dims, settle);
  }
  return changed;
}

}  // namespace vitrify::passes
