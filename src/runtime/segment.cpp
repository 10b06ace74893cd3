#include "runtime/segment.h"

#include <algorithm>
#include <vector>

#include "runtime/clones.h"

namespace vitrify::runtime {

int64_t group_edges(const int64_t* source, int64_t source_stride, const int64_t* destination, int64_t destination_stride, int64_t edges,
                    int64_t nodes, int32_t* begins, int32_t* columns, int32_t* order) {
  std::fill_n(begins, nodes + 1, 0);
  for (int64_t e = 0; e < edges; ++e) {
    const int64_t d = destination[e * destination_stride];
    if (d < 0 || d >= nodes) return e;
    ++begins[d + 1];
  }
  for (int64_t i = 0; i < nodes; ++i) begins[i + 1] += begins[i];
  std::vector<int32_t> next(begins, begins + nodes);
  for (int64_t e = 0; e < edges; ++e) {
    const int32_t k = next[static_cast<size_t>(destination[e * destination_stride])]++;
    columns[k] = static_cast<int32_t>(source[e * source_stride]);
    if (order) order[k] = static_cast<int32_t>(e);
  }
  return -1;
}

namespace {
constexpr int kBlock = 64;     // floats summed in registers at a time
constexpr int32_t kAhead = 8;  // neighbours fetched ahead
}  // namespace

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
VT_CLONES
#endif
void sum_neighbours(const float* x, int64_t x_stride, const int32_t* begins, const int32_t* columns, float* out, int64_t width, int64_t first,
                    int64_t last) {
  const int32_t total = begins[last];
  for (int64_t i = first; i < last; ++i) {
    const int32_t b = begins[i], e = begins[i + 1];
    float* row = out + i * width;
    int64_t j = 0;
    for (; j + kBlock <= width; j += kBlock) {
      float acc[kBlock] = {};
      for (int32_t k = b; k < e; ++k) {
        const float* from = x + columns[k] * x_stride + j;
        // rows come in no order the hardware could guess
        if (k + kAhead < total)
          for (int c = 0; c < kBlock; c += 16) __builtin_prefetch(x + columns[k + kAhead] * x_stride + j + c);
        for (int c = 0; c < kBlock; ++c) acc[c] += from[c];
      }
      for (int c = 0; c < kBlock; ++c) row[j + c] = acc[c];
    }
    if (j == width) continue;
    for (int64_t c = j; c < width; ++c) row[c] = 0;
    for (int32_t k = b; k < e; ++k) {
      const float* from = x + columns[k] * x_stride;
      for (int64_t c = j; c < width; ++c) row[c] += from[c];
    }
  }
}

}  // namespace vitrify::runtime
