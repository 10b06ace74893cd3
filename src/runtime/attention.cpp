#include "runtime/attention.h"

#include <cmath>
#include <limits>

#include "runtime/gemm.h"
#include "runtime/gemm_tile.h"

namespace vitrify::runtime {

#if defined(__x86_64__)

namespace {

using namespace tile;

constexpr int64_t kMaxHead = int64_t{1} << 20;  // floats of a head's keys and values that a thread copies
constexpr int64_t kKeys = kMaxDepth;            // at a time
constexpr float kInf = std::numeric_limits<float>::infinity();

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

VT_AVX512 __mmask16 first(int64_t n) { return static_cast<__mmask16>(n >= kLane ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); }

// e^x for x <= 0, -inf or NaN, to about an ulp (Cephes' polynomial); zero below the least normal number: a denormal result takes a hundred cycles.
VT_AVX512_INLINE __m512 exp_negative(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3365448f), _CMP_NLT_UQ);  // and NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(normal, p, n);
}

// Room of a thread. Queries lie across the lanes, so that the weights of a block of them are where the inner loop reads its second operand, and
// nothing is summed across lanes.
struct Room {
  float* keys;     // [keys / kRows][width][kRows]
  float* values;   // [width / kRows][keys][kRows]
  float* q;        // [width][lanes of the block]
  float* weights;  // [kKeys][lanes]
  float* mask;     // [kKeys][lanes]
  float* sums;     // [width][lanes]
};

// Queries [first, first + count) of a head.
struct Queries {
  int64_t batch, head, first;
  int count;
};

// The softmax so far of V vectors of queries: e^(score - largest) add up to `sum`.
template <int V>
struct Softmax {
  __m512 largest[V], sum[V];
};

// c[rows, V * kLane] (+)= a * b for a copy of a whose blocks of kRows rows lie `a_block` apart.
template <int V>
void multiply_all(const float* a, int64_t a_block, int64_t rows, const float* b, int64_t k, float* c, bool accumulate) {
  static constexpr std::array<int32_t, kMaxDepth / 2> kNothingAhead{};
  for (int64_t i = 0; i < rows; i += kRows, a += a_block)
    tile::multiply(
        {a, b, 0, nullptr, k, c + i * V * kLane, V * kLane, nullptr, accumulate, 0xffff, {reinterpret_cast<const char*>(a), kNothingAhead.data()}},
        std::min<int64_t>(kRows, rows - i), V * kLane);
}

// Masks of keys [j, j + count) in the order of the weights.
template <int V>
VT_AVX512 void copy_mask(const DotProductAttention& a, const Queries& q, int64_t j, int64_t count, float* to) {
  const auto& m = a.mask_strides;
  const float* from = a.mask + q.batch * m[0] + q.head * m[1] + q.first * m[2] + j * m[3];
  if (m[2] != 0 && m[3] == 1) {
    const Block block{from, m[2], true, count, q.count};
    return block.copy(0, block.units(), to);
  }
  for (int64_t i = 0; i < count; ++i, from += m[3], to += V * kLane)
    if (m[2] == 0)
      for (int v = 0; v < V; ++v) _mm512_store_ps(to + v * kLane, _mm512_set1_ps(*from));
    else
      for (int c = 0; c < q.count; ++c) to[c] = from[c * m[2]];
}

