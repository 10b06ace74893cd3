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

int64_t round_up(int64_t n) { return (n + kLane - 1) / kLane * kLane; }

VT_AVX512 __mmask16 first(int64_t n) { return static_cast<__mmask16>(n >= kLane ? 0xffff : (1u << n) - 1); }

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

// The softmax of a row so far: e^(score - largest) add up to `sum`.
struct Row {
  float largest = -std::numeric_limits<float>::infinity();
  float sum = 0;
};

// Scores of `seen` keys become e^(score - largest), and those after them up to `all` zero. Returns what sums so far are to be multiplied by.
VT_AVX512 float take(Row& row, float* s, int64_t seen, int64_t all, float scale, const float* mask, int64_t mask_stride) {
  __m512 most = _mm512_set1_ps(row.largest);
  const __m512 by = _mm512_set1_ps(scale);
  for (int64_t j = 0; j < seen; j += kLane) {
    const __mmask16 m = first(seen - j);
    __m512 t = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, s + j), by);
    if (mask) t = _mm512_add_ps(t, mask_stride == 1 ? _mm512_maskz_loadu_ps(m, mask + j) : _mm512_set1_ps(*mask));
    _mm512_mask_storeu_ps(s + j, m, t);
    most = _mm512_mask_max_ps(most, m, most, t);
  }
  const float largest = _mm512_reduce_max_ps(most), from = std::isinf(largest) && largest < 0 ? 0 : largest;  // not -inf - -inf
  __m512 sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < seen; j += kLane) {
    const __mmask16 m = first(seen - j);
    const __m512 e = exp_negative(_mm512_sub_ps(_mm512_maskz_loadu_ps(m, s + j), _mm512_set1_ps(from)));
    _mm512_mask_storeu_ps(s + j, m, e);
    sum = _mm512_mask_add_ps(sum, m, sum, e);
  }
  for (int64_t j = seen; j < all; ++j) s[j] = 0;
  const float past = row.sum == 0 ? 0 : std::exp(row.largest - from);
  row.sum = row.sum * past + _mm512_reduce_add_ps(sum);
  row.largest = largest;
  return past;
}

VT_AVX512 void scale_row(float* to, const float* from, int64_t n, float by) {
  for (int64_t i = 0; i < n; i += kLane)
    _mm512_mask_storeu_ps(to + i, first(n - i), _mm512_mul_ps(_mm512_maskz_loadu_ps(first(n - i), from + i), _mm512_set1_ps(by)));
}

constexpr std::array<int32_t, kMaxDepth / 2> kNothingAhead{};

// c[rows, cols of b] (+)= a * b for copies of both.
void multiply_block(const float* a, const Block& b, const float* copy, int64_t k, float* c, int64_t c_stride, int64_t cols, bool accumulate,
                    int rows) {
  for (int p = 0; p * kCols < cols; ++p)
    tile::multiply({a,
                    copy + p * kCols * b.k,
                    0,
                    nullptr,
                    k,
                    c + p * kCols,
                    c_stride,
                    nullptr,
                    accumulate,
                    b.mask(p),
                    {reinterpret_cast<const char*>(a), kNothingAhead.data()}},
                   rows, b.width(p));
}

// Keys [first, first + cols) of a head: their copies lie one after the other.
Block keys_of(const DotProductAttention& a, const float* k, int64_t first) {
  return {k + first * a.k_strides[2], a.k_strides[2], true, a.width, static_cast<int>(std::min(kKeys, a.keys - first))};
}
Block values_of(const DotProductAttention& a, const float* v, int64_t first) {
  return {v + first * a.v_strides[2], a.v_strides[2], false, std::min(kKeys, a.keys - first), static_cast<int>(a.width)};
}

struct Room {
  float *keys, *values, *q, *scores, *weights, *sums;
};

