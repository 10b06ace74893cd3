#include "ir/graph.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "ir/faults.h"
#include "ir/node_map.h"

namespace vitrify::ir {

using Outs = boost::container::small_vector<TensorType, 1>;

Int TensorType::numel() const {
  Int n = 1;
  for (Int s : sizes) n = n * s;
  return n;
}

bool TensorType::is_contiguous() const {
  for (Int s : sizes)
    if (s.is(0)) return true;
  Int expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sym::known_eq(sizes[i], 1) == true) continue;
    if (sym::known_eq(strides[i], expected) != true) return false;
    expected = expected * sizes[i];
  }
  return true;
}

// As eager: a size of 0 counts as 1.
Dims contiguous_strides(const Dims& sizes) {
  Dims strides(sizes.size());
  Int s = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = s;
    s = s * sym::max(sizes[i], 1);
  }
  return strides;
}

Graph::Graph() : Graph(std::make_shared<sym::Context>()) {}
Graph::Graph(std::shared_ptr<sym::Context> ctx) : ctx_(std::move(ctx)), identity_(new char) {}
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
Graph::~Graph() = default;

const Op* Graph::op(std::string_view name, uint32_t flags_if_new) {
  if (auto known = ops_.find(name); known != ops_.end()) return known->second.get();
  const bool plain =
      !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_' || c == ':' || c == '.'; });
  VT_CHECK(plain, "'{}' cannot be the name of an op", name);
  return ops_.emplace(std::string(name), std::make_unique<Op>(Op{std::string(name), flags_if_new})).first->second.get();
}

void Graph::check(const Op* op, const std::vector<Arg>& args, const Outs& outs) const {
  VT_CHECK(op, "a node needs an op");
  auto it = ops_.find(op->name);
  VT_CHECK(it != ops_.end() && it->second.get() == op, "op {} belongs to another graph", op->name);
  auto check_value = [&](const Value& v) {
    if (!v) return;
    VT_CHECK(v.node->owner == identity_.get(), "{}: argument %{} is erased or of another graph", op->name, v.node->id);
    VT_CHECK(v.index < v.node->outs.size(), "{}: %{} has no result {}", op->name, v.node->id, v.index);
  };
  for (const Arg& a : args) {
    if (auto* v = std::get_if<Value>(&a)) check_value(*v);
    if (auto* l = std::get_if<std::vector<Value>>(&a))
      for (const Value& v : *l) check_value(v);
    if (auto* o = std::get_if<OpaqueArg>(&a)) VT_CHECK(o->index < constants.size(), "{}: no constant {}", op->name, o->index);
  }
  for (const TensorType& t : outs)
    VT_CHECK(t.sizes.size() == t.strides.size(), "{}: {} sizes but {} strides", op->name, t.sizes.size(), t.strides.size());
}

Node* Graph::make(uint32_t id, const Op* op, std::vector<Arg> args, Outs outs) {
  check(op, args, outs);
  Node& n = storage_.emplace_back();
  n.id = id;
  n.op = op;
  n.args = std::move(args);
  n.outs = std::move(outs);
  n.owner = identity_.get();
  next_id_ = std::max(next_id_, id + 1);
  return &n;
}

void Graph::add_header(Node* n) {
  order_.insert(order_.begin() + static_cast<ptrdiff_t>(header_), n);
  ++header_;
}

Value Graph::add_input(InputKind kind, std::string name, TensorType type) {
  Node* n = make(next_id_, op("graph::input"), {Int(static_cast<int64_t>(inputs.size()))}, {std::move(type)});
  add_header(n);
  inputs.push_back({n->out(), kind, std::move(name)});
  return n->out();
}

Value Graph::add_constant(TensorType type, std::shared_ptr<void> payload) {
  Node* n = make(next_id_, op("graph::constant"), {Int(static_cast<int64_t>(constants.size()))}, {std::move(type)});
  add_header(n);
  constants.push_back(std::move(payload));
  return n->out();
}

namespace {
void refuse_own(const Op* op) { VT_CHECK(!op || !op->name.starts_with("graph::"), "{} nodes are made by add_input and add_constant", op->name); }
}  // namespace

Node* Graph::append(const Op* op, std::vector<Arg> args, Outs outs) {
  refuse_own(op);
  Node* n = make(next_id_, op, std::move(args), std::move(outs));
  order_.push_back(n);
  return n;
}

