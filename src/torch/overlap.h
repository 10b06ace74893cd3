// Which strided regions of memory have an element in common.
#pragma once
#include <ATen/ATen.h>

#include "ir/graph.h"

namespace vitrify {

// Exact where few steps decide it; else true.
bool may_share(const at::Tensor& a, const at::Tensor& b);  // by address
bool may_share(int64_t a_offset, at::IntArrayRef a_sizes, at::IntArrayRef a_strides, int64_t b_offset, at::IntArrayRef b_sizes,
               at::IntArrayRef b_strides, int64_t item = 1);  // offsets and strides in units of which an element has `item`
bool may_overlap_itself(at::IntArrayRef sizes, at::IntArrayRef strides);
bool overlaps_itself(const ir::TensorType&);  // by a stride of zero, or in the sizes of now
// Of placeholders of one capture, whose sizes and places are then what they are in this call.
bool placeholders_may_share(const at::Tensor& a, const at::Tensor& b);
// Whether tensors or placeholders that are written share memory with each other, or with those that are read.
bool writes_one_memory_twice(const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read);

}  // namespace vitrify