// Scores of keys [j, j + seen) become e^(score - largest). Gives what sums so far are to be multiplied by.
template <int V>
VT_AVX512 void take(const DotProductAttention& a, const Room& room, const Queries& q, int64_t j, int64_t seen, Softmax<V>& so_far,
                    __m512 (&past)[V]) {
  const __m512 scale = _mm512_set1_ps(a.scale), none = _mm512_set1_ps(-kInf);
  __m512 most[V], from[V], sum[V];
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) most[v] = so_far.largest[v];
  float* s = room.weights;
  for (int64_t i = 0; i < seen; ++i, s += V * kLane)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      __m512 t = _mm512_mul_ps(_mm512_load_ps(s + v * kLane), scale);
      if (a.mask) t = _mm512_add_ps(t, _mm512_load_ps(room.mask + (i * V + v) * kLane));
      if (a.causal) t = _mm512_mask_mov_ps(t, first(j + i - q.first - v * kLane), none);
      _mm512_store_ps(s + v * kLane, t);
      most[v] = _mm512_max_ps(most[v], t);
    }
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) {
    from[v] = _mm512_mask_mov_ps(most[v], _mm512_cmp_ps_mask(most[v], none, _CMP_EQ_OQ), _mm512_setzero_ps());  // not -inf - -inf
    sum[v] = _mm512_setzero_ps();
  }
  s = room.weights;
  for (int64_t i = 0; i < seen; ++i, s += V * kLane)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const __m512 e = exp_negative(_mm512_sub_ps(_mm512_load_ps(s + v * kLane), from[v]));
      _mm512_store_ps(s + v * kLane, e);
      sum[v] = _mm512_add_ps(sum[v], e);
    }
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) {
    past[v] = exp_negative(_mm512_sub_ps(so_far.largest[v], from[v]));
    so_far.sum[v] = _mm512_fmadd_ps(so_far.sum[v], past[v], sum[v]);
    so_far.largest[v] = most[v];
  }
}

template <int V>
VT_AVX512 bool attend_to(const DotProductAttention& a, const Room& room, const Queries& q) {
  constexpr int64_t kLanes = V * kLane;
  const Block queries{a.q + q.batch * a.q_strides[0] + q.head * a.q_strides[1] + q.first * a.q_strides[2], a.q_strides[2], true, a.width, q.count};
  queries.copy(0, queries.units(), room.q);
  Softmax<V> so_far;
#pragma GCC unroll 3
  for (int v = 0; v < V; ++v) so_far.largest[v] = _mm512_set1_ps(-kInf), so_far.sum[v] = _mm512_setzero_ps();
  for (int64_t j = 0; j < a.keys; j += kKeys) {
    const int64_t there = std::min(kKeys, a.keys - j), seen = a.causal ? std::min(there, q.first + q.count - j) : there;
    if (seen <= 0) break;
    multiply_all<V>(room.keys + j * a.width, a.width * kRows, seen, room.q, a.width, room.weights, false);
    if (a.mask) copy_mask<V>(a, q, j, seen, room.mask);
    __m512 past[V];
    take<V>(a, room, q, j, seen, so_far, past);
    if (j > 0)
      for (int64_t d = 0; d < a.width; ++d)
        for (int v = 0; v < V; ++v) {
          float* to = room.sums + d * kLanes + v * kLane;
          _mm512_store_ps(to, _mm512_mul_ps(_mm512_load_ps(to), past[v]));
        }
    multiply_all<V>(room.values + j * kRows, a.keys * kRows, a.width, room.weights, seen, room.sums, j > 0);
  }
  float* const out = a.out + q.batch * a.out_strides[0] + q.head * a.out_strides[1] + q.first * a.out_strides[2];
  bool finite = true;
  float* const lse = a.lse + q.batch * a.lse_strides[0] + q.head * a.lse_strides[1] + q.first * a.lse_strides[2];
  for (int v = 0; v < V; ++v) {
    const __mmask16 some = _mm512_cmp_ps_mask(so_far.sum[v], _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const __m512 by = _mm512_maskz_div_ps(some, _mm512_set1_ps(1), so_far.sum[v]);
    alignas(64) float sum[kLane], largest[kLane], scale[kLane];
    _mm512_store_ps(scale, by);
    _mm512_store_ps(sum, so_far.sum[v]);
    _mm512_store_ps(largest, so_far.largest[v]);
    const int count = std::min(kLane, q.count - v * kLane);
    for (int i = 0; i < count; ++i) lse[(v * kLane + i) * a.lse_strides[2]] = sum[i] == 0 ? 0 : largest[i] + std::log(sum[i]);
    float* to = out + v * kLane * a.out_strides[2];
    int64_t d = 0;
    if (count == kLane)
      for (; d + kLane <= a.width; d += kLane) transpose_16<true>(room.sums + d * kLanes + v * kLane, kLanes, to + d, a.out_strides[2], by);
    for (int i = 0; i < count; ++i) finite = finite && std::isfinite(lse[(v * kLane + i) * a.lse_strides[2]]);
    for (; d < a.width; ++d)
      for (int i = 0; i < count; ++i) to[i * a.out_strides[2] + d] = room.sums[d * kLanes + v * kLane + i] * scale[i];
  }
  return finite;
}

constexpr int kSpecial = 0x01 | 0x08 | 0x10 | 0x80;  // NaNs and infinities

// Whether all are finite.
VT_AVX512 bool copy_values(const float* v, int64_t stride, int64_t keys, int64_t width, float* to) {
  __mmask8 special = 0;
  for (int64_t j = 0; j < keys; ++j, v += stride)
    for (int64_t d = 0; d < width; d += kRows) {
      const auto mask = static_cast<__mmask8>(width - d >= kRows ? 0xff : (1u << (width - d)) - 1);
      const __m256 x = _mm256_maskz_loadu_ps(mask, v + d);
      special |= _mm256_fpclass_ps_mask(x, kSpecial);
      _mm256_store_ps(to + (d / kRows * keys + j) * kRows, x);
    }
  return special == 0;
}

}  // namespace

