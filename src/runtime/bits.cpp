#include "runtime/bits.h"

#include <cstring>

#include "runtime/clones.h"

namespace vitrify::runtime {

namespace {

// One factor moves byte k, which is 0 or 1, to bit 56 + k; no two of the products meet.
VT_CLONES void pack(const bool* __restrict in, uint8_t* __restrict out, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    uint64_t eight;
    std::memcpy(&eight, in + 8 * i, sizeof eight);
    out[i] = static_cast<uint8_t>(eight * 0x0102040810204080u >> 56);
  }
}

}  // namespace

void pack_bits(const bool* in, uint8_t* out, int64_t n) {
  const int64_t whole = n / 8;
  pack(in, out, whole);
  if (n % 8 == 0) return;
  out[whole] = 0;
  for (int64_t i = 8 * whole; i < n; ++i) out[whole] = static_cast<uint8_t>(out[whole] | in[i] << (i % 8));
}

void unpack_bits(const uint8_t* in, bool* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = in[i / 8] >> (i % 8) & 1;
}

}  // namespace vitrify::runtime
