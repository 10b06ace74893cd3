#include "passes/canonicalize.h"

#include <ranges>

#include "ir/node_map.h"
#include "ir/views.h"
#include "passes/output_storage.h"

namespace vitrify::passes {

using ir::Arg;
using ir::Node;
using ir::TensorType;
using ir::Value;
using sym::Int;

namespace {

// "aten::to.dtype" -> "to"; empty for ops of other libraries.
std::string_view base_name(const Node& n) {
  std::string_view s = n.op->name;
  if (!s.starts_with("aten::")) return {};
  s.remove_prefix(6);
  return s.substr(0, s.find('.'));
}

bool one_of(std::string_view s, std::initializer_list<std::string_view> l) {
  for (std::string_view x : l)
    if (s == x) return true;
  return false;
}

Value tensor_arg(const Node& n, size_t i) {
  const Value* v = i < n.args.size() ? std::get_if<Value>(&n.args[i]) : nullptr;
  return v ? *v : Value{};
}

// The number an argument stands for: a scalar, or a tensor made from one.
std::optional<double> number(const Node& n, size_t i) {
  if (i >= n.args.size()) return {};
  const Arg* a = &n.args[i];
  if (Value v = tensor_arg(n, i)) {
    if (v.node->op->name != "aten::scalar_tensor" || v.node->args.empty()) return {};
    a = &v.node->args[0];
  }
  if (auto* e = std::get_if<Int>(a)) return e->is_const() ? std::optional<double>(static_cast<double>(e->value())) : std::nullopt;
  if (auto* d = std::get_if<double>(a)) return *d;
  return {};
}

using Perm = std::vector<int64_t>;

// Result dim d of a permutation op is dim perm[d] of its operand.
std::optional<Perm> permutation(const Node& n) {
  const std::string_view s = base_name(n);
  const Value x = tensor_arg(n, 0);
  if (!x || n.outs.size() != 1) return {};
  const int64_t rank = static_cast<int64_t>(x.type().dim());
  auto wrap = [&](int64_t d) { return d < 0 ? d + rank : d; };
  Perm p(static_cast<size_t>(rank));
  for (int64_t d = 0; d < rank; ++d) p[static_cast<size_t>(d)] = d;
  if (s == "t") {
    if (rank == 2) std::swap(p[0], p[1]);
    return p;
  }
  if (n.op->name == "aten::transpose.int" && n.args.size() == 3) {
    auto *a = std::get_if<Int>(&n.args[1]), *b = std::get_if<Int>(&n.args[2]);
    if (!a || !b || !a->is_const() || !b->is_const()) return {};
    const int64_t i = wrap(a->value()), j = wrap(b->value());
    if (i < 0 || j < 0 || i >= rank || j >= rank) return rank == 0 ? std::optional<Perm>(p) : std::nullopt;
    std::swap(p[static_cast<size_t>(i)], p[static_cast<size_t>(j)]);
    return p;
  }
  if (s == "permute" && n.args.size() == 2) {
    auto* dims = std::get_if<std::vector<Int>>(&n.args[1]);
    if (!dims || static_cast<int64_t>(dims->size()) != rank) return {};
    for (size_t d = 0; d < dims->size(); ++d) {
      if (!(*dims)[d].is_const()) return {};
      p[d] = wrap((*dims)[d].value());
      if (p[d] < 0 || p[d] >= rank) return {};
    }
    return p;
  }
  return {};
}

// Moves no element: dims of size 1 may change places freely.
bool is_identity(const Perm& p, const TensorType& operand) {
  int64_t last = -1;
  for (int64_t d : p) {
    if (operand.sizes[static_cast<size_t>(d)].is(1)) continue;
    if (d < last) return false;
    last = d;
  }
  return true;
}

bool is_reshape(const Node& n) {
  return one_of(base_name(n), {"view", "_unsafe_view", "reshape"}) && n.op->name != "aten::view.dtype" && n.outs.size() == 1 && n.args.size() == 2;
}

// Complex numbers that calls are given may be a conjugate or negative view, which what looks at their memory refuses, and those that ATen writes a
// part of lie in a copy of all their memory: a copy does not.
bool may_be_lazy(Value v) {
  if (!is_complex(v.type().dtype) && v.type().dtype != DType::Opaque) return false;
  for (; v.node->op->flags & ir::kView; v = std::get<Value>(v.node->args[0]))
    if (v.node->op->flags & ir::kMakesBits) return true;
  return ir::is_input(*v.node) || v.node->op->flags & ir::kCopiesMemory;
}

// The operand that n's first result equals, bit for bit and in type.
Value same_as(const Node& n) {
  const Value x = tensor_arg(n, 0);
  if (!x || n.outs.empty() || !(n.outs[0] == x.type())) return {};
  const std::string_view s = base_name(n);
  const TensorType& t = n.outs[0];
  if (n.outs.size() == 1) {
    if (one_of(s, {"clone", "_to_copy"}) && may_be_lazy(x)) return {};
    if (one_of(s, {"clone", "alias", "detach", "contiguous", "_to_copy", "to", "lift_fresh", "lift_fresh_copy"})) return x;
    // Equal sizes leave these nothing to do.
    if (one_of(s, {"expand", "_unsafe_view", "reshape"}) || n.op->name == "aten::view" || n.op->name == "aten::slice.Tensor") return x;
    if (auto p = permutation(n); p && is_identity(*p, x.type())) return x;
    if (one_of(s, {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}) && n.args.size() == 3) {
      auto* train = std::get_if<bool>(&n.args[2]);
      if (train && !*train) return x;
    }
  }
  if (n.outs.size() == 1 && (is_int(t.dtype) || is_float(t.dtype))) {
    if (s == "mul" && number(n, 1) == 1.0) return x;
    if (s == "div" && n.args.size() == 2 && is_float(t.dtype) && number(n, 1) == 1.0) return x;
    // Not for floats: -0.0 + 0.0 is 0.0.
    if (one_of(s, {"add", "sub"}) && is_int(t.dtype) && number(n, 1) == 0.0) return x;
  }
  return {};
}

// 1*x and 0+x
Value same_as_second(const Node& n) {
  const Value y = tensor_arg(n, 1);
  if (!y || n.outs.size() != 1 || !(n.outs[0] == y.type())) return {};
  const std::string_view s = base_name(n);
  const DType t = y.type().dtype;
  if (s == "mul" && (is_int(t) || is_float(t)) && number(n, 0) == 1.0) return y;
  if (s == "add" && is_int(t) && number(n, 0) == 0.0 && number(n, 2) == 1.0) return y;
  return {};
}

// Lets n read through the operand's operand.
bool shorten(ir::Graph& g, Node& n) {
  const Value x = tensor_arg(n, 0);
  if (!x) return false;
  Node& inner = *x.node;
  const Value y = tensor_arg(inner, 0);
  if (!y) return false;
  if (is_reshape(n) && is_reshape(inner) && y.type().is_contiguous() && n.outs[0].is_contiguous()) {
    n.args[0] = y;
    return true;
  }
  const auto outer_perm = permutation(n), inner_perm = outer_perm ? permutation(inner) : std::nullopt;
  if (!inner_perm) return false;
  std::vector<Int> dims;
  for (int64_t d : *outer_perm) dims.push_back((*inner_perm)[static_cast<size_t>(d)]);
  n.op = g.op("aten::permute", ir::kView);
  n.args = {y, std::move(dims)};
  return true;
}

// The values whose own memory, from its beginning, somebody looks at through views, or keeps.
ir::ValueMap<bool> looked_into(const ir::Graph& g) {
  ir::ValueMap<bool> r(g);
  for (Node* n : std::views::reverse(g.nodes())) {
    if (n->op->flags & ir::kEffect) ir::for_each_input(*n, [&](Value& v) { r.emplace(v, true); });
    bool looks = n->op->flags & ir::kStartsAligned;
    for (uint32_t i = 0; i < n->outs.size() && n->op->flags & ir::kView; ++i) looks = looks || r.contains({n, i});
    if (const Value of = looks ? tensor_arg(*n, 0) : Value{}) r.emplace(of, true);
  }
  return r;
}

}  // namespace

bool canonicalize(ir::Graph& g, const Options&) {
  OutputStorage storage(g);
  ir::ValueMap<Value> same(g);
  const ir::ValueMap<bool> fresh = looked_into(g);
  bool changed = false;
  auto resolve = [&](Value& v) {
    if (const Value* other = v ? same.find(v) : nullptr) v = *other;
  };
  for (Node* n : g.nodes()) {
    ir::for_each_input(*n, resolve);
    if (n->op->name.starts_with("graph::") || (n->op->flags & ir::kEffect)) continue;
    while (shorten(g, *n)) changed = true;
    Value to = same_as(*n);
    if (!to) to = same_as_second(*n);
    if (to && !(n->op->flags & ir::kView) && fresh.contains(n->out())) continue;  // what it begins in would be another's memory
    if (!to || !storage.replace(n->out(), to)) continue;
    same.emplace(n->out(), to);
    changed = true;
    // A dropout that draws nothing is no random op any more.
    if (n->op->flags & ir::kRandom) {
      n->op = g.op("aten::alias", ir::kView);
      n->args = {to};
    }
  }
  if (!changed) return false;
  for (Value& v : g.outputs) resolve(v);
  g.remove_dead();
  return true;
}

}  // namespace vitrify::passes
