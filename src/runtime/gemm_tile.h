// The inner loop of matrix products with AVX-512, and the copying of operands into its order. Internal to gemm.cpp and attention.cpp.
#pragma once

#if defined(__x86_64__)

// GCC 12's own header, inlined: https://gcc.gnu.org/PR105593
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#define VT_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,fma,prfchw")))
#define VT_AVX512_INLINE VT_AVX512 __attribute__((always_inline)) inline

namespace vitrify::runtime::tile {

constexpr int kLane = 16;               // floats of a vector, and of a cache line
constexpr int kRows = 8, kVectors = 3;  // of c in registers: 24 sums beside 3 vectors of b and one element of a
constexpr int kCols = kVectors * kLane;
constexpr int kMemoryRows = 2;  // of kRows whose element of a is an operand in memory: fewer instructions for more loads

constexpr int64_t kMaxDepth = 384;  // of a tile

// What the inner loop fetches for the copying that follows it: a line at base + offsets[i / 2] in step i.
struct Ahead {
  const char* base;
  const int32_t* offsets;  // [kMaxDepth / 2]
};

// c[R, V * kLane] (+)= a[k][kRows] * b[k][V * kLane]; copies are dense and aligned
struct Tile {
  const float* a;
  const float* b;
  int64_t b_stride;  // from row to row where b is not a copy
  float* copy;       // where b is copied as it is read, or null: b is a copy
  int64_t k;
  float* c;
  int64_t c_stride;
  const float* bias;  // added to each row, or null
  bool accumulate;    // adds to what c holds, and no bias
  uint16_t mask;      // columns of the last vector
  Ahead ahead;
};

template <int R, int V>
VT_AVX512_INLINE void multiply_step(__m512 (&sum)[R][V], const __m512 (&x)[V], const float* a) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if (r >= kRows - kMemoryRows) {
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum[r][v]) : "v"(x[v]), "m"(a[r]));
    } else {
      const __m512 y = _mm512_set1_ps(a[r]);
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) sum[r][v] = _mm512_fmadd_ps(y, x[v], sum[r][v]);
    }
  }
}

template <int R, int V, bool Copies>
VT_AVX512 void multiply_tile(const Tile& t) {
  __m512 sum[R][V], x[V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      sum[r][v] = _mm512_setzero_ps();
      __builtin_prefetch(t.c + r * t.c_stride + v * kLane, 1);
    }
  const float *a = t.a, *b = t.b;
  int64_t i = 0;
  if constexpr (Copies) {
    float* to = t.copy;
#pragma GCC unroll 2
    for (; i < t.k; ++i, a += kRows, b += t.b_stride, to += V * kLane) {
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) {
        x[v] = v + 1 < V ? _mm512_loadu_ps(b + v * kLane) : _mm512_maskz_loadu_ps(t.mask, b + v * kLane);
        _mm512_store_ps(to + v * kLane, x[v]);
      }
      multiply_step<R, V>(sum, x, a);
    }
  } else {
#pragma GCC unroll 1
    for (; i + 4 <= t.k; i += 4, a += 4 * kRows, b += 4 * V * kLane) {
      __builtin_prefetch(t.ahead.base + t.ahead.offsets[i / 2], 0, 2);
      __builtin_prefetch(t.ahead.base + t.ahead.offsets[i / 2 + 1], 0, 2);
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) {
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) x[v] = _mm512_load_ps(b + (u * V + v) * kLane);
        multiply_step<R, V>(sum, x, a + u * kRows);
      }
    }
#pragma GCC unroll 1
    for (; i < t.k; ++i, a += kRows, b += V * kLane) {
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) x[v] = _mm512_load_ps(b + v * kLane);
      multiply_step<R, V>(sum, x, a);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      float* to = t.c + r * t.c_stride + v * kLane;
      const __mmask16 mask = v + 1 == V ? t.mask : 0xffff;
      if (t.accumulate)
        sum[r][v] = _mm512_add_ps(sum[r][v], _mm512_maskz_loadu_ps(mask, to));
      else if (t.bias)
        sum[r][v] = _mm512_add_ps(sum[r][v], _mm512_maskz_loadu_ps(mask, t.bias + v * kLane));
      _mm512_mask_storeu_ps(to, mask, sum[r][v]);
    }
}

