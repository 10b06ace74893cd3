// What the fusing passes ask of a graph.
#pragma once
#include <optional>

#include "ir/node_map.h"
#include "torch/convert.h"

namespace vitrify::match {

using ir::Graph;
using ir::Node;
using ir::Value;
using Uses = ir::NodeMap<boost::container::small_vector<Node*, 2>>;

inline bool is(const Node& n, std::string_view name) { return n.op->name == name; }
inline Value tensor(const Node& n, size_t i) {
  auto* v = i < n.args.size() ? std::get_if<Value>(&n.args[i]) : nullptr;
  return v ? *v : Value{};
}
inline std::optional<int64_t> integer(const Node& n, size_t i) {
  auto* v = i < n.args.size() ? std::get_if<sym::Int>(&n.args[i]) : nullptr;
  return v && v->is_const() ? std::optional(v->value()) : std::nullopt;
}
inline std::optional<double> number(const Node& n, size_t i) {
  if (auto v = integer(n, i)) return static_cast<double>(*v);
  auto* d = i < n.args.size() ? std::get_if<double>(&n.args[i]) : nullptr;
  return d ? std::optional(*d) : std::nullopt;
}
inline bool flag(const Node& n, size_t i) {
  auto* b = i < n.args.size() ? std::get_if<bool>(&n.args[i]) : nullptr;
  return b && *b;
}
inline bool is_f32_cpu(const ir::TensorType& t) { return t.dtype == DType::F32 && t.device.kind == DeviceKind::CPU; }
inline double hint_of(sym::Int e) { return e.is_const() ? double(e.value()) : sym::has_hint(e) ? double(sym::hint(e)) : 0; }
inline bool is_static(const ir::Dims& d) {
  for (auto i : d)
    if (!i.is_const()) return false;
  return true;
}

// Every node that reads a value of a node; an entry per use. Graph outputs count as a null user.
inline Uses users(const Graph& g) {
  Uses out(g);
  for (Node* n : g.nodes()) ir::for_each_input(*n, [&](Value& v) { out[v.node].push_back(n); });
  for (const Value& v : g.outputs)
    if (v) out[v.node].push_back(nullptr);
  return out;
}
// The one node that reads anything of n, or null.
inline Node* sole_user(const Uses& u, const Node* n) {
  const auto& by = u.at(n);
  return by.size() == 1 ? by[0] : nullptr;
}

inline Node* insert(Graph& g, Node* at, std::string_view op, std::vector<ir::Arg> args, ir::TensorType out, uint32_t flags = ir::kPure) {
  Node* n = g.insert_before(at, g.op(op, flags), std::move(args), {std::move(out)});
  n->source = at->source;
  return n;
}

// Many insertions and replacements in one sweep over the graph, made by finish().
class Rewriter {
 public:
  explicit Rewriter(Graph& g) : g_(g), order_(g.nodes()) {}
  Node* insert(Node* at, std::string_view op, std::vector<ir::Arg> args, ir::TensorType out, uint32_t flags = ir::kPure) {
    Node* n = g_.append(g_.op(op, flags), std::move(args), {std::move(out)});
    n->source = at->source;
    before_[at].push_back(n);
    changed_ = true;
    return n;
  }
  void replace(Value from, Value to) { same_.emplace(from, to); }
  bool finish() {
    if (!changed_ && same_.empty()) return false;
    std::vector<Node*> order;
    for (Node* n : order_) {
      const std::vector<Node*>& before = before_.at(n);
      order.insert(order.end(), before.begin(), before.end());
      order.push_back(n);
    }
    g_.set_order(std::move(order));
    g_.replace_uses(same_);
    g_.remove_dead();
    return true;
  }

 private:
  Graph& g_;
  std::vector<Node*> order_;  // before the insertions
  ir::NodeMap<std::vector<Node*>> before_;
  ir::ValueMap<Value> same_;
  bool changed_ = false;
};

// A Scalar?[] argument: the IR has no such list.
inline ir::Arg scalars(Graph& g, const std::vector<double>& v) {
  c10::List<std::optional<at::Scalar>> l;
  for (double x : v) l.push_back(at::Scalar(x));
  g.constants.push_back(std::make_shared<c10::IValue>(l));
  return ir::OpaqueArg{static_cast<uint32_t>(g.constants.size() - 1)};
}

inline ir::TensorType dense(DType t, const ir::Dims& sizes) {
  ir::TensorType out;
  out.dtype = t;
  out.sizes = sizes;
  out.strides = ir::contiguous_strides(sizes);
  return out;
}

// oneDNN's name of a pointwise op that may follow a product.
struct PostOp {
  std::string attr, algorithm;
  std::vector<double> scalars;
};
std::optional<PostOp> post_op(const Node&);

}  // namespace vitrify::match
