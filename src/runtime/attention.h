// Scaled dot-product attention in single precision for x86-64 processors with AVX-512.
//
// out = softmax(q k^T * scale + mask) v for each batch and head, over up to 48 queries (across the lanes) and 384 keys at a time, with the sums of
// the softmax carried from one run of keys to the next (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
#pragma once

#include <array>
#include <cstdint>

namespace vitrify::runtime {

// Strides in elements, of batch, head and row; rows are dense.
struct DotProductAttention {
  using Strides = std::array<int64_t, 3>;
  const float *q, *k, *v;  // [B,H,Q,D], [B,H,K,D], [B,H,K,D]
  Strides q_strides, k_strides, v_strides;
  const float* mask;  // [B,H,Q,K] or null: added to the scaled scores
  std::array<int64_t, 4> mask_strides;
  bool causal;  // query i sees keys 0..i
  float scale;
  float* out;  // [B,H,Q,D]; of a query that sees nothing: zeros
  Strides out_strides;
  float* lse;  // [B,H,Q]: logarithm of the sum of exponentials; of a query that sees nothing: 0
  Strides lse_strides;
  int64_t batch, heads, queries, keys, width;
};

// Whether this processor and this problem (copies of a head's keys and values take room of each thread) suit attend().
bool can_attend(const DotProductAttention&);

// Computes part `part` of `parts`. Results do not depend on `parts`. Throws std::bad_alloc.
// False where a value or a result is infinite or NaN: which keys that a query does not see are multiplied with its weights of zero follows from
// blocks.
bool attend(const DotProductAttention&, int part, int parts);

}  // namespace vitrify::runtime