using TileFn = void (*)(const Tile&);
template <int V, bool Copies, size_t... R>
constexpr std::array<TileFn, kRows + 1> tiles_of(std::index_sequence<R...>) {
  return {nullptr, multiply_tile<int(R) + 1, V, Copies>...};
}
inline constexpr auto kEachRow = std::make_index_sequence<kRows>();
inline constexpr std::array<TileFn, kRows + 1> kTiles[2][kVectors + 1] = {
    {{}, tiles_of<1, false>(kEachRow), tiles_of<2, false>(kEachRow), tiles_of<3, false>(kEachRow)},
    {{}, tiles_of<1, true>(kEachRow), tiles_of<2, true>(kEachRow), tiles_of<3, true>(kEachRow)},
};

// The tile of `rows` rows and `width` columns.
inline void multiply(const Tile& t, int64_t rows, int width) { kTiles[t.copy != nullptr][width / kLane][static_cast<size_t>(rows)](t); }

// [kRows][k] to [k][kRows].
VT_AVX512 inline void copy_a(const float* a, int64_t stride, int64_t k, int rows, float* to) {
  int64_t i = 0;
  if (rows == kRows)
    for (; i + 8 <= k; i += 8) {
      __m256 r[8], t[8];
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q) {
        r[q] = _mm256_loadu_ps(a + q * stride + i);
        if (i % kLane == 0) __builtin_prefetch(a + (q + kRows) * stride + i, 0, 2);
      }
#pragma GCC unroll 4
      for (int q = 0; q < 8; q += 2) {
        t[q] = _mm256_unpacklo_ps(r[q], r[q + 1]);
        t[q + 1] = _mm256_unpackhi_ps(r[q], r[q + 1]);
      }
#pragma GCC unroll 2
      for (int q = 0; q < 8; q += 4) {
        r[q] = _mm256_shuffle_ps(t[q], t[q + 2], 0x44);
        r[q + 1] = _mm256_shuffle_ps(t[q], t[q + 2], 0xee);
        r[q + 2] = _mm256_shuffle_ps(t[q + 1], t[q + 3], 0x44);
        r[q + 3] = _mm256_shuffle_ps(t[q + 1], t[q + 3], 0xee);
      }
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        _mm256_store_ps(to + (i + q) * kRows, _mm256_permute2f128_ps(r[q], r[q + 4], 0x20));
        _mm256_store_ps(to + (i + q + 4) * kRows, _mm256_permute2f128_ps(r[q], r[q + 4], 0x31));
      }
    }
  for (; i < k; ++i)
    for (int r = 0; r < rows; ++r) to[i * kRows + r] = a[r * stride + i];
}

