#include "torch/slice.h"

#include <algorithm>
#include <functional>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace vitrify {

using ir::Graph;
using ir::Node;
using ir::Value;

uint32_t input_index(const Node& n) { return static_cast<uint32_t>(std::get<sym::Int>(n.args[0]).value()); }

namespace {

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

// The roots and everything they need, but for what `given` holds of.
ir::NodeSet reach(const Graph& g, const std::vector<Node*>& roots, const ir::ValueMap<Value>& given) {
  ir::NodeSet need(g);
  Makers makers = makers_of(g);
  for (const auto& [v, copy] : given)
    for (sym::Int i : v.type().sizes)
      if (!i.is_const() && sym::is_symbol(i)) makers.erase(sym::view(i).symbol->id);
  std::vector<Node*> todo;
  auto visit = [&](Node* n) {
    if (need.insert(n) && !is_input(*n)) todo.push_back(n);
  };
  for (Node* n : roots) visit(n);
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    ir::for_each_input(*n, [&](Value& v) {
      if (!given.contains(v)) visit(v.node);
    });
    if (makers.empty()) continue;
    for (sym::Int s : symbols_in(*n))  // ones([s]) needs what found s, which need not be an operand
      if (auto m = makers.find(sym::view(s).symbol->id); m != makers.end() && !is_input(*m->second[0])) visit(m->second[0]);
  }
  return need;
}

}  // namespace

std::shared_ptr<Graph> extract(const Graph& g, const std::vector<Value>& outs, const std::vector<Value>& given, const std::vector<Node*>& also,
                               ir::ValueMap<Value>* copies) {
  auto p = std::make_shared<Graph>(const_cast<Graph&>(g).shared_ctx());
  p->constants = g.constants;
  p->sources = g.sources;
  ir::ValueMap<Value> copy(g);
  for (const Value& v : given) {
    const bool input = is_input(*v.node);
    const ir::InputKind kind = input ? g.inputs[input_index(*v.node)].kind : ir::InputKind::Saved;
    copy.emplace(v, p->add_input(kind, input ? g.inputs[input_index(*v.node)].name : fmt::format("saved{}", v.node->id), v.type()));
  }
  std::vector<Node*> roots = also;
  for (const Value& v : outs)
    if (v && !copy.contains(v)) roots.push_back(v.node);
  const ir::NodeSet need = reach(g, roots, copy);
  for (Node* n : const_cast<Graph&>(g).nodes()) {
    if (!need.contains(n)) continue;
    VT_CHECK(!is_input(*n) || copy.contains(n->out()), "input '{}' is needed and not given", g.inputs[input_index(*n)].name);
    if (is_input(*n)) continue;
    if (is_constant(*n)) {
      copy.emplace(n->out(), p->add_constant(n->outs[0], g.constants[static_cast<size_t>(std::get<sym::Int>(n->args[0]).value())]));
      continue;
    }
    auto args = n->args;
    for (ir::Arg& a : args) {
      if (auto* v = std::get_if<Value>(&a); v && *v) *v = copy.at(*v);
      if (auto* l = std::get_if<std::vector<Value>>(&a))
        for (Value& v : *l)
          if (v) v = copy.at(v);
    }
    Node* made = p->append(p->op(n->op->name, n->op->flags), std::move(args), n->outs);
    made->source = n->source;
    made->as_contiguous = n->as_contiguous;
    for (uint32_t i = 0; i < std::max<size_t>(n->outs.size(), 1); ++i) copy.emplace(n->out(i), made->out(i));  // also where there is no result
  }
  for (const Value& v : outs) p->outputs.push_back(v ? copy.at(v) : v);
  if (copies) *copies = std::move(copy);
  return p;
}

Slice slice(const Graph& g, const std::vector<Value>& outs) {
  Slice s;
  std::vector<Node*> roots;
  for (const Value& v : outs) roots.push_back(v.node);
  const auto need = reach(g, roots, {});
  std::vector<Value> given;
  for (uint32_t i = 0; i < g.inputs.size(); ++i)
    if (need.contains(g.inputs[i].value.node)) {
      s.sources.push_back(i);
      given.push_back(g.inputs[i].value);
    }
  s.graph = extract(g, outs, given);
  return s;
}

ir::NodeSet nodes_behind(const Graph& g, const std::vector<Value>& values, const std::vector<Value>& ends) {
  ir::NodeSet behind(g), last(g);
  for (Value v : values)
    if (v) behind.insert(v.node);
  for (Value v : ends)
    if (v) last.insert(v.node);
  for (size_t i = g.nodes().size(); i-- > 0;)
    if (Node* n = g.nodes()[i]; behind.contains(n) && !last.contains(n)) ir::for_each_input(*n, [&](Value& v) { behind.insert(v.node); });
  return behind;
}

