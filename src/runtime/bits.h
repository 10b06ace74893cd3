// Masks as bits, lowest first: element i is bit i % 8 of byte i / 8.
#pragma once
#include <cstdint>

namespace vitrify::runtime {

void pack_bits(const bool* in, uint8_t* out, int64_t n);  // the bits behind the last element of the last byte are 0
void unpack_bits(const uint8_t* in, bool* out, int64_t n);

}  // namespace vitrify::runtime
