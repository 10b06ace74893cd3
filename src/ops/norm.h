// Parts shared by normalisations, their gradients and losses.
#pragma once
#include "ops/reduction.h"

namespace vitrify::ops {

Tensor as_type(Lowering&, const Tensor&, DType out);
Tensor rstd_of(Lowering&, const Moments&, double eps);
// A [C] vector over [N, C, ...].
Tensor channelwise(Lowering&, const Tensor& v, const Dims& sizes);
// (x - mean) * rstd * weight + bias, all broadcast to x.
Tensor normalized(const Args&, const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& weight, const Tensor& bias, DType out);
std::vector<int64_t> dims_from(size_t first, size_t rank);
std::vector<int64_t> all_but_channel(size_t rank);

std::span<const OpRow> norm_gradient_rows();
std::span<const OpRow> loss_rows();

Shape shape_layer_norm(sym::Context&, ArgSpan);
Shape shape_rms_norm(sym::Context&, ArgSpan);
Shape shape_batch_norm_no_training(sym::Context&, ArgSpan);
// In which order batch norm's kernels find an operand's memory; none: in neither. Strides of dims of one element are not asked.
std::optional<ir::MemoryFormat> batch_norm_order(sym::Context&, const TensorType&);
Shape shape_native_batch_norm(sym::Context&, ArgSpan);
Shape shape_batch_norm_functional(sym::Context&, ArgSpan);
Shape shape_batch_norm_no_stats(sym::Context&, ArgSpan);
Shape shape_group_norm(sym::Context&, ArgSpan);
Shape shape_softmax(sym::Context&, ArgSpan);

}  // namespace vitrify::ops