bool can_attend(const DotProductAttention& a) {
  return can_multiply() && a.width > 0 && a.width <= kMaxDepth && a.keys > 0 && a.keys * round_up(a.width, kRows) <= kMaxHead / 2;
}

bool attend(const DotProductAttention& a, int part, int parts) {
  bool finite = true;
  const int64_t vectors = round_up(a.queries, kLane) / kLane, blocks = (vectors + kVectors - 1) / kVectors, all = a.batch * a.heads * blocks;
  const int64_t keys = round_up(a.keys, kRows), width = round_up(a.width, kRows), lanes = kVectors * kLane;
  Room room;
  const int64_t copied_keys = round_up(keys * a.width, kLane);
  room.keys = scratch(static_cast<size_t>(copied_keys + a.keys * width + (2 * a.width + 2 * kKeys) * lanes));
  room.q = room.keys + copied_keys;
  room.sums = room.q + a.width * lanes;
  room.weights = room.sums + a.width * lanes;
  room.mask = room.weights + kKeys * lanes;
  room.values = room.mask + kKeys * lanes;
  int64_t copied = -1;
  for (int64_t i = all * part / parts; i < all * (part + 1) / parts; ++i) {
    const int64_t head = i / blocks, b = head / a.heads, h = head % a.heads;
    if (head != std::exchange(copied, head)) {
      const float* k = a.k + b * a.k_strides[0] + h * a.k_strides[1];
      for (int64_t j = 0; j < a.keys; j += kRows)
        copy_a(k + j * a.k_strides[2], a.k_strides[2], a.width, static_cast<int>(std::min<int64_t>(kRows, a.keys - j)), room.keys + j * a.width);
      finite = copy_values(a.v + b * a.v_strides[0] + h * a.v_strides[1], a.v_strides[2], a.keys, a.width, room.values) && finite;
    }
    const int64_t from = vectors * (i % blocks) / blocks, to = vectors * (i % blocks + 1) / blocks;
    const Queries q{b, h, from * kLane, static_cast<int>(std::min(a.queries, to * kLane) - from * kLane)};
    constexpr decltype(&attend_to<1>) kEach[] = {attend_to<1>, attend_to<2>, attend_to<3>};
    finite = kEach[to - from - 1](a, room, q) && finite;
  }
  return finite;
}

#else

bool can_attend(const DotProductAttention&) { return false; }
bool attend(const DotProductAttention&, int, int) { return true; }

#endif

}  // namespace vitrify::runtime
