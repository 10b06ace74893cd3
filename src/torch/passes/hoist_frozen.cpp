// Moves what depends on weights only out of the call.
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "ir/faults.h"
#include "ops/lowering.h"
#include "torch/convert.h"
#include "torch/passes/passes.h"
#include "torch/slice.h"

namespace vitrify {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

// Below this many elements, or when it is a mere view, a value is as cheap to make again as to look up.
constexpr int64_t kMinNumel = 512;

bool static_type(const ir::TensorType& t) {
  auto constant = [](const ir::Dims& d) { return std::all_of(d.begin(), d.end(), [](sym::Int i) { return i.is_const(); }); };
  return constant(t.sizes) && constant(t.strides) && !is_undefined(t);
}
bool static_args(const Node& n) {
  for (const ir::Arg& a : n.args) {
    if (auto* i = std::get_if<sym::Int>(&a); i && !i->is_const()) return false;
    if (auto* l = std::get_if<std::vector<sym::Int>>(&a))
      for (sym::Int i : *l)
        if (!i.is_const()) return false;
  }
  return true;
}
bool pure(const Node& n) { return reads_content(n) || !(n.op->flags & (ir::kRandom | ir::kEffect | ir::kDataDependent)); }
bool is_own(const Node& n) { return n.op->name.starts_with("graph::"); }

int64_t bytes_of(const ir::TensorType& t) { return t.numel().value() * static_cast<int64_t>(size_of(t.dtype)); }

bool always_worth(const Node& n) { return n.op->name.find("_reorder_") != std::string::npos || reads_content(n) || n.op->name == "aten::clone"; }

struct Hoister {
  Graph& g;
  const Options& options;
  PassState& state;
  std::unordered_map<const Node*, uint32_t> input_of;  // input nodes that may be read
  ir::NodeSet frozen;                                  // compute nodes that may move
  ir::NodeSet weighty;                                 // of these: with compute worth moving in their past
  ir::NodeSet keyed;                                   // of these: read an argument
  ir::NodeSet wanted;                                  // what is keyed for certain

  void find_frozen() {
    for (uint32_t i = 0; i < g.inputs.size(); ++i)
      if (i >= state.num_args && !(i < state.written.size() && state.written[i]) && static_type(g.inputs[i].value.type()))
        input_of[g.inputs[i].value.node] = i;
    find_wanted();
    ir::NodeSet fills(g);  // pure and of nothing
    for (Node* n : g.nodes()) {
      if (is_own(*n) || !pure(*n)) continue;
      bool ok = true, reads_weight = false, heavy = false, key = wanted.contains(n), filled = false, only_fills = true;
      ir::for_each_input(*n, [&](Value& v) {
        only_fills = only_fills && fills.contains(v.node);
        if (ir::is_input(*v.node) && input_of.contains(v.node) && !weight_input(v.node)) {
          key = reads_weight = true;
          return;
        }
        if (fills.contains(v.node)) {
          filled = true;
          return;
        }
        const bool in = input_of.contains(v.node) && ir::is_input(*v.node) && weight_input(v.node);
        const bool constant = ir::is_constant(*v.node);
        ok = ok && (in || constant || frozen.contains(v.node));
        reads_weight = reads_weight || in || (frozen.contains(v.node));
        heavy = heavy || weighty.contains(v.node);
        key = key || keyed.contains(v.node);
      });
      if (only_fills && n->op->name.find("::empty") == std::string::npos) fills.insert(n);
      if (!key) {  // keyed values come and go with the sizes of their arguments
        ok = ok && !filled && static_args(*n);
        for (auto& t : n->outs) ok = ok && static_type(t);
      }
      if (!ok || !reads_weight) continue;
      frozen.insert(n);
      if (key) keyed.insert(n);
      const bool big = !(n->op->flags & ir::kView) && !key && n->outs[0].numel().value() >= kMinNumel;
      if (heavy || big || always_worth(*n)) weighty.insert(n);
    }
    // Whatever an extern call reads needs memory and a kernel that fills it, however small.
    for (Node* n : g.nodes()) {
      if (is_own(*n) || frozen.contains(n) || !ops::is_extern(n->op->name)) continue;
      ir::for_each_input(*n, [&](Value& v) {
        if (frozen.contains(v.node) && computes(v.node)) weighty.insert(v.node);
      });
    }
  }
  // What ops that may read arguments need of them.
  void find_wanted() {
    auto unwritten = [&](uint32_t i) { return !(i < state.written.size() && state.written[i]); };
    std::function<void(Node*)> visit = [&](Node* n) {
      if (ir::is_input(*n)) input_of.try_emplace(n, static_cast<uint32_t>(std::get<sym::Int>(n->args[0]).value()));
      if (is_own(*n) || !wanted.insert(n)) return;
      ir::for_each_input(*n, [&](Value& v) { visit(v.node); });
    };
    for (Node* n : g.nodes())
      if (reads_content(*n) && follows_from_integers(g, std::get<Value>(n->args[0]), unwritten)) visit(n);
  }
  // Anything but views of inputs in its past.
  bool computes(Node* n) const {
    if (is_own(*n)) return false;
    if (!(n->op->flags & ir::kView)) return true;
    bool some = false;
    ir::for_each_input(*n, [&](Value& v) { some = some || computes(v.node); });
    return some;
  }
  bool weight_input(const Node* n) const { return input_of.at(n) >= state.num_args; }

