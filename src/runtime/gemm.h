// Single-precision products of matrices for x86-64 processors with AVX-512.
//
// c[M,N] = a[M,K] * b[K,N] (+ bias[N]), where b may be given as its transpose. Both operands are copied, block by block, into the order in which the
// inner loop reads them (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). Nothing of b is copied ahead of a call:
// while the inner loop runs on one block, the next is fetched, which hides most of its wait for memory, so that weights need no packed copy of
// their own. Blocks are copied between tiles of the inner loop or, where rows of b are dense and suit the caches, by the first tiles that read them.
#pragma once

#include <cstdint>

namespace vitrify::runtime {

// Strides are from row to row, in elements; rows are dense.
struct Product {
  const float* a;  // [M,K]
  int64_t a_stride;
  const float* b;  // [K,N], or [N,K] if b_transposed
  int64_t b_stride;
  bool b_transposed;
  const float* bias;  // [N] or null
  float* c;           // [M,N]
  int64_t c_stride;
  int64_t m, n, k;  // at least 1 each
};

// Whether this processor can run multiply().
bool can_multiply();

// Computes part `part` of `parts` of c; other parts write other elements. Results do not depend on `parts`. Throws std::bad_alloc.
void multiply(const Product& p, int part, int parts);

}  // namespace vitrify::runtime
