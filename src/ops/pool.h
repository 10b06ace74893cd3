// Shape rules of pooling and resampling (pool_shapes.cpp), and the rows of their gradients.
#pragma once
#include <atomic>

#include "ops/shapes.h"

namespace vitrify::ops {

std::span<const OpRow> pool_gradient_rows();

// Argument i of a pooling over n dims: a number for each, one for all, or none.
std::vector<int64_t> per_dim(const Args&, size_t i, size_t n, const std::vector<int64_t>& if_empty);

// Elements under window `o` of an input of `sizes`: of the padded input, or of the input itself. One stride, padding and kernel size for each of the
// last dims.
Int window_numel(const Index& o, const Dims& sizes, const std::vector<int64_t>& stride, const std::vector<int64_t>& pad,
                 const std::vector<int64_t>& kernel, bool include_pad);

Shape shape_max_pool2d(sym::Context&, ArgSpan);
Shape shape_max_pool1d(sym::Context&, ArgSpan);  // as its kernel without indices gives it
Shape shape_adaptive_max_pool2d(sym::Context&, ArgSpan);
Shape shape_avg_pool2d(sym::Context&, ArgSpan);
Shape shape_adaptive_avg_pool2d(sym::Context&, ArgSpan);
Shape shape_upsample(sym::Context&, ArgSpan);  // to one size for each dim but two
Shape shape_upsample_backward(sym::Context&, ArgSpan);
Shape shape_upsample_backward_in_order(sym::Context&, ArgSpan);  // of kernels that know no other layout, whatever Meta says

// Whether ATen's kernel for linear interpolation over n dims rounds the place of a sample along dim d once, or after each step, as its compiler had
// it, of images of so many channels in channels-last memory, or of others (0). Asked where one is lowered; null: once.
inline std::atomic<bool (*)(DType, size_t n, size_t d, int64_t channels)> place_rounds_once{nullptr};

// Of aten::upsample_nearest2d: whether other strides of the same image may give another result.
bool nearest_looks_at_strides(const ir::Node&);

}  // namespace vitrify::ops
