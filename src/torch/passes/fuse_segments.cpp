// Message passing: x[source] scattered onto destinations with + becomes a sum over neighbours, with the edges grouped once per edge list.
#include <map>

#include "torch/passes/match.h"
#include "torch/passes/passes.h"

namespace vitrify {

using namespace match;

namespace {

struct Row {
  Value edges;   // graph input [2, E]
  int64_t row;
};

// v as one row of a graph input of edges, looking through reshapes that add a last dim of 1 and through expands.
std::optional<Row> edge_row(Value v) {
  while (v && v.type().dim() == 2 && (is(*v.node, "aten::expand") || is(*v.node, "aten::view") || is(*v.node, "aten::unsqueeze"))) {
    const Value x = tensor(*v.node, 0);
    if (!(x.type().sizes[0] == v.type().sizes[0])) return {};
    if (!is(*v.node, "aten::expand") && !v.type().sizes[1].is(1)) return {};
    v = x;
  }
  if (!v || !is(*v.node, "aten::select.int") || v.type().dim() != 1 || v.type().dtype != DType::I64) return {};
  const Value e = tensor(*v.node, 0);
  const auto dim = integer(*v.node, 1), index = integer(*v.node, 2);
  if (!is(*e.node, "graph::input") || e.type().dim() != 2 || !e.type().sizes[0].is(2) || dim != 0 || !index || *index < 0 || *index > 1) return {};
  return Row{e, *index};
}

bool filled_with(Value v, double x) {
  const Node& n = *v.node;
  if (is(n, "aten::new_zeros") || is(n, "aten::zeros") || is(n, "aten::zeros_like")) return x == 0;
  if (is(n, "aten::new_ones") || is(n, "aten::ones") || is(n, "aten::ones_like")) return x == 1;
  if (is(n, "aten::full")) return number(n, 1) == x;
  if (is(n, "aten::new_full") || is(n, "aten::full_like")) return number(n, is(n, "aten::new_full") ? 2 : 1) == x;
  return false;
}

// Fills that only ask a tensor for its type keep it alive: they ask nobody instead.
bool free_fills(Graph& g) {
  bool changed = false;
  const std::vector<Node*> nodes = g.nodes();
  for (Node* n : nodes) {
    const bool zeros = is(*n, "aten::new_zeros"), ones = is(*n, "aten::new_ones");
    if ((!zeros && !ones) || !is(*tensor(*n, 0).node, "aten::index_select") || !is_f32_cpu(n->outs[0]) || !is_static(n->outs[0].sizes)) continue;
    std::vector<sym::Int> sizes(n->outs[0].sizes.begin(), n->outs[0].sizes.end());
    Node* full = insert(g, n, "aten::full", {sizes, sym::Int(ones ? 1 : 0), DType::F32, ir::None{}, n->outs[0].device, ir::None{}}, n->outs[0]);
    g.replace_uses(n->out(), full->out());
    changed = true;
  }
  return changed;
}

}  // namespace

bool fuse_segments(Graph& g, const Options&, PassState& state) {
  using Key = std::tuple<const Node*, int64_t, int64_t, int64_t, int64_t>;
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
    Node*& c = csrs[{from.edges.node, from.row, to.row, sources, nodes}];
    if (!c) {
      c = g.insert_before(first, g.op("vitrify::edge_csr"), {from.edges, sym::Int(from.row), sym::Int(to.row), sym::Int(sources), sym::Int(nodes)},
                          {dense(DType::I32, {sym::Int(nodes + 1)}), dense(DType::I32, {from.edges.type().sizes[1]}), dense(DType::I32, {from.edges.type().sizes[1]})});
    }
    return c;
  };
  auto written = [&](const Value& input) {
    const auto i = static_cast<size_t>(std::get<sym::Int>(input.node->args[0]).value());
    return i < state.written.size() && state.written[i];
  };

  std::vector<std::pair<Node*, Row>> counts;
  bool changed = false;
  const std::vector<Node*> nodes = g.nodes();
  for (Node* n : nodes) {
    if (!is(*n, "aten::scatter_add") || !is_f32_cpu(n->outs[0]) || !is_static(n->outs[0].sizes)) continue;
    const Value init = tensor(*n, 0), values = tensor(*n, 3);
    const auto dim = integer(*n, 1);
    const auto to = edge_row(tensor(*n, 2));
    if (!to || !is_static(to->edges.type().sizes) || written(to->edges) || !filled_with(init, 0)) continue;
    const int64_t count = n->outs[0].sizes[0].value();
    if (count >= INT32_MAX || to->edges.type().sizes[1].value() >= INT32_MAX) continue;
    if (n->outs[0].dim() == 1 && filled_with(values, 1)) {
      counts.push_back({n, *to});
      continue;
    }
    if (n->outs[0].dim() != 2 || (dim != 0 && dim != -2) || !is(*values.node, "aten::index_select")) continue;
    const Value x = tensor(*values.node, 0);
    const auto select_dim = integer(*values.node, 1);
    const auto from = edge_row(tensor(*values.node, 2));
    if (!from || !(from->edges == to->edges) || x.type().dim() != 2 || (select_dim != 0 && select_dim != -2) || !is_f32_cpu(x.type()) || !is_static(x.type().sizes) ||
        !(x.type().sizes[1] == n->outs[0].sizes[1]) || !(tensor(*n, 2).type().sizes == values.type().sizes))
      continue;
    Node* c = csr(*from, *to, x.type().sizes[0].value(), count);
    Node* sum = insert(g, n, "vitrify::segment_sum", {x, c->out(0), c->out(1)}, dense(DType::F32, n->outs[0].sizes));
    g.replace_uses(n->out(), sum->out());
    changed = true;
  }
  // Degrees, of edge lists grouped anyway.
  for (auto& [n, to] : counts)
    for (auto& [key, c] : csrs) {
      if (std::get<0>(key) != to.edges.node || std::get<2>(key) != to.row || !n->outs[0].sizes[0].is(std::get<4>(key))) continue;
      g.replace_uses(n->out(), insert(g, n, "vitrify::edge_degree", {c->out(0)}, n->outs[0])->out());
      break;
    }
  if (!changed) return false;
  free_fills(g);
  g.remove_dead();
  return true;
}

}  // namespace vitrify