  // Values made by weighty nodes and used by what stays.
  std::vector<Value> crossing() {
    std::vector<Value> out;
    std::unordered_set<uint64_t> seen;
    auto use = [&](const Value& v) {
      if (weighty.contains(v.node) && seen.insert(static_cast<uint64_t>(v.node->id) << 32 | v.index).second) out.push_back(v);
    };
    for (Node* n : g.nodes())
      if (!weighty.contains(n)) ir::for_each_input(*n, [&](Value& v) { use(v); });
    for (Value& v : g.outputs)
      if (v) use(v);
    for (Node* n : g.nodes())  // their sizes are those of the plan
      if (n->op->name == "vitrify::mask_positions") use(n->out());
    return out;
  }

  FrozenGroup extract(const std::vector<Value>& outs) {
    Slice cut = slice(g, outs);
    cut.graph->name = g.name + ".frozen";
    return {std::move(cut.graph), std::move(cut.sources), {}};
  }

  void inputs_below(Node* n, ir::NodeSet& seen, std::vector<uint32_t>& out) {
    if (!seen.insert(n)) return;
    if (ir::is_input(*n)) return out.push_back(input_of.at(n));
    ir::for_each_input(*n, [&](Value& v) { inputs_below(v.node, seen, out); });
  }

  bool run() {
    find_frozen();
    std::vector<Value> values;
    int64_t spent = state.packed_bytes;
    for (const Value& v : crossing()) {
      const int64_t bytes = keyed.contains(v.node) || always_worth(*v.node) ? 0 : bytes_of(v.type());
      if (spent + bytes > most_packed(options, state, PackedFor::Any)) continue;
      spent += bytes;
      values.push_back(v);
    }
    if (values.empty()) return false;
    // Values that share a source change together: one group each.
    std::vector<size_t> parent(values.size());
    std::iota(parent.begin(), parent.end(), 0);
    std::function<size_t(size_t)> root = [&](size_t i) { return parent[i] == i ? i : parent[i] = root(parent[i]); };
    std::unordered_map<uint32_t, size_t> owner;
    for (size_t i = 0; i < values.size(); ++i) {
      ir::NodeSet seen;
      std::vector<uint32_t> sources;
      inputs_below(values[i].node, seen, sources);
      for (uint32_t s : sources) {
        auto [it, fresh] = owner.try_emplace(s, i);
        if (!fresh) parent[root(i)] = root(it->second);
      }
    }
    std::vector<std::vector<Value>> groups(values.size());
    for (size_t i = 0; i < values.size(); ++i) groups[root(i)].push_back(values[i]);
    for (auto& outs : groups) {
      if (outs.empty()) continue;
      FrozenGroup group = extract(outs);
      for (const Value& v : outs) {
        group.results.push_back(static_cast<uint32_t>(g.inputs.size()));
        g.replace_uses(v, g.add_input(ir::InputKind::Captured, fmt::format("frozen{}", g.inputs.size()), v.type()));
        ir::retire(g, *v.node);
      }
      state.groups.push_back(std::move(group));
    }
    g.remove_dead();
    return true;
  }
};

}  // namespace

bool PassState::is_frozen(Value v) const {
  if (!v) return false;
  std::unordered_set<Value> seen{v};
  std::vector<Value> open{v};
  while (!open.empty()) {
    const Value x = open.back();
    open.pop_back();
    if (!static_type(x.type())) return false;
    if (ir::is_constant(*x.node)) continue;
    if (ir::is_input(*x.node)) {
      const auto i = static_cast<uint32_t>(std::get<sym::Int>(x.node->args[0]).value());
      if (i < num_args || (i < written.size() && written[i])) return false;
      continue;
    }
    if (!pure(*x.node) || !static_args(*x.node)) return false;
    ir::for_each_input(*x.node, [&](Value& y) {
      if (seen.insert(y).second) open.push_back(y);
    });
  }
  return true;
}

int64_t most_packed(const Options& options, const PassState& state, PackedFor use) {
  constexpr double kShareOfWeights = 0.10;
  const double all = static_cast<double>(options.packed_weight_mb << 20);
  if (all == 0 || use == PackedFor::Convolution) return static_cast<int64_t>(all);
  double weights = 0;
  for (const at::Tensor& t : *state.captured)
    if (t.defined()) weights += static_cast<double>(t.nbytes());
  return static_cast<int64_t>((use == PackedFor::Product ? all * 5 / 8 : all) + kShareOfWeights * weights);
}

bool hoist_frozen(Graph& g, const Options& o, PassState& s) { return Hoister{g, o, s}.run(); }

}  // namespace vitrify