Node* Graph::insert_before(Node* at, const Op* op, std::vector<Arg> args, Outs outs) {
  refuse_own(op);
  VT_CHECK(at && at->owner == identity_.get(), "insert_before: the place is not in this graph");
  const auto place = std::find(order_.begin(), order_.end(), at) - order_.begin();
  VT_CHECK(static_cast<size_t>(place) >= header_, "insert_before: %{} is an input or a constant", at->id);
  Node* n = make(next_id_, op, std::move(args), std::move(outs));
  size_t missing = 0;
  std::unordered_set<const Node*> used;
  for_each_input(*n, [&](Value& v) { missing += used.insert(v.node).second; });
  for (ptrdiff_t i = place; missing > 0 && i-- > 0;) missing -= used.contains(order_[static_cast<size_t>(i)]);
  if (missing) n->owner = nullptr;
  VT_CHECK(missing == 0, "insert_before: an argument of {} is defined after %{}", op->name, at->id);
  order_.insert(order_.begin() + place, n);
  return n;
}

void Graph::check_replacement(Value from, Value to) const {
  VT_CHECK(from && from.node->owner == identity_.get(), "replace_uses: the value replaced is not in this graph");
  VT_CHECK(!to || (to.node->owner == identity_.get() && to.index < to.node->outs.size()), "replace_uses: the new value is not in this graph");
}

void Graph::replace_uses(Value from, Value to) {
  check_replacement(from, to);
  auto replace = [&](Value& v) {
    if (v == from) v = to;
  };
  for (Node* n : order_) for_each_input(*n, replace);
  for (Value& v : outputs) replace(v);
}

void Graph::replace_uses(const ValueMap<Value>& map) {
  if (map.empty()) return;
  auto replace = [&](Value& v) {
    size_t steps = 0;
    for (const Value* to = v ? map.find(v) : nullptr; to; to = v ? map.find(v) : nullptr) {
      if (v == *to) break;
      v = *to;
      VT_CHECK(++steps <= map.size(), "replace_uses: a cycle");
    }
  };
  for (const auto& [from, to] : map) check_replacement(from, to);
  for (Node* n : order_) for_each_input(*n, replace);
  for (Value& v : outputs) replace(v);
}

void Graph::erase(Node* n) {
  VT_CHECK(n && n->owner == identity_.get(), "erase: not in this graph");
  for (const Input& i : inputs) VT_CHECK(i.value.node != n, "erase: %{} is an input", n->id);
  for (const Value& v : outputs) VT_CHECK(v.node != n, "erase: %{} is an output", n->id);
  size_t place = order_.size();
  for (size_t i = 0; i < order_.size(); ++i) {
    if (order_[i] == n) place = i;
    for_each_input(*order_[i], [&](Value& v) { VT_CHECK(v.node != n, "erase: %{} uses %{}", order_[i]->id, n->id); });
  }
  if (place < header_) --header_;
  order_.erase(order_.begin() + static_cast<ptrdiff_t>(place));
  n->owner = nullptr;
  n->args.clear();
}

// A number that is beyond what the type holds.
static bool out_of_range(const Arg& a, DType type) {
  if (auto* c = std::get_if<Complex>(&a)) return c->im != 0 && type != DType::Opaque && !is_complex(type);
  double most = 0;
  switch (type) {
    case DType::F16:
      most = 65504;
      break;
    case DType::BF16:
      most = 3.3895313892515355e38;
      break;
    case DType::F32:
      most = std::numeric_limits<float>::max();
      break;
    case DType::U8:
      most = 255;
      break;
    case DType::I8:
      most = 127;
      break;
    case DType::I16:
      most = 32767;
      break;
    case DType::I32:
      most = 2147483647;
      break;
    case DType::I64:
      most = 0x1p63;
      break;
    default:
      return false;
  }
  if (auto* i = std::get_if<Int>(&a))  // huge ones are ends of slices
    return i->is_const() && std::abs(static_cast<double>(i->value())) > most && std::abs(static_cast<double>(i->value())) < 0x1p62;
  auto* d = std::get_if<double>(&a);
  if (!d) return false;
  if (is_int(type)) return !(std::abs(*d) <= most) || (type == DType::U8 && *d < 0);  // no NaN either
  return std::abs(*d) > most && std::isfinite(*d);
}

bool may_fault(const Node& n) {
  if (n.op->flags & kFaults) return true;
  if (n.op->flags & kNamesDims) {
    auto* dims = n.args.size() > 1 ? std::get_if<std::vector<Int>>(&n.args[1]) : nullptr;
    auto* x = std::get_if<Value>(&n.args[0]);
    return dims && dims->empty() && x && *x && x->type().dim() > 0;
  }
  if (!n.outs.empty() && !(n.op->flags & kView))
    for (const Arg& a : n.args)
      if (out_of_range(a, n.outs[0].dtype)) return true;
  if (n.op->flags & kNarrows && !n.outs.empty())
    for (const Arg& a : n.args)
      if (auto* v = std::get_if<Value>(&a); v && *v && v->type().dim() == 0 && v->type().dtype != n.outs[0].dtype && v->type().dtype != DType::Bool)
        return true;
  if (!(n.op->flags & kDivides) || n.outs.empty() || !is_int(n.outs[0].dtype) || n.args.size() < 2) return false;
  const Arg* divisor = &n.args[1];
  if (auto* v = std::get_if<Value>(divisor); v && *v && v->node->op->name == "aten::scalar_tensor") divisor = &v->node->args[0];
  auto* number = std::get_if<Int>(divisor);
  if (!number || !number->is_const()) return true;
  const size_t bits = 8 * size_of(n.outs[0].dtype);  // it divides as what the result's type holds of it
  return (bits < 64 ? number->value() & ((int64_t{1} << bits) - 1) : number->value()) == 0;
}

