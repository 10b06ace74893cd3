#include "runtime/winograd.h"

#include <algorithm>

#include "runtime/gemm.h"
#include "runtime/gemm_tile.h"

namespace vitrify::runtime {

bool can_convolve() { return can_multiply(); }

namespace {

constexpr int kTaps = 9, kPoints = 16;  // weights of a pair of channels, and products
constexpr int kRows = 6, kVectors = 4;  // of sums in registers
constexpr int64_t kLane = 16, kPanel = kVectors * kLane;
constexpr int64_t kBlockBytes = 800 << 10;   // of transformed pixels: beside the sums they are made into, and weights, in the second cache
constexpr int64_t kChain = 64;               // products added one by one: the error grows with the root of it
constexpr int64_t kManyWeights = 128 * 128;  // pairs of channels

int64_t panel_width(int64_t k, int64_t first) { return std::min(kPanel, k - first); }

}  // namespace

void winograd_weights(const float* weights, int64_t k, int64_t c, float* to) {
  for (int64_t out = 0; out < k; ++out) {
    const int64_t first = out / kPanel * kPanel, width = panel_width(k, first);
    float* panel = to + first * kTaps * c + (out - first);
    for (int64_t i = 0; i < c * kTaps; ++i) panel[i * width] = weights[out * c * kTaps + i];
  }
}

#if defined(__x86_64__)

namespace {

// sums[R][V * kLane] = pixels[R][c] * weights[c][V * kLane]
template <int R, int V>
VT_AVX512 void multiply(const float* pixels, const float* weights, int64_t c, float* sums) {
  for (int64_t i = 0; i < c;) {
    __m512 sum[R][V], x[V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = _mm512_setzero_ps();
    const bool first = i == 0;
    const int64_t end = std::min(i + kChain, c);
#pragma GCC unroll 2
    for (; i < end; ++i, weights += V * kLane) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) x[v] = _mm512_load_ps(weights + v * kLane);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512 y = _mm512_set1_ps(pixels[r * c + i]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = _mm512_fmadd_ps(y, x[v], sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        float* to = sums + (r * V + v) * kLane;
        _mm512_store_ps(to, first ? sum[r][v] : _mm512_add_ps(sum[r][v], _mm512_load_ps(to)));
      }
  }
}

// Row `row` of the four by four that the weights of each pair of channels become: to[4][c][width].
VT_AVX512 void take_weights(const float* weights, int row, int64_t c, int64_t width, float* to) {
  const __m512 half = _mm512_set1_ps(0.5F);
  for (int64_t i = 0; i < c; ++i, weights += kTaps * width, to += width)
    for (int64_t v = 0; v < width; v += kLane) {
      __m512 a[3];
#pragma GCC unroll 3
      for (int j = 0; j < 3; ++j) {
        const float* w = weights + j * width + v;
        if (row == 0 || row == 3) {
          a[j] = _mm512_loadu_ps(w + 2 * row * width);
          continue;
        }
        const __m512 middle = _mm512_loadu_ps(w + 3 * width), outer = _mm512_add_ps(_mm512_loadu_ps(w), _mm512_loadu_ps(w + 6 * width));
        a[j] = _mm512_mul_ps(half, row == 1 ? _mm512_add_ps(outer, middle) : _mm512_sub_ps(outer, middle));
      }
      const __m512 outer = _mm512_add_ps(a[0], a[2]);
      _mm512_store_ps(to + v, a[0]);
      _mm512_store_ps(to + c * width + v, _mm512_mul_ps(half, _mm512_add_ps(outer, a[1])));
      _mm512_store_ps(to + 2 * c * width + v, _mm512_mul_ps(half, _mm512_sub_ps(outer, a[1])));
      _mm512_store_ps(to + 3 * c * width + v, a[2]);
    }
}

using MultiplyFn = void (*)(const float*, const float*, int64_t, float*);
template <int V, size_t... R>
constexpr std::array<MultiplyFn, kRows + 1> of_width(std::index_sequence<R...>) {
  return {nullptr, multiply<int(R) + 1, V>...};
}
constexpr auto kEachRow = std::make_index_sequence<kRows>();
constexpr std::array<MultiplyFn, kRows + 1> kMultiply[kVectors + 1] = {
    {}, of_width<1>(kEachRow), of_width<2>(kEachRow), of_width<3>(kEachRow), of_width<4>(kEachRow)};

// Where a square of four by four pixels and its two by two results lie.
struct Square {
  int64_t image, row, col;  // of the first result
};

class Block {
 public:
  // `most` squares at once, results [first, last) of each.
  Block(const Winograd& p, int64_t most, int64_t first, int64_t last) : p_(p), first_result_(first), last_result_(last) {
    pixels_ = tile::scratch(static_cast<size_t>(kPoints * most * (p.c + kPanel) + 4 * p.c * kPanel));
    sums_ = pixels_ + kPoints * most * p.c;
    weights_ = sums_ + kPoints * most * kPanel;
  }

  void run(int64_t first, int64_t count) {
    first_ = first, count_ = count;
    for (int64_t t = 0; t < count; ++t) take(t);
    for (int64_t k = first_result_; k < last_result_; k += kPanel) {
      const int64_t width = panel_width(p_.k, k);
      for (int row = 0; row < 4; ++row) {
        take_weights(p_.weights + k * kTaps * p_.c, row, p_.c, width, weights_);
        for (int64_t i = 0; i < 4; ++i)
          for (int64_t t = 0; t < count; t += kRows) {
            const int64_t at = (row * 4 + i) * count + t;
            kMultiply[width / kLane][static_cast<size_t>(std::min<int64_t>(kRows, count - t))](pixels_ + at * p_.c, weights_ + i * p_.c * width, p_.c,
                                                                                               sums_ + at * width);
          }
      }
      for (int64_t t = 0; t < count; ++t) give(t, k, width);
    }
  }

  bool finite() const { return special_ == 0; }

 private:
  static constexpr int kSpecial = 0x01 | 0x08 | 0x10 | 0x80;  // NaNs and infinities

  Square square(int64_t t) const {
    const int64_t cols = (p_.w + 1) / 2, rows = (p_.h + 1) / 2, at = first_ + t;
    return {at / (rows * cols), at / cols % rows * 2, at % cols * 2};
  }

  VT_AVX512 void take(int64_t t) {
    const Square s = square(t);
    const float* from[4][4];
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t j = 0; j < 4; ++j) {
        const int64_t row = s.row + i - 1, col = s.col + j - 1;
        const bool inside = row >= 0 && row < p_.h && col >= 0 && col < p_.w;
        from[i][j] = inside ? p_.x + ((s.image * p_.h + row) * p_.w + col) * p_.c : nullptr;
      }
    float* to = pixels_ + t * p_.c;
    const int64_t next = count_ * p_.c;
    for (int64_t c = 0; c < p_.c; c += kLane, to += kLane) {
      __m512 d[4][4], e[4][4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) d[i][j] = from[i][j] ? _mm512_loadu_ps(from[i][j] + c) : _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        e[0][j] = _mm512_sub_ps(d[0][j], d[2][j]);
        e[1][j] = _mm512_add_ps(d[1][j], d[2][j]);
        e[2][j] = _mm512_sub_ps(d[2][j], d[1][j]);
        e[3][j] = _mm512_sub_ps(d[1][j], d[3][j]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        _mm512_storeu_ps(to + (4 * i) * next, _mm512_sub_ps(e[i][0], e[i][2]));
        _mm512_storeu_ps(to + (4 * i + 1) * next, _mm512_add_ps(e[i][1], e[i][2]));
        _mm512_storeu_ps(to + (4 * i + 2) * next, _mm512_sub_ps(e[i][2], e[i][1]));
        _mm512_storeu_ps(to + (4 * i + 3) * next, _mm512_sub_ps(e[i][1], e[i][3]));
      }
    }
  }

  VT_AVX512 void give(int64_t t, int64_t k, int64_t width) {
    const Square s = square(t);
    const float* from = sums_ + t * width;
    const int64_t next = count_ * width;
    for (int64_t v = 0; v < width; v += kLane) {
      __m512 e[2][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512 a = _mm512_load_ps(from + j * next + v), b = _mm512_load_ps(from + (4 + j) * next + v),
                     c = _mm512_load_ps(from + (8 + j) * next + v), d = _mm512_load_ps(from + (12 + j) * next + v);
        e[0][j] = _mm512_add_ps(a, _mm512_add_ps(b, c));
        e[1][j] = _mm512_sub_ps(_mm512_sub_ps(b, c), d);
      }
      const __m512 bias = p_.bias ? _mm512_loadu_ps(p_.bias + k + v) : _mm512_setzero_ps();
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          if (s.row + i >= p_.h || s.col + j >= p_.w) continue;
          __m512 sum = j == 0 ? _mm512_add_ps(e[i][0], _mm512_add_ps(e[i][1], e[i][2])) : _mm512_sub_ps(_mm512_sub_ps(e[i][1], e[i][2]), e[i][3]);
          sum = _mm512_add_ps(sum, bias);
          const int64_t at = ((s.image * p_.h + s.row + i) * p_.w + s.col + j) * p_.k + k + v;
          special_ |= _mm512_fpclass_ps_mask(sum, kSpecial);
          if (p_.add) sum = _mm512_add_ps(sum, _mm512_loadu_ps(p_.add + at));
          if (p_.relu) sum = _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps());  // NaN stays
          _mm512_storeu_ps(p_.y + at, sum);
        }
    }
  }

