// Sums over the neighbours of a node: what message passing on a graph comes to once edges are grouped by destination.
#pragma once
#include <cstdint>

namespace vitrify::runtime {

// Edges (source[e], destination[e]), strides in elements, grouped by destination in edge order: the sources of node i are columns[begins[i]..begins[i+1]).
// begins has nodes + 1 entries. Returns -1, or the first edge whose destination is not in [0, nodes).
int64_t group_edges(const int64_t* source, int64_t source_stride, const int64_t* destination, int64_t destination_stride, int64_t edges, int64_t nodes, int32_t* begins,
                    int32_t* columns);

// out[i] = sum of x[columns[k]] over the edges k of node i, for first <= i < last; rows of `width` floats, x_stride apart.
void sum_neighbours(const float* x, int64_t x_stride, const int32_t* begins, const int32_t* columns, float* out, int64_t width, int64_t first, int64_t last);

}  // namespace vitrify::runtime