namespace {

// Nodes whose results are the first of some size that only the run finds: others may be as large, and need no operand to say so.
void insert_finders(const Graph& g, NodeSet& live) {
  std::unordered_set<uint32_t> known;
  for (Node* n : const_cast<Graph&>(g).nodes())
    for (const TensorType& t : n->outs)
      for (sym::Int s : t.sizes)
        if (!s.is_const() && sym::is_symbol(s) && known.insert(sym::view(s).symbol->id).second && (n->op->flags & kDataDependent)) live.insert(n);
}

NodeSet live_nodes(const Graph& g, const NodeSet& roots) {
  NodeSet live(g);
  for (const Value& v : g.outputs)
    if (v) live.insert(v.node);
  for (const Input& i : g.inputs) live.insert(i.value.node);
  for (size_t i = g.nodes().size(); i-- > 0;) {
    Node* n = g.nodes()[i];
    if (n->op->flags & (kRandom | kEffect) || roots.contains(n)) live.insert(n);
    if (live.contains(n)) for_each_input(*n, [&](Value& v) { live.insert(v.node); });
  }
  return live;
}

}  // namespace

std::vector<Node*> dead_nodes(const Graph& g) {
  NodeSet roots(g);
  insert_finders(g, roots);
  for (Node* n : g.nodes())
    if (may_fault(*n)) roots.insert(n);
  const NodeSet live = live_nodes(g, roots);
  std::vector<Node*> dead;
  for (Node* n : g.nodes())
    if (!live.contains(n)) dead.push_back(n);
  return dead;
}

void cut_dead_readers(Graph& g) {
  for (Node* n : dead_nodes(g)) n->args.clear();
}

void retire(Graph& g, Node& n) {
  if (!may_fault(n) || n.outs.size() != 1) return;
  Value operand;
  for_each_input(n, [&](Value& v) {
    if (!operand) operand = v;
  });
  n.op = g.op("aten::alias", kView);
  n.args = {operand};
}

size_t Graph::remove_dead() {
  NodeSet roots(*this), read(*this);
  insert_finders(*this, roots);
  for (Node* n : order_) for_each_input(*n, [&](Value& v) { read.insert(v.node); });
  for (Node* n : order_)
    if (may_fault(*n) && !read.contains(n)) roots.insert(n);
  const NodeSet live = live_nodes(*this, roots);
  size_t kept = 0, header = 0;
  for (size_t i = 0; i < order_.size(); ++i) {
    Node* n = order_[i];
    if (live.contains(n)) {
      header += i < header_;
      order_[kept++] = n;
    } else {
      n->owner = nullptr;
      n->args.clear();
    }
  }
  const size_t removed = order_.size() - kept;
  order_.resize(kept);
  header_ = header;
  return removed;
}

void Graph::set_order(std::vector<Node*> order) {
  VT_CHECK(order.size() == order_.size(), "set_order: {} nodes, the graph has {}", order.size(), order_.size());
  NodeSet done(*this);
  size_t header = 0, placed = 0;
  for (Node* n : order) {
    VT_CHECK(n && n->owner == identity_.get(), "set_order: a node of another graph");
    for_each_input(*n, [&](Value& v) { VT_CHECK(done.contains(v.node), "set_order: %{} comes before its operand %{}", n->id, v.node->id); });
    VT_CHECK(done.insert(n), "set_order: %{} twice", n->id);
    ++placed;
    if (n->op->name.starts_with("graph::")) {
      VT_CHECK(header + 1 == placed, "set_order: inputs and constants come first");
      ++header;
    }
  }
  order_ = std::move(order);
}

NodeMap<UseCounts> count_uses(const Graph& g) {
  NodeMap<UseCounts> uses(g);
  for (const Node* n : g.nodes()) uses[n].resize(n->outs.size());
  for (Node* n : g.nodes()) for_each_input(*n, [&](Value& v) { ++uses[v.node][v.index]; });
  for (const Value& v : g.outputs)
    if (v) ++uses[v.node][v.index];
  return uses;
}

std::vector<uint32_t> effect_order(const Graph& g) {
  std::vector<uint32_t> ids;
  for (const Node* n : g.nodes())
    if (n->op->flags & (kRandom | kEffect)) ids.push_back(n->id);
  return ids;
}

}  // namespace vitrify::ir