void compute_late(Graph& g, const ir::NodeSet& again) {
  std::vector<Node*> order;
  ir::NodeSet placed(g);
  const Makers makers = makers_of(g);
  std::function<void(Node*)> place = [&](Node* n) {
    if (!placed.insert(n)) return;
    ir::for_each_input(*n, [&](Value& v) { place(v.node); });
    for (sym::Int s : symbols_in(*n))  // a size that the run finds may be read as a number, by no operand
      if (const auto made = makers.find(sym::view(s).symbol->id); made != makers.end()) place(made->second.front());
    order.push_back(n);
  };
  for (Node* n : g.nodes())
    if (n->op->name.starts_with("graph::")) place(n);
  for (Node* n : g.nodes())
    if (!again.contains(n)) place(n);
  for (Node* n : g.nodes()) place(n);
  g.set_order(std::move(order));
}

std::unordered_set<uint32_t> symbols_in(const Graph& g) {
  std::vector<sym::Int> all;
  for (const Node* n : g.nodes()) {
    for (sym::Int i : symbols_in(*n)) all.push_back(i);
    for (const ir::TensorType& t : n->outs)
      for (const ir::Dims& dims : {t.sizes, t.strides})
        for (sym::Int i : dims)
          if (!i.is_const()) sym::free_symbols(i, all);
  }
  std::unordered_set<uint32_t> ids;
  for (sym::Int i : all) ids.insert(sym::view(i).symbol->id);
  return ids;
}

std::vector<Value> carriers(const Graph& g, const std::vector<Value>& given, const std::unordered_set<uint32_t>& symbols,
                            const std::function<bool(Value)>& may) {
  std::unordered_set<uint32_t> known;
  std::vector<Value> r;
  auto look = [&](const Value& v) {
    bool fresh = false;
    for (sym::Int i : v.type().sizes)
      if (!i.is_const() && sym::is_symbol(i) && symbols.contains(sym::view(i).symbol->id))
        fresh = known.insert(sym::view(i).symbol->id).second || fresh;
    return fresh;
  };
  for (const Value& v : given) look(v);
  for (Node* n : const_cast<Graph&>(g).nodes())
    for (uint32_t i = 0; i < n->outs.size(); ++i)
      if ((!may || may(n->out(i))) && look(n->out(i))) r.push_back(n->out(i));
  return r;
}

bool reads_content(const Node& n) { return n.op->name == "vitrify::edge_csr" || n.op->name == "vitrify::mask_positions"; }

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
    ok = ok && (reads_content(*n) || !(n->op->flags & (ir::kRandom | ir::kEffect | ir::kDataDependent))) &&
         n->op->name.find("::empty") == std::string::npos;
    if (ok) ir::for_each_input(*n, [&](Value& x) { visit(x.node); });
  };
  if (!v) return false;
  visit(v.node);
  return ok && reads;
}

namespace {

bool same_computation(const Value& a, const Value& b, std::set<std::pair<const Node*, const Node*>>& met) {
  if (!a || !b) return !a == !b;
  if (a.node == b.node) return a.index == b.index;
  const Node &x = *a.node, &y = *b.node;
  if (a.index != b.index || x.op != y.op || x.args.size() != y.args.size() || is_input(x) || is_constant(x) ||
      (x.op->flags & (ir::kRandom | ir::kEffect)))
    return false;
  if (!met.emplace(&x, &y).second) return true;  // or what led here will say no
  for (size_t i = 0; i < x.args.size(); ++i) {
    const ir::Arg &p = x.args[i], &q = y.args[i];
    if (p.index() != q.index()) return false;
    if (auto* v = std::get_if<Value>(&p)) {
      if (!same_computation(*v, std::get<Value>(q), met)) return false;
    } else if (auto* l = std::get_if<std::vector<Value>>(&p)) {
      const auto& m = std::get<std::vector<Value>>(q);
      if (l->size() != m.size()) return false;
      for (size_t k = 0; k < m.size(); ++k)
        if (!same_computation((*l)[k], m[k], met)) return false;
    } else if (!(p == q)) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool same_computation(const Value& a, const Value& b) {
  std::set<std::pair<const Node*, const Node*>> met;
  return same_computation(a, b, met);
}

}  // namespace vitrify
