// Sums over the neighbours of a node: what message passing on a graph comes to once edges are grouped by destination.
#pragma once
#include <cstdint>

namespace vitrify::runtime {

// Edges (source[e], destination[e]), strides in elements, grouped by destination in edge order: the sources of node i are
// columns[begins[i]..begins[i+1]). begins has nodes + 1 entries; order[k], where wanted, is the edge that columns[k] came from. Returns -1, or the
// first edge whose destination is not in [0, nodes).
int64_t group_edges(const int64_t* source, int64_t source_stride, const int64_t* destination, int64_t destination_stride, int64_t edges,
                    int64_t nodes, int32_t* begins, int32_t* columns, int32_t* order = nullptr);

// out[i] = sum of x[columns[k]] over the edges k of node i, for first <= i < last; rows of `width` floats, x_stride apart.
void sum_neighbours(const float* x, int64_t x_stride, const int32_t* begins, const int32_t* columns, float* out, int64_t width, int64_t first,
                    int64_t last);

// out[i] = sum over the edges k of node i of a weight times x[columns[k]], for first <= i < last. Rows of x and out are heads * width floats (those
// of x x_stride apart); each head has weights of its own: weights[order[k] * heads + h]. With `softmax` the weights used are exp(w - max) / (sum +
// epsilon) over a node's edges.
struct Attention {
  const float* x;
  int64_t x_stride;
  const float* weights;
  const int32_t *begins, *columns, *order;
  int64_t heads, width;
  bool softmax;
  float epsilon;
  float* out;
};
void attend(const Attention&, int64_t first, int64_t last);
// The weights of one node, w[edges][heads], in place; per_head holds `heads` floats for a while.
void softmax_of_edges(float* w, int64_t edges, int64_t heads, float epsilon, float* per_head);

}  // namespace vitrify::runtime