  const Winograd& p_;
  const int64_t first_result_, last_result_;
  float *pixels_, *sums_, *weights_;
  int64_t first_ = 0, count_ = 0;
  __mmask16 special_ = 0;
};

}  // namespace

bool convolve(const Winograd& p, int part, int parts) {
  const int64_t squares = p.n * ((p.h + 1) / 2) * ((p.w + 1) / 2), panels = (p.k + kPanel - 1) / kPanel;
  // Weights are transformed for each block. Where there are many, parts share them out before they share out the image.
  int64_t by_panel = 1;
  if (p.c * p.k >= kManyWeights)
    for (int64_t d = 2; d <= std::min<int64_t>(parts, panels); ++d)
      if (parts % d == 0) by_panel = d;
  const int64_t by_square = parts / by_panel, i = part % by_panel, j = part / by_panel;
  const int64_t first = panels * i / by_panel * kPanel, last = std::min(p.k, panels * (i + 1) / by_panel * kPanel);
  const int64_t begin = squares * j / by_square, end = squares * (j + 1) / by_square;
  if (begin == end || first == last) return true;
  const int64_t bytes = by_panel > 1 ? 2 * kBlockBytes : kBlockBytes;
  const int64_t fit = std::max<int64_t>(1, bytes / (kPoints * 4 * p.c) / kRows) * kRows;
  const int64_t blocks = (end - begin + fit - 1) / fit, most = ((end - begin + blocks - 1) / blocks + kRows - 1) / kRows * kRows;
  Block block(p, most, first, last);
  for (int64_t t = begin; t < end; t += most) block.run(t, std::min(most, end - t));
  return block.finite();
}

#else

bool convolve(const Winograd&, int, int) { return true; }

#endif

}  // namespace vitrify::runtime