void attend_to(const DotProductAttention& a, const Room& room, int64_t b, int64_t h, int64_t from) {
  const int rows = static_cast<int>(std::min<int64_t>(kRows, a.queries - from));
  const int64_t width = round_up(a.width);
  copy_a(a.q + b * a.q_strides[0] + h * a.q_strides[1] + from * a.q_strides[2], a.q_strides[2], a.width, rows, room.q);
  std::array<Row, kRows> state;
  for (int64_t j = 0; j < a.keys; j += kKeys) {
    const int64_t there = std::min(kKeys, a.keys - j), cols = a.causal ? std::min(there, from + rows - j) : there;
    if (cols <= 0) break;
    multiply_block(room.q, keys_of(a, nullptr, j), room.keys + j * a.width, a.width, room.scores, kKeys, cols, false, rows);
    for (int r = 0; r < rows; ++r) {
      const int64_t i = from + r, seen = a.causal ? std::clamp<int64_t>(i + 1 - j, 0, cols) : cols;
      const auto& m = a.mask_strides;
      const float* mask = a.mask ? a.mask + b * m[0] + h * m[1] + i * m[2] + j * m[3] : nullptr;
      const float past = take(state[static_cast<size_t>(r)], room.scores + r * kKeys, seen, cols, a.scale, mask, m[3]);
      if (j > 0) scale_row(room.sums + r * width, room.sums + r * width, a.width, past);
    }
    copy_a(room.scores, kKeys, cols, rows, room.weights);
    multiply_block(room.weights, values_of(a, nullptr, j), room.values + j * width, cols, room.sums, width, a.width, j > 0, rows);
  }
  for (int r = 0; r < rows; ++r) {
    const auto& [largest, sum] = state[static_cast<size_t>(r)];
    const int64_t i = from + r;
    scale_row(a.out + b * a.out_strides[0] + h * a.out_strides[1] + i * a.out_strides[2], room.sums + r * width, a.width, sum == 0 ? 0 : 1 / sum);
    a.lse[b * a.lse_strides[0] + h * a.lse_strides[1] + i * a.lse_strides[2]] = sum == 0 ? 0 : largest + std::log(sum);
  }
}

}  // namespace

bool can_attend(const DotProductAttention& a) {
  return can_multiply() && a.width > 0 && a.width <= kMaxDepth && a.keys > 0 && a.keys * (a.width + round_up(a.width)) <= kMaxHead;
}

void attend(const DotProductAttention& a, int part, int parts) {
  const int64_t tiles = (a.queries + kRows - 1) / kRows, all = a.batch * a.heads * tiles, last = all * (part + 1) / parts;
  const int64_t width = round_up(a.width), keys = round_up(a.keys);
  Room room;
  room.keys = scratch(static_cast<size_t>(keys * a.width + keys * width + kRows * (a.width + 2 * kKeys + width)));
  room.values = room.keys + keys * a.width;
  room.q = room.values + keys * width;
  room.scores = room.q + kRows * a.width;
  room.weights = room.scores + kRows * kKeys;
  room.sums = room.weights + kRows * kKeys;
  int64_t copied = -1;
  for (int64_t i = all * part / parts; i < last; ++i) {
    const int64_t head = i / tiles, b = head / a.heads, h = head % a.heads;
    if (head != std::exchange(copied, head))
      for (int64_t j = 0; j < a.keys; j += kKeys) {
        const Block k = keys_of(a, a.k + b * a.k_strides[0] + h * a.k_strides[1], j),
                    v = values_of(a, a.v + b * a.v_strides[0] + h * a.v_strides[1], j);
        k.copy(0, k.units(), room.keys + j * a.width);
        v.copy(0, v.units(), room.values + j * width);
      }
    attend_to(a, room, b, h, i % tiles * kRows);
  }
}

#else

bool can_attend(const DotProductAttention&) { return false; }
void attend(const DotProductAttention&, int, int) {}

#endif

}  // namespace vitrify::runtime
