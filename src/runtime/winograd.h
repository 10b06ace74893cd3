// Single-precision 3x3 convolutions with 4/9 of the multiplications, for x86-64 processors with AVX-512.
//
// Two by two results are made at once, of four by four pixels: sums and differences of pixels times sums and differences of weights, 16 products for
// each pair of channels in place of 36 (Winograd's F(2x2, 3x3); Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016). The
// numbers that pixels and weights are multiplied by are 0, 1, -1 and 1/2, so that little accuracy is lost, and sums are a ninth as long.
#pragma once

#include <cstdint>

namespace vitrify::runtime {

// y = relu?(convolution(x, weights) + bias + add), stride 1, padding 1, channels last; all dense.
struct Winograd {
  const float* x;        // [n, h, w, c]
  const float* weights;  // as winograd_weights() makes them
  const float* bias;     // [k] or null
  const float* add;      // [n, h, w, k] or null
  float* y;              // [n, h, w, k]
  int64_t n, h, w;
  int64_t c, k;  // multiples of 16
  bool relu;
};

// Whether this processor can run convolve().
bool can_convolve();

// Weights [k, c, 3, 3], dense, in the order in which convolve() reads them: as many.
void winograd_weights(const float* weights, int64_t k, int64_t c, float* to);

// Computes part `part` of `parts` of y; other parts write other elements. Results do not depend on `parts`. Throws std::bad_alloc.
// False where a sum is infinite or NaN: an infinity, or what overflows in between, reaches results that it does not reach in a direct convolution.
bool convolve(const Winograd&, int part, int parts);

}  // namespace vitrify::runtime
