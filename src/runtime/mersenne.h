// The Mersenne Twister (mt19937) in bulk: the words that drawing one by one gives, at a fraction of the time.
#pragma once
#include <cstdint>

namespace vitrify::runtime {

struct Mersenne {
  static constexpr int kState = 624;
  uint32_t state[kState];
  int left = 1;       // draws until the state is made anew, that one included
  uint32_t next = 0;  // where the next word is taken from
};

void draw_words(Mersenne&, uint32_t* out, int64_t n);

// Bit i (runtime/bits.h) is u < p, u uniform over [0, 1) in 53 bits: two words each, the first is the high half.
void draw_bernoulli(Mersenne&, uint8_t* bits, int64_t n, double p);
// Uniform over [0, 1) in 24 bits: one word each.
void draw_uniform(Mersenne&, float* out, int64_t n);

}  // namespace vitrify::runtime
