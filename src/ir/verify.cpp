#include <algorithm>
#include <unordered_set>

#include "ir/graph.h"

namespace vitrify::ir {

void verify(const Graph& g, const std::vector<uint32_t>* effect_order_before) {
  std::unordered_set<const Node*> defined;
  std::unordered_set<uint32_t> ids;
  defined.reserve(g.nodes().size());
  size_t input_nodes = 0;
  bool body = false;
  for (Node* n : g.nodes()) {
    VT_CHECK(n && n->op, "a null node or op in the order");
    auto fail = [&](const std::string& what) { throw InternalError(fmt::format("verify: {}: {}", print(*n), what)); };
    if (!ids.insert(n->id).second) fail("id used twice");
    for_each_input(*n, [&](Value& v) {
      if (!defined.contains(v.node)) fail(fmt::format("uses %{}, which is not defined earlier in this graph", v.node->id));
      if (v.index >= v.node->outs.size()) fail(fmt::format("%{} has no result {}", v.node->id, v.index));
    });
    for (const Arg& a : n->args)
      if (auto* o = std::get_if<OpaqueArg>(&a); o && o->index >= g.constants.size()) fail(fmt::format("no constant {}", o->index));
    for (const TensorType& t : n->outs) {
      if (t.sizes.size() != t.strides.size()) fail("sizes and strides differ in length");
      for (Int s : t.sizes)
        // of what sizes make together, as the last of some chunks, only the hint may show it
        if (!sym::known_le(0, s).value_or(!sym::is_symbol(s) && sym::has_hint(s) && sym::hint(s) >= 0))
          fail(fmt::format("size {} may be negative", sym::str(s)));
      // Elements that share memory are a view's, or a custom op's: what other nodes make has one place for each.
      if ((n->op->flags & (kView | kEffect)) || n->op->name.starts_with("graph::") || std::ranges::any_of(t.sizes, [](Int i) { return i.is(0); }))
        continue;
      for (size_t d = 0; d < t.sizes.size(); ++d)
        if (t.strides[d].is(0) && !t.sizes[d].is(1)) fail("makes elements that share memory");
    }
    if (n->op->name.starts_with("graph::")) {
      if (body) fail("inputs and constants come first");
      const Int* index = n->args.size() == 1 ? std::get_if<Int>(&n->args[0]) : nullptr;
      if (!index || !index->is_const() || index->value() < 0 || n->outs.size() != 1) fail("one constant index and one result expected");
      const size_t i = static_cast<size_t>(index->value());
      if (is_input(*n)) {
        ++input_nodes;
        if (i >= g.inputs.size() || !(g.inputs[i].value == n->out())) fail("is not the value of that input");
      } else if (is_constant(*n)) {
        if (i >= g.constants.size()) fail("no such constant");
      } else {
        fail("unknown op of the graph itself");
      }
    } else {
      body = true;
    }
    defined.insert(n);
  }
  VT_CHECK(input_nodes == g.inputs.size(), "verify: {} inputs but {} graph::input nodes", g.inputs.size(), input_nodes);
  for (size_t i = 0; i < g.outputs.size(); ++i) {
    const Value& v = g.outputs[i];
    VT_CHECK(!v || (defined.contains(v.node) && v.index < v.node->outs.size()), "verify: output {} does not exist", i);
  }
  if (effect_order_before) {
    std::vector<uint32_t> now = effect_order(g), kept;
    const std::unordered_set<uint32_t> before(effect_order_before->begin(), effect_order_before->end()), after(now.begin(), now.end());
    std::erase_if(now, [&](uint32_t id) { return !before.contains(id); });
    for (uint32_t id : *effect_order_before)
      if (after.contains(id)) kept.push_back(id);
    for (size_t i = 0; i < now.size(); ++i) VT_CHECK(now[i] == kept[i], "verify: %{} was moved across another node with an effect", now[i]);
  }
}

}  // namespace vitrify::ir
