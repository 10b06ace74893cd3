// Message passing: x[source] scattered onto destinations with + becomes a sum over neighbours, with the edges grouped once per edge list.
// So does a sum of weighted messages; a softmax over a node's edges that makes the weights goes with it.
#include <algorithm>
#include <map>
#include <optional>

#include "ir/faults.h"
#include "ops/lowering.h"
#include "torch/passes/match.h"
#include "torch/passes/passes.h"
#include "torch/slice.h"

namespace vitrify {

using namespace match;

namespace {

struct Row {
  Value edges;  // [2, E]: a graph input, or what follows from such by integer ops
  int64_t row;
  bool operator==(const Row& o) const { return edges == o.edges && row == o.row; }
};

// v as one row of edges, looking through reshapes that add last dims of 1 and through expands.
std::optional<Row> edge_row(Value v) {
  while (v && v.type().dim() >= 2 && (is(*v.node, "aten::expand") || is(*v.node, "aten::view") || is(*v.node, "aten::unsqueeze"))) {
    const Value x = tensor(*v.node, 0);
    if (x.type().dim() == 0 || !(x.type().sizes[0] == v.type().sizes[0])) return {};
    if (is(*v.node, "aten::expand") ? x.type().dim() != v.type().dim()
                                    : !std::all_of(v.type().sizes.begin() + 1, v.type().sizes.end(), [](sym::Int i) { return i.is(1); }))
      return {};
    v = x;
  }
  if (!v || !is(*v.node, "aten::select.int") || v.type().dim() != 1 || v.type().dtype != DType::I64) return {};
  const Value e = tensor(*v.node, 0);
  const auto dim = integer(*v.node, 1), index = integer(*v.node, 2);
  if (e.type().dim() != 2 || !e.type().sizes[0].is(2) || dim != 0 || !index || *index < 0 || *index > 1) return {};
  return Row{e, *index};
}

// x[rows of `index`], along dim 0.
struct Gather {
  Value x;
  Row row;
};
std::optional<Gather> gather(Value v) {
  if (!v || !is(*v.node, "aten::index_select")) return {};
  const Value x = tensor(*v.node, 0);
  const auto dim = integer(*v.node, 1);
  const auto row = edge_row(tensor(*v.node, 2));
  if (!row || !is_f32_cpu(x.type()) || x.type().dim() == 0 || (dim != 0 && dim != -static_cast<int64_t>(x.type().dim()))) return {};
  return Gather{x, *row};
}

bool filled_with(Value v, double x) {
  const ops::OpRow* row = ops::find_op(v.node->op->name);
  if (!row || !row->filled || row->filled == ops::kNothing) return false;
  return row->filled > 0 ? number(*v.node, static_cast<size_t>(row->filled)) == x : x == (row->filled == ops::kOnes ? 1 : 0);
}

// Values scattered with `op` onto zeros along dim 0 by a row of edges.
std::optional<Gather> scattered(Value v, std::string_view op) {
  if (!v || !is(*v.node, op) || !is_f32_cpu(v.type()) || v.type().dim() == 0) return {};
  const auto dim = integer(*v.node, 1);
  const Value index = tensor(*v.node, 2), values = tensor(*v.node, 3);
  if ((dim != 0 && dim != -static_cast<int64_t>(v.type().dim())) || !values || !filled_with(tensor(*v.node, 0), 0) ||
      !(index.type().sizes == values.type().sizes))
    return {};
  const auto to = edge_row(index);
  return to ? std::optional(Gather{values, *to}) : std::nullopt;
}

struct Softmax {
  Value logits;
  double epsilon;
};
// exp(l - max) / (sum + epsilon), max and sum over the edges that end in a node.
std::optional<Softmax> edge_softmax(Value w, const Row& to, sym::Int nodes) {
  if (!w || !is(*w.node, "aten::div.Tensor")) return {};
  const Value e = tensor(*w.node, 0);
  const auto below = gather(tensor(*w.node, 1));
  if (!e || !below || !(below->row == to) || !is(*below->x.node, "aten::add.Tensor") || number(*below->x.node, 2) != 1) return {};
  const Value offset = tensor(*below->x.node, 1);
  if (!offset || !is(*offset.node, "aten::scalar_tensor")) return {};
  const auto epsilon = number(*offset.node, 0);
  const auto sum = scattered(tensor(*below->x.node, 0), "aten::scatter_add");
  if (!epsilon || !sum || !(sum->x == e) || !(sum->row == to) || !is(*e.node, "aten::exp")) return {};
  const Value difference = tensor(*e.node, 0);
  if (!difference || !is(*difference.node, "aten::sub.Tensor") || number(*difference.node, 2) != 1) return {};
  const Value logits = tensor(*difference.node, 0);
  const auto top = gather(tensor(*difference.node, 1));
  if (!logits || !top || !(top->row == to) || !(logits.type().sizes == w.type().sizes)) return {};
  const Node& reduce = *top->x.node;
  const auto max = scattered(top->x, "aten::scatter_reduce.two");
  if (!max || !(max->x == logits) || !(max->row == to) || std::get<std::string>(reduce.args[4]) != "amax" || flag(reduce, 5)) return {};
  if (!(top->x.type().sizes[0] == nodes) || !(below->x.type().sizes[0] == nodes)) return {};
  return Softmax{logits, *epsilon};
}

}  // namespace

bool fuse_segments(Graph& g, const Options&, PassState& state) {
  using Edges = std::pair<const Node*, uint32_t>;  // a node may give several edge lists
  const auto id = [](const Value& v) { return Edges{v.node, v.index}; };
  using Key = std::tuple<Edges, int64_t, int64_t, int64_t, int64_t>;
  std::map<Key, Node*> csrs;
  Node* first = nullptr;
  for (Node* n : g.nodes())
    if (!n->op->name.starts_with("graph::")) {
      first = n;
      break;
    }
  if (!first) return false;
  // Grouped edges are made before everything else: they depend on an input only.
  auto csr = [&](const Row& from, const Row& to, int64_t sources, int64_t nodes) -> Node* {
    Node*& c = csrs[{id(from.edges), from.row, to.row, sources, nodes}];
    if (!c) {
      Node* at = first;
      if (!is_input(*from.edges.node)) {
        const auto& all = g.nodes();
        auto it = std::find(all.begin(), all.end(), from.edges.node);
        if (it == all.end() || ++it == all.end()) return nullptr;
        at = *it;
      }
      c = g.insert_before(at, g.op("vitrify::edge_csr"), {from.edges, sym::Int(from.row), sym::Int(to.row), sym::Int(sources), sym::Int(nodes)},
                          {dense(DType::I32, {sym::Int(nodes + 1)}), dense(DType::I32, {from.edges.type().sizes[1]}),
                           dense(DType::I32, {from.edges.type().sizes[1]})});
    }
    return c;
  };
  auto unwritten = [&](uint32_t i) { return !(i < state.written.size() && state.written[i]); };
  std::map<Edges, bool> usable;
  auto edges_usable = [&](const Value& e) {
    auto [it, fresh] = usable.try_emplace(id(e), false);
    if (fresh)
      it->second = is_input(*e.node) ? is_static(e.type().sizes) && e.type().sizes[1].value() < INT32_MAX && follows_from_integers(g, e, unwritten)
                                     : follows_from_integers(g, e, unwritten);
    return it->second;
  };

  // Of edges that are checked, and whose sum nobody reads, nothing would be left that checks them.
  std::optional<ir::NodeSet> read;
  const auto is_read = [&](const Node* n) {
    if (!read) {
      std::vector<Value> results;
      std::ranges::copy_if(g.outputs, std::back_inserter(results), [](const Value& v) { return static_cast<bool>(v); });
      read = nodes_behind(g, results);
    }
    return read->contains(n);
  };

  std::vector<std::pair<Node*, Row>> counts;
  bool changed = false;
  const std::vector<Node*> nodes = g.nodes();
  for (Node* n : nodes) {
    if (!is(*n, "aten::scatter_add") || !is_static(n->outs[0].sizes) || !is_read(n)) continue;
    const auto sum = scattered(n->out(), "aten::scatter_add");
    if (!sum || !edges_usable(sum->row.edges)) continue;
    const Value values = sum->x;
    const Row& to = sum->row;
    const int64_t count = n->outs[0].sizes[0].value();
    const size_t rank = n->outs[0].dim();
    if (count >= INT32_MAX) continue;
    if (rank == 1 && filled_with(values, 1)) {
      counts.push_back({n, to});
      continue;
    }
    // x[N, ...] of the result's shape but for N.
    auto sources = [&](const std::optional<Gather>& from) {
      return from && from->row.edges == to.edges && from->x.type().dim() == rank && is_static(from->x.type().sizes) &&
             std::equal(from->x.type().sizes.begin() + 1, from->x.type().sizes.end(), n->outs[0].sizes.begin() + 1);
    };
    if (auto from = gather(values); rank == 2 && sources(from)) {
      Node* c = csr(from->row, to, from->x.type().sizes[0].value(), count);
      if (!c) continue;
      g.replace_uses(n->out(), insert(g, n, "vitrify::segment_sum", {from->x, c->out(0), c->out(1)}, dense(DType::F32, n->outs[0].sizes))->out());
      n->op = g.op("aten::alias", ir::kView);  // the grouping raises of rows out of range, in place of the index_select: that is read by what is dead
      n->args = {values};
      changed = true;
      continue;
    }
    if ((rank != 2 && rank != 3) || !is(*values.node, "aten::mul.Tensor")) continue;
    for (size_t side : {0, 1}) {
      const auto from = gather(tensor(*values.node, side));
      Value w = tensor(*values.node, 1 - side);
      // One weight per edge and head.
      if (!sources(from) || !w || !is_f32_cpu(w.type()) || w.type().dim() != rank || !(w.type().sizes[0] == values.type().sizes[0]) ||
          !w.type().sizes[rank - 1].is(1) || (rank == 3 && !(w.type().sizes[1] == n->outs[0].sizes[1])))
        continue;
      if ((is(*w.node, "aten::unsqueeze") || is(*w.node, "aten::view")) && tensor(*w.node, 0).type().dim() == rank - 1) w = tensor(*w.node, 0);
      Node* c = csr(from->row, to, from->x.type().sizes[0].value(), count);
      if (!c) break;
      Node* fused;
      if (auto softmax = edge_softmax(w, to, n->outs[0].sizes[0]))
        fused = insert(g, n, "vitrify::edge_attention", {from->x, softmax->logits, softmax->epsilon, c->out(0), c->out(1), c->out(2)},
                       dense(DType::F32, n->outs[0].sizes));
      else
        fused = insert(g, n, "vitrify::weighted_segment_sum", {from->x, w, c->out(0), c->out(1), c->out(2)}, dense(DType::F32, n->outs[0].sizes));
      g.replace_uses(n->out(), fused->out());
      ir::retire(g, *n);
      changed = true;
      break;
    }
  }
  // Degrees, of edge lists grouped anyway.
  for (auto& [n, to] : counts)
    for (auto& [key, c] : csrs) {
      if (std::get<0>(key) != id(to.edges) || std::get<2>(key) != to.row || !n->outs[0].sizes[0].is(std::get<4>(key))) continue;
      g.replace_uses(n->out(), insert(g, n, "vitrify::edge_degree", {c->out(0)}, n->outs[0])->out());
      ir::retire(g, *n);
      break;
    }
  if (!changed) return false;
  g.remove_dead();
  return true;
}

}  // namespace vitrify
