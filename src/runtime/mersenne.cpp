#include "runtime/mersenne.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/bits.h"
#include "runtime/clones.h"

namespace vitrify::runtime {

namespace {

constexpr int kN = Mersenne::kState, kM = 397;
constexpr int64_t kTile = 4096;  // words: stays in the nearest cache

inline uint32_t twisted(uint32_t u, uint32_t v) { return (((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1) ^ ((0u - (v & 1)) & 0x9908b0dfu); }

// A word depends on the ones 1 and 397 after it, which are a block away: no loop reads what it has written within a vector.
VT_CLONES void renew(uint32_t* __restrict p) {
#pragma GCC ivdep
  for (int j = 0; j < kN - kM; ++j) p[j] = p[j + kM] ^ twisted(p[j], p[j + 1]);
#pragma GCC ivdep
  for (int j = kN - kM; j < kN - 1; ++j) p[j] = p[j + kM - kN] ^ twisted(p[j], p[j + 1]);
  p[kN - 1] = p[kM - 1] ^ twisted(p[kN - 1], p[0]);
}

VT_CLONES void temper(const uint32_t* __restrict p, uint32_t* __restrict out, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    uint32_t y = p[j];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    y ^= y >> 18;
    out[j] = y;
  }
}

VT_CLONES void below(const uint64_t* __restrict words, uint8_t* __restrict out, int64_t n, int64_t limit) {
  constexpr uint64_t mask = (uint64_t{1} << 53) - 1;
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int64_t>((words[i] << 32 | words[i] >> 32) & mask) < limit;
}

VT_CLONES void to_unit(const uint32_t* __restrict words, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<int32_t>(words[i] & 0xffffffu)) * 0x1p-24f;
}

}  // namespace

void draw_words(Mersenne& m, uint32_t* out, int64_t n) {
  while (n > 0) {
    if (m.left == 1) {
      renew(m.state);
      m.left = kN + 1;
      m.next = 0;
    }
    const int64_t k = std::min<int64_t>(m.left - 1, n);
    temper(m.state + m.next, out, k);
    m.left -= static_cast<int>(k);
    m.next += static_cast<uint32_t>(k);
    out += k;
    n -= k;
  }
}

void draw_bernoulli(Mersenne& m, uint8_t* bits, int64_t n, double p) {
  alignas(64) uint32_t words[kTile];
  const auto limit = static_cast<int64_t>(std::ceil(p * 0x1p53));  // exact: u is a multiple of 2^-53
  for (int64_t i = 0; i < n; i += kTile / 2) {
    const int64_t k = std::min(n - i, kTile / 2);
    draw_words(m, words, 2 * k);
    uint64_t pairs[kTile / 2];
    std::memcpy(pairs, words, static_cast<size_t>(k) * sizeof(uint64_t));
    bool mask[kTile / 2];
    below(pairs, reinterpret_cast<uint8_t*>(mask), k, limit);
    pack_bits(mask, bits + i / 8, k);
  }
}

void draw_uniform(Mersenne& m, float* out, int64_t n) {
  alignas(64) uint32_t words[kTile];
  for (int64_t i = 0; i < n; i += kTile) {
    const int64_t k = std::min(n - i, kTile);
    draw_words(m, words, k);
    to_unit(words, out + i, k);
  }
}

}  // namespace vitrify::runtime
