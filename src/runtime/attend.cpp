// Weighted sums over neighbours: each product is rounded before it is summed, as eager does (CMakeLists.txt).
#include <algorithm>
#include <vector>

#include "runtime/clones.h"
#include "runtime/segment.h"

namespace vitrify::runtime {

namespace {

#define VT_INLINE inline __attribute__((always_inline))

constexpr int32_t kAhead = 32;  // neighbours of the next node fetched ahead: a few hundred lines at most

using Float8 = float __attribute__((vector_size(32), aligned(4)));

// 8 * kVectors columns of one node and head, summed in registers (an array of floats would live in memory).
template <int kVectors>
VT_INLINE void sum_block(const float* x, int64_t x_stride, const int32_t* columns, const float* w, int64_t heads, int64_t edges, float* out) {
  Float8 acc[kVectors] = {};
  for (int64_t k = 0; k < edges; ++k) {
    const auto* from = reinterpret_cast<const Float8*>(x + columns[k] * x_stride);
    const float f = w[k * heads];
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) acc[c] += f * from[c];
  }
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) reinterpret_cast<Float8*>(out)[c] = acc[c];
}
VT_INLINE void sum_column(const float* x, int64_t x_stride, const int32_t* columns, const float* w, int64_t heads, int64_t edges, float* out) {
  float acc = 0;
  for (int64_t k = 0; k < edges; ++k) acc += w[k * heads] * x[columns[k] * x_stride];
  *out = acc;
}

}  // namespace

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
VT_CLONES
#endif
void attend(const Attention& a, int64_t first, int64_t last) {
  const int64_t heads = a.heads, width = a.width;
  std::vector<float> weights, per_head(static_cast<size_t>(heads));
  for (int64_t i = first; i < last; ++i) {
    const int32_t b = a.begins[i];
    const int64_t edges = a.begins[i + 1] - b;
    if (static_cast<int64_t>(weights.size()) < edges * heads) weights.resize(static_cast<size_t>(edges * heads * 2));
    float* w = weights.data();
    // The next node's rows come in no order the hardware could guess: fetch them while this one is computed.
    if (i + 1 < last)
      for (int32_t k = a.begins[i + 1], end = std::min(a.begins[i + 2], k + kAhead); k < end; ++k) {
        const float* row = a.x + a.columns[k] * a.x_stride;
        for (int64_t c = 0; c < heads * width; c += 16) __builtin_prefetch(row + c);
        __builtin_prefetch(a.weights + a.order[k] * heads);
      }
    for (int64_t k = 0; k < edges; ++k) {
      const float* from = a.weights + a.order[b + k] * heads;
      for (int64_t h = 0; h < heads; ++h) w[k * heads + h] = from[h];
    }
    if (a.softmax) softmax_of_edges(w, edges, heads, a.epsilon, per_head.data());
    const int32_t* columns = a.columns + b;
    for (int64_t h = 0; h < heads; ++h) {
      const float* x = a.x + h * width;
      float* out = a.out + (i * heads + h) * width;
      int64_t j = 0;
      for (; j + 64 <= width; j += 64) sum_block<8>(x + j, a.x_stride, columns, w + h, heads, edges, out + j);
      for (; j + 32 <= width; j += 32) sum_block<4>(x + j, a.x_stride, columns, w + h, heads, edges, out + j);
      for (; j + 8 <= width; j += 8) sum_block<1>(x + j, a.x_stride, columns, w + h, heads, edges, out + j);
      for (; j < width; ++j) sum_column(x + j, a.x_stride, columns, w + h, heads, edges, out + j);
    }
  }
}

}  // namespace vitrify::runtime
