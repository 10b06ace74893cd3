#include "torch/slice.h"

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>

namespace vitrify {

using ir::Graph;
using ir::Node;
using ir::Value;

namespace {

bool is_input(const Node& n) { return n.op->name == "graph::input"; }
bool is_constant(const Node& n) { return n.op->name == "graph::constant"; }
uint32_t input_index(const Node& n) { return static_cast<uint32_t>(std::get<sym::Int>(n.args[0]).value()); }

// Whose results have which symbol as a size, in the graph's order.
using Makers = std::unordered_map<uint32_t, std::vector<Node*>>;
Makers makers_of(const Graph& g) {
  Makers m;
  for (Node* n : const_cast<Graph&>(g).nodes())
    for (const ir::TensorType& t : n->outs)
      for (sym::Int i : t.sizes)
        if (!i.is_const() && sym::is_symbol(i)) m[sym::view(i).symbol->id].push_back(n);
  return m;
}
// Symbols among the arguments of a node.
std::vector<sym::Int> symbols_in(const Node& n) {
  std::vector<sym::Int> r;
  auto add = [&](sym::Int i) {
    if (!i.is_const()) sym::free_symbols(i, r);
  };
  for (const ir::Arg& a : n.args) {
    if (auto* i = std::get_if<sym::Int>(&a)) add(*i);
    if (auto* l = std::get_if<std::vector<sym::Int>>(&a))
      for (sym::Int i : *l) add(i);
  }
  return r;
}

}  // namespace

Slice slice(const Graph& g, const std::vector<Value>& outs) {
  Slice s;
  s.graph = std::make_shared<Graph>(const_cast<Graph&>(g).shared_ctx());
  Graph& p = *s.graph;
  std::vector<Node*> need;
  std::unordered_set<Node*> seen;
  const Makers makers = makers_of(g);
  std::function<void(Node*)> visit = [&](Node* n) {
    if (!seen.insert(n).second) return;
    ir::for_each_input(*n, [&](Value& v) { visit(v.node); });
    if (is_input(*n)) return;
    for (sym::Int s : symbols_in(*n))  // ones([s]) needs what found s, which need not be an operand
      if (auto m = makers.find(sym::view(s).symbol->id); m != makers.end() && !is_input(*m->second[0])) visit(m->second[0]);
  };
  for (const Value& v : outs) visit(v.node);
  for (Node* n : const_cast<Graph&>(g).nodes())
    if (seen.contains(n)) need.push_back(n);
  std::unordered_map<Node*, Node*> copy;
  p.constants = g.constants;
  for (Node* n : need) {
    if (is_input(*n)) {
      const uint32_t i = input_index(*n);
      copy[n] = p.add_input(g.inputs[i].kind, g.inputs[i].name, n->outs[0]).node;
      s.sources.push_back(i);
      continue;
    }
    if (is_constant(*n)) {
      copy[n] = p.add_constant(n->outs[0], g.constants[static_cast<size_t>(std::get<sym::Int>(n->args[0]).value())]).node;
      continue;
    }
    auto args = n->args;
    for (ir::Arg& a : args) {
      if (auto* v = std::get_if<Value>(&a); v && *v) v->node = copy.at(v->node);
      if (auto* l = std::get_if<std::vector<Value>>(&a))
        for (Value& v : *l)
          if (v) v.node = copy.at(v.node);
    }
    copy[n] = p.append(p.op(n->op->name, n->op->flags), std::move(args), n->outs);
  }
  for (const Value& v : outs) p.outputs.push_back({copy.at(v.node), v.index});
  return s;
}

bool follows_from_integers(const Graph& g, Value v, const std::function<bool(uint32_t)>& may_read) {
  std::unordered_set<const Node*> seen;
  bool ok = true, reads = false;
  const Makers makers = makers_of(g);
  auto readable = [&](const Node* n) {
    const ir::TensorType& t = g.inputs[input_index(*n)].value.type();
    return (is_int(t.dtype) || t.dtype == DType::Bool) && t.device.kind == DeviceKind::CPU && may_read(input_index(*n));
  };
  std::function<void(Node*)> visit = [&](Node* n) {
    if (!ok || !seen.insert(n).second || is_constant(*n)) return;
    if (is_input(*n)) {
      ok = readable(n);
      reads = true;
      return;
    }
    for (sym::Int s : symbols_in(*n)) {  // a size that other tensors have makes it theirs too
      auto m = makers.find(sym::view(s).symbol->id);
      if (m == makers.end()) return void(ok = false);
      auto of = std::find_if(m->second.begin(), m->second.end(), [&](Node* k) { return !is_input(*k) || readable(k); });
      if (of == m->second.end()) return void(ok = false);
      visit(*of);
    }
    ok = ok && !(n->op->flags & (ir::kRandom | ir::kEffect | ir::kDataDependent)) && n->op->name.find("::empty") == std::string::npos;
    if (ok) ir::for_each_input(*n, [&](Value& x) { visit(x.node); });
  };
  if (!v) return false;
  visit(v.node);
  return ok && reads;
}

bool same_computation(const Value& a, const Value& b) {
  if (!a || !b) return !a == !b;
  if (a.node == b.node) return a.index == b.index;
  const Node &x = *a.node, &y = *b.node;
  if (a.index != b.index || x.op != y.op || x.args.size() != y.args.size() || is_input(x) || is_constant(x) ||
      (x.op->flags & (ir::kRandom | ir::kEffect)))
    return false;
  for (size_t i = 0; i < x.args.size(); ++i) {
    const ir::Arg &p = x.args[i], &q = y.args[i];
    if (p.index() != q.index()) return false;
    if (auto* v = std::get_if<Value>(&p)) {
      if (!same_computation(*v, std::get<Value>(q))) return false;
    } else if (auto* l = std::get_if<std::vector<Value>>(&p)) {
      const auto& m = std::get<std::vector<Value>>(q);
      if (l->size() != m.size()) return false;
      for (size_t k = 0; k < m.size(); ++k)
        if (!same_computation((*l)[k], m[k])) return false;
    } else if (!(p == q)) {
      return false;
    }
  }
  return true;
}

}  // namespace vitrify
