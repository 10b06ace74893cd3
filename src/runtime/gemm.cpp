#include "runtime/gemm.h"

#include "runtime/gemm_tile.h"

namespace vitrify::runtime {

#if defined(__x86_64__)

namespace {

using namespace tile;

constexpr int64_t kMaxRows = 512;    // of a copied at a time
constexpr int64_t kFlatDepth = 256;  // of K at a time, where a row of b is contiguous

// How much of b is copied at a time: `depth` of its K and `panels` times kCols of its N. Two such blocks and `depth` columns of a lie in L2.
struct Blocking {
  int64_t depth;
  int panels;
};
// Wide where a row of a block is contiguous, deep where a column is.
constexpr Blocking blocking(bool b_transposed) { return b_transposed ? Blocking{kMaxDepth, 2} : Blocking{kFlatDepth, 3}; }

// [first, last) of `n` that is part `part` of `parts`, at multiples of `unit`.
std::pair<int64_t, int64_t> share(int64_t n, int64_t unit, int64_t part, int64_t parts) {
  const int64_t units = (n + unit - 1) / unit;
  return {std::min(n, units * part / parts * unit), std::min(n, units * (part + 1) / parts * unit)};
}

// Pieces of at most `most` of k, all about as deep.
int64_t depth_of(int64_t k, int64_t most) {
  const int64_t pieces = (k + most - 1) / most;
  return ((k + pieces - 1) / pieces + kLane - 1) / kLane * kLane;
}

// Columns [first_col, last_col) of all rows. The next block of b is copied between tiles of this one.
void multiply_blocks(const Product& p, int64_t first_col, int64_t last_col) {
  const auto [max_depth, panels] = blocking(p.b_transposed);
  const int64_t depth = depth_of(p.k, max_depth), row_blocks = (p.m + kRows - 1) / kRows, wide = panels * kCols;
  float* const copied_a = scratch(static_cast<size_t>((row_blocks * kRows + 2 * wide) * depth));
  float *now = copied_a + row_blocks * kRows * depth, *then = now + wide * depth;
  int32_t offsets[kMaxDepth / 2];

  const auto block_at = [&](int64_t d, int64_t col) {
    // The first is narrow: nothing hides its copying.
    const int64_t most = d == 0 && col == first_col ? kCols : wide;
    return Block{p.b_transposed ? p.b + col * p.b_stride + d : p.b + d * p.b_stride + col, p.b_stride, p.b_transposed, std::min(depth, p.k - d),
                 static_cast<int>(std::min(most, last_col - col))};
  };
  int64_t d = 0, col = first_col;
  Block block = block_at(d, col);
  block.copy(0, block.units(), now);
  for (;;) {
    if (col == first_col)
      for (int64_t i = 0; i < p.m; i += kRows)
        copy_a(p.a + i * p.a_stride + d, p.a_stride, block.k, static_cast<int>(std::min<int64_t>(kRows, p.m - i)), copied_a + i * depth);
    int64_t next_d = d, next_col = col + block.cols;
    if (next_col >= last_col) next_col = first_col, next_d = d + depth;
    const bool more = next_d < p.k;
    const Block next = more ? block_at(next_d, next_col) : block;
    const int64_t units = more ? next.units() : 0, calls = row_blocks * block.panels(), units_per_call = (units + calls - 1) / calls;
    next.lines(units_per_call, offsets, block.k / 4 * 2);
    int64_t copied = 0;
    for (int64_t i = 0; i < p.m; i += kRows)
      for (int q = 0; q < block.panels(); ++q) {
        const int64_t at = col + q * kCols;
        tile::multiply({copied_a + i * depth,
                        now + q * kCols * block.k,
                        0,
                        nullptr,
                        block.k,
                        p.c + i * p.c_stride + at,
                        p.c_stride,
                        p.bias ? p.bias + at : nullptr,
                        d > 0,
                        block.mask(q),
                        {reinterpret_cast<const char*>(next.unit(copied)), offsets}},
                       std::min<int64_t>(kRows, p.m - i), block.width(q));
        const int64_t end = std::min(units, copied + units_per_call);
        next.copy(copied, end, then);
        copied = end;
      }
    if (!more) return;
    d = next_d, col = next_col, block = next;
    std::swap(now, then);
  }
}

// Whether a panel of b stays in L2 from when it is fetched: rows whole pages apart fall into few of its sets. With few rows of a, copying the panel
// while the first of them are multiplied with it shows.
bool panels_suit(const Product& p) { return !p.b_transposed && p.m >= 8 * kRows && p.b_stride % 1024 != 0; }

// The same, a panel of b after the other: each is copied as the first rows of a are multiplied with it.
void multiply_panels(const Product& p, int64_t first_col, int64_t last_col) {
  const int64_t depth = depth_of(p.k, kFlatDepth), row_blocks = (p.m + kRows - 1) / kRows;
  float* const copied_a = scratch(static_cast<size_t>((row_blocks * kRows + kCols) * depth));
  float* const panel = copied_a + row_blocks * kRows * depth;
  int32_t offsets[kMaxDepth / 2];
  const auto panel_at = [&](int64_t d, int64_t col) {
    return Block{p.b + d * p.b_stride + col, p.b_stride, false, std::min(depth, p.k - d), static_cast<int>(std::min<int64_t>(kCols, last_col - col))};
  };
  for (int64_t d = 0; d < p.k; d += depth) {
    const int64_t k = std::min(depth, p.k - d);
    for (int64_t i = 0; i < p.m; i += kRows)
      copy_a(p.a + i * p.a_stride + d, p.a_stride, k, static_cast<int>(std::min<int64_t>(kRows, p.m - i)), copied_a + i * depth);
    for (int64_t col = first_col; col < last_col; col += kCols) {
      const Block b = panel_at(d, col);
      const bool wraps = col + kCols >= last_col;
      const Block next = !wraps ? panel_at(d, col + kCols) : d + depth < p.k ? panel_at(d + depth, first_col) : b;
      const int64_t calls = std::max<int64_t>(1, row_blocks - 1), rows_per_call = (next.k + calls - 1) / calls;
      next.lines(rows_per_call, offsets, k / 4 * 2);
      for (int64_t i = 0, fetched = 0; i < p.m; i += kRows) {
        const bool first = i == 0;
        tile::multiply({copied_a + i * depth,
                        first ? b.from : panel,
                        p.b_stride,
                        first ? panel : nullptr,
                        k,
                        p.c + i * p.c_stride + col,
                        p.c_stride,
                        p.bias ? p.bias + col : nullptr,
                        d > 0,
                        b.mask(0),
                        {reinterpret_cast<const char*>(next.unit(fetched)), offsets}},
                       std::min<int64_t>(kRows, p.m - i), b.width(0));
        if (!first) fetched = std::min(next.k - rows_per_call, fetched + rows_per_call);
      }
    }
  }
}

}  // namespace

bool can_multiply() {
  static const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  return can;
}

void multiply(const Product& p, int part, int parts) {
  // Each part copies its own rows of a and columns of b: the larger of both is split, and by columns only as far as leaves a panel to each.
  int by_cols = p.m > p.n ? 1 : parts;
  while (by_cols > 1 && (parts % by_cols != 0 || p.n / by_cols < kCols)) --by_cols;
  const auto [first_col, last_col] = share(p.n, kLane, part % by_cols, by_cols);
  const auto [first_row, last_row] = share(p.m, kRows, part / by_cols, parts / by_cols);
  if (first_col >= last_col) return;
  const int64_t chunks = (last_row - first_row + kMaxRows - 1) / kMaxRows;
  for (int64_t i = 0; i < chunks; ++i) {
    const auto [from, to] = share(last_row - first_row, kRows, i, chunks);
    Product rows = p;
    rows.a += (first_row + from) * p.a_stride;
    rows.c += (first_row + from) * p.c_stride;
    rows.m = to - from;
    panels_suit(rows) ? multiply_panels(rows, first_col, last_col) : multiply_blocks(rows, first_col, last_col);
  }
}

#else

bool can_multiply() { return false; }
void multiply(const Product&, int, int) {}

#endif

}  // namespace vitrify::runtime