// to[j][i] = from[i][j] for 16 rows and columns; Scaled: from[i][j] * by[j].
template <bool Scaled = false>
VT_AVX512_INLINE void transpose_16(const float* from, int64_t stride, float* to, int64_t to_stride, __m512 by = __m512()) {
  __m512 r[16], t[16];
#pragma GCC unroll 16
  for (int q = 0; q < 16; ++q) {
    r[q] = _mm512_loadu_ps(from + q * stride);
    if (Scaled) r[q] = _mm512_mul_ps(r[q], by);
  }
#pragma GCC unroll 8
  for (int q = 0; q < 16; q += 2) {
    t[q] = _mm512_unpacklo_ps(r[q], r[q + 1]);
    t[q + 1] = _mm512_unpackhi_ps(r[q], r[q + 1]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 16; q += 4) {
    r[q] = _mm512_shuffle_ps(t[q], t[q + 2], 0x44);
    r[q + 1] = _mm512_shuffle_ps(t[q], t[q + 2], 0xee);
    r[q + 2] = _mm512_shuffle_ps(t[q + 1], t[q + 3], 0x44);
    r[q + 3] = _mm512_shuffle_ps(t[q + 1], t[q + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    t[q] = _mm512_shuffle_f32x4(r[q], r[q + 4], 0x88);
    t[q + 4] = _mm512_shuffle_f32x4(r[q], r[q + 4], 0xdd);
    t[q + 8] = _mm512_shuffle_f32x4(r[q + 8], r[q + 12], 0x88);
    t[q + 12] = _mm512_shuffle_f32x4(r[q + 8], r[q + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    _mm512_storeu_ps(to + q * to_stride, _mm512_shuffle_f32x4(t[q], t[q + 8], 0x88));
    _mm512_storeu_ps(to + (q + 8) * to_stride, _mm512_shuffle_f32x4(t[q], t[q + 8], 0xdd));
    _mm512_storeu_ps(to + (q + 4) * to_stride, _mm512_shuffle_f32x4(t[q + 4], t[q + 12], 0x88));
    _mm512_storeu_ps(to + (q + 12) * to_stride, _mm512_shuffle_f32x4(t[q + 4], t[q + 12], 0xdd));
  }
}

// A block of b and its copy: panels of kCols columns, the last of as many vectors as it needs, each [k][width].
struct Block {
  const float* from;
  int64_t stride;
  bool transposed;
  int64_t k;
  int cols;

  int panels() const { return (cols + kCols - 1) / kCols; }
  int width(int panel) const { return std::min(kCols, (cols - panel * kCols + kLane - 1) / kLane * kLane); }
  // Units of copying: a row, or 16 columns of 16 rows.
  int64_t tiles() const { return (k + kLane - 1) / kLane; }
  uint16_t mask(int panel) const {  // of the columns of the panel's last vector
    const int w = width(panel);
    return static_cast<uint16_t>((1u << (std::min(w, cols - panel * kCols) - (w - kLane))) - 1);
  }
  int64_t units() const { return transposed ? tiles() * ((cols + kLane - 1) / kLane) : k; }
  const float* unit(int64_t u) const { return transposed ? from + u / tiles() * kLane * stride + u % tiles() * kLane : from + u * stride; }
  // The lines of `units` units, from the address of the first, spread over `slots`.
  void lines(int64_t units, int32_t* offsets, int64_t slots) const {
    const int64_t per_unit = transposed ? kLane : (cols + kLane - 1) / kLane, all = std::min(slots, units * per_unit);
    const int64_t next_line = transposed ? stride : kLane, next_unit = transposed ? kLane : stride;
    int64_t unit = 0, line = 0, passed = 0;
    for (int64_t i = 0; i < slots; ++i) {  // no division: it takes as long as a step of the inner loop
      offsets[i] = static_cast<int32_t>(static_cast<int64_t>(sizeof(float)) * (unit * next_unit + line * next_line));
      passed += all;
      if (passed < slots) continue;
      passed -= slots;
      if (++line == per_unit) line = 0, ++unit;
    }
  }
  void copy(int64_t first, int64_t last, float* to) const {
    if (!transposed) return copy_rows(first, last, to);
    for (int64_t u = first; u < last; ++u) {
      const float* next = unit(u + 1);  // from L2, where the inner loop had it fetched
      for (int i = 0; i < kLane; ++i) __builtin_prefetch(next + i * stride, 0, 3);
      copy_tile(u, to);
    }
  }

 private:
  VT_AVX512 void copy_rows(int64_t first, int64_t last, float* to) const {
    for (int p = 0; p < panels(); ++p) {
      const int w = width(p), left = cols - p * kCols;
      const float* row = from + first * stride + p * kCols;
      float* out = to + p * kCols * k + first * w;
      if (left >= kCols) {
        for (int64_t i = first; i < last; ++i, row += stride, out += kCols)
#pragma GCC unroll 3
          for (int v = 0; v < kCols; v += kLane) _mm512_store_ps(out + v, _mm512_loadu_ps(row + v));
      } else {
        const auto rest = static_cast<__mmask16>((1u << (left - (w - kLane))) - 1);
        for (int64_t i = first; i < last; ++i, row += stride, out += w)
          for (int v = 0; v < w; v += kLane) _mm512_store_ps(out + v, _mm512_maskz_loadu_ps(v + kLane == w ? rest : 0xffff, row + v));
      }
    }
  }

  VT_AVX512 void copy_tile(int64_t u, float* to) const {
    const int col = static_cast<int>(u / tiles()) * kLane, p = col / kCols, w = width(p);
    const int64_t i = u % tiles() * kLane;
    const float* b = from + col * stride + i;
    to += p * kCols * k + i * w + col % kCols;
    const int rows = static_cast<int>(std::min<int64_t>(kLane, k - i)), n = std::min(kLane, cols - col);
    if (rows < kLane || n < kLane) {
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < kLane; ++c) to[r * w + c] = c < n ? b[c * stride + r] : 0;
      return;
    }
    transpose_16(b, stride, to, w);
  }
};

// Room of this thread, kept from call to call.
inline float* scratch(size_t floats) {
  constexpr size_t kPage = 4096;
  static thread_local std::unique_ptr<float, decltype(&std::free)> room{nullptr, &std::free};
  static thread_local size_t held = 0;
  if (held < floats) {
    held = 0;
    room.reset(static_cast<float*>(std::aligned_alloc(kPage, (floats * sizeof(float) + kPage - 1) / kPage * kPage)));
    if (!room) throw std::bad_alloc();
    held = floats;
  }
  return room.get();
}

}  // namespace vitrify::runtime::tile

#endif
