// Masks as bits: uint8 tensors of loop::bytes_of_bits(number of elements) bytes, in the order of the masks' memory, which is dense.
#pragma once
#include <ATen/ATen.h>

#include "ir/graph.h"

namespace vitrify {

at::Tensor new_bits(int64_t elements);               // contents undefined
ir::TensorType bits_of(const ir::TensorType& mask);  // the type of its bits
at::Tensor unpacked(const at::Tensor& bits, at::IntArrayRef size, at::IntArrayRef stride);

}  // namespace vitrify
