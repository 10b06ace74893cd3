// Ops of our own for graph neural networks. Graphs name them; they are called through the dispatcher like any other.
#include <torch/library.h>

#include "runtime/segment.h"
#include "torch/team.h"

namespace vitrify {

namespace {

constexpr int64_t kEdgesPerThread = 2048;

// Rows `source` and `destination` of edge_index[2, E], grouped by destination: (begins[nodes + 1], columns[E], order[E]).
std::tuple<at::Tensor, at::Tensor, at::Tensor> edge_csr(const at::Tensor& edge_index, int64_t source, int64_t destination, int64_t sources,
                                                        int64_t nodes) {
  TORCH_CHECK(edge_index.dim() == 2 && edge_index.scalar_type() == at::kLong && edge_index.size(1) < INT32_MAX);
  const int64_t edges = edge_index.size(1), step = edge_index.stride(1);
  const auto* base = edge_index.const_data_ptr<int64_t>();
  const int64_t *s = base + source * edge_index.stride(0), *d = base + destination * edge_index.stride(0);
  for (int64_t e = 0; e < edges; ++e) TORCH_CHECK_INDEX(s[e * step] >= 0 && s[e * step] < sources, "index out of range in self");
  at::Tensor begins = at::empty({nodes + 1}, at::kInt), columns = at::empty({edges}, at::kInt), order = at::empty({edges}, at::kInt);
  const int64_t bad =
      runtime::group_edges(s, step, d, step, edges, nodes, begins.data_ptr<int32_t>(), columns.data_ptr<int32_t>(), order.data_ptr<int32_t>());
  TORCH_CHECK(bad < 0, "index ", d[bad * step], " is out of bounds for dimension 0 with size ", nodes);
  return {begins, columns, order};
}

at::Tensor edge_degree(const at::Tensor& begins) {
  const int64_t nodes = begins.size(0) - 1;
  at::Tensor out = at::empty({nodes}, at::kFloat);
  const auto* b = begins.const_data_ptr<int32_t>();
  auto* o = out.data_ptr<float>();
  for (int64_t i = 0; i < nodes; ++i) o[i] = static_cast<float>(b[i + 1] - b[i]);
  return out;
}

// Nodes are split where their edges split evenly.
template <class F>
void over_nodes(const at::Tensor& begins, int64_t edges, int64_t edges_per_thread, F&& f) {
  const int64_t nodes = begins.size(0) - 1;
  const auto* b = begins.const_data_ptr<int32_t>();
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(team_size(), edges / edges_per_thread));
  auto border = [&](int64_t p) {
    return p == 0 ? 0 : p == parts ? nodes : std::lower_bound(b, b + nodes, static_cast<int32_t>(edges * p / parts)) - b;
  };
  for_parts(parts, [&](int64_t p) { f(border(p), border(p + 1)); });
}

// x[nodes, heads, width] or [nodes, width]; weights[edges, heads] or one per edge.
at::Tensor weighted(const at::Tensor& x_, const at::Tensor& weights_, bool softmax, double epsilon, const at::Tensor& begins,
                    const at::Tensor& columns, const at::Tensor& order) {
  const at::Tensor x = x_.contiguous(), weights = weights_.contiguous();
  const int64_t edges = columns.size(0), nodes = begins.size(0) - 1, heads = x.dim() == 3 ? x.size(1) : 1, row = x.stride(0);
  TORCH_CHECK(weights.numel() == edges * heads);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[0] = nodes;
  at::Tensor out = at::empty(sizes, x.options());
  const runtime::Attention a{x.const_data_ptr<float>(),
                             row,
                             weights.const_data_ptr<float>(),
                             begins.const_data_ptr<int32_t>(),
                             columns.const_data_ptr<int32_t>(),
                             order.const_data_ptr<int32_t>(),
                             heads,
                             x.size(-1),
                             softmax,
                             static_cast<float>(epsilon),
                             out.data_ptr<float>()};
  over_nodes(begins, edges, kEdgesPerThread / 2, [&](int64_t first, int64_t last) { runtime::attend(a, first, last); });
  return out;
}

at::Tensor edge_attention(const at::Tensor& x, const at::Tensor& logits, double epsilon, const at::Tensor& begins, const at::Tensor& columns,
                          const at::Tensor& order) {
  return weighted(x, logits, true, epsilon, begins, columns, order);
}
at::Tensor weighted_segment_sum(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& begins, const at::Tensor& columns,
                                const at::Tensor& order) {
  return weighted(x, weights, false, 0, begins, columns, order);
}

at::Tensor segment_sum(const at::Tensor& x_, const at::Tensor& begins, const at::Tensor& columns) {
  const at::Tensor x = x_.dim() == 2 && x_.stride(1) == 1 ? x_ : x_.contiguous();
  const int64_t nodes = begins.size(0) - 1, edges = columns.size(0), width = x.size(1);
  at::Tensor out = at::empty({nodes, width}, x.options());
  over_nodes(begins, edges, kEdgesPerThread, [&](int64_t first, int64_t last) {
    runtime::sum_neighbours(x.const_data_ptr<float>(), x.stride(0), begins.const_data_ptr<int32_t>(), columns.const_data_ptr<int32_t>(),
                            out.data_ptr<float>(), width, first, last);
  });
  return out;
}

at::Tensor mask_positions(const at::Tensor& mask) { return mask.nonzero().view({-1}); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(vitrify, m) {
  m.def("edge_csr(Tensor edge_index, int source, int destination, int sources, int nodes) -> (Tensor, Tensor, Tensor)");
  m.def("mask_positions(Tensor mask) -> Tensor", {at::Tag::dynamic_output_shape});
  m.def("edge_degree(Tensor begins) -> Tensor");
  m.def("edge_attention(Tensor x, Tensor logits, float epsilon, Tensor begins, Tensor columns, Tensor order) -> Tensor");
  m.def("weighted_segment_sum(Tensor x, Tensor weights, Tensor begins, Tensor columns, Tensor order) -> Tensor");
  m.def("segment_sum(Tensor x, Tensor begins, Tensor columns) -> Tensor");
}
TORCH_LIBRARY_IMPL(vitrify, CPU, m) {
  m.impl("edge_csr", edge_csr);
  m.impl("mask_positions", mask_positions);
  m.impl("edge_degree", edge_degree);
  m.impl("edge_attention", edge_attention);
  m.impl("weighted_segment_sum", weighted_segment_sum);
  m.impl("segment_sum", segment_sum);
}

}  // namespace vitrify
