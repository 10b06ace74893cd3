// The softmax over a node's edges that makes the weights of its neighbours.
#include <bit>
#include <cstdint>

#include "runtime/clones.h"
#include "runtime/segment.h"

namespace vitrify::runtime {

namespace {

// e^x for x <= 0 or NaN, to about an ulp.
inline __attribute__((always_inline)) float exp_negative(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float c = x > -104.0f ? x : -104.0f;
  const float n = (c * 1.44269504088896341f + kRound) - kRound;
  const float r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const auto whole = static_cast<int32_t>(n);
  const int32_t half = whole / 2;  // 2^n may be below the normal numbers
  p = p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((whole - half + 127) << 23);
  p = x > -104.0f ? p : 0.0f;
  return x == x ? p : x;
}

// kHeads: their number where it is known here, 0 where it is `given`. With the number known, all heads of an edge are one vector.
template <int64_t kHeads>
inline __attribute__((always_inline)) void softmax(float* __restrict w, int64_t edges, int64_t given, float epsilon, float* __restrict per_head) {
  const int64_t heads = kHeads ? kHeads : given;
  for (int64_t h = 0; h < heads; ++h) per_head[h] = edges ? w[h] : 0;
  for (int64_t k = 1; k < edges; ++k)
    for (int64_t h = 0; h < heads; ++h) {
      const float v = w[k * heads + h];
      per_head[h] = v > per_head[h] || v != v ? v : per_head[h];
    }
  for (int64_t k = 0; k < edges; ++k)
    for (int64_t h = 0; h < heads; ++h) w[k * heads + h] -= per_head[h];
  for (int64_t j = 0; j < edges * heads; ++j) w[j] = exp_negative(w[j]);
  for (int64_t h = 0; h < heads; ++h) per_head[h] = 0;
  for (int64_t k = 0; k < edges; ++k)
    for (int64_t h = 0; h < heads; ++h) per_head[h] += w[k * heads + h];
  for (int64_t h = 0; h < heads; ++h) per_head[h] += epsilon;
  for (int64_t k = 0; k < edges; ++k)
    for (int64_t h = 0; h < heads; ++h) w[k * heads + h] /= per_head[h];
}

}  // namespace

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
VT_CLONES
#endif
void softmax_of_edges(float* w, int64_t edges, int64_t heads, float epsilon, float* per_head) {
  switch (heads) {
    case 1:
      return softmax<1>(w, edges, heads, epsilon, per_head);
    case 4:
      return softmax<4>(w, edges, heads, epsilon, per_head);
    case 8:
      return softmax<8>(w, edges, heads, epsilon, per_head);
    default:
      return softmax<0>(w, edges, heads, epsilon, per_head);
  }
}

}  // namespace vitrify::runtime
