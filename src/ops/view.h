// Shape rules of views (view_shapes.cpp) and the bounds test of rules that read only part of a tensor.
#pragma once
#include "ops/shapes.h"

namespace vitrify::ops {

// lo <= e < hi as a b8 value; constant where it is provable.
Val within(Body&, Int e, Int lo, Int hi);

// A strided window on x's buffer.
Tensor restride(const Tensor& x, Dims sizes, Dims strides, Int offset);

// Strides of x's memory seen with other sizes, if there are any.
std::optional<Dims> strides_of_view(sym::Context&, const TensorType& x, const Dims& sizes);

Shape shape_view(sym::Context&, ArgSpan);
Shape shape_unsafe_view(sym::Context&, ArgSpan);
Shape shape_squeeze_all(sym::Context&, ArgSpan);
Shape shape_squeeze(sym::Context&, ArgSpan);
Shape shape_unsqueeze(sym::Context&, ArgSpan);
Shape shape_expand(sym::Context&, ArgSpan);
Shape shape_permute(sym::Context&, ArgSpan);
Shape shape_transpose(sym::Context&, ArgSpan);
Shape shape_t(sym::Context&, ArgSpan);
Shape shape_slice(sym::Context&, ArgSpan);
Shape shape_select(sym::Context&, ArgSpan);
Shape shape_unfold(sym::Context&, ArgSpan);
Shape shape_as_strided(sym::Context&, ArgSpan);
Shape shape_view_as_real(sym::Context&, ArgSpan);
Shape shape_view_as_complex(sym::Context&, ArgSpan);
Shape shape_diagonal(sym::Context&, ArgSpan);
Shape shape_flip(sym::Context&, ArgSpan);
Shape shape_split(sym::Context&, ArgSpan);
Shape shape_split_sizes(sym::Context&, ArgSpan);
Shape shape_unbind(sym::Context&, ArgSpan);
Shape shape_slice_scatter(sym::Context&, ArgSpan);
Shape shape_select_scatter(sym::Context&, ArgSpan);
Shape shape_diagonal_scatter(sym::Context&, ArgSpan);
Shape shape_backward_of_view(sym::Context&, ArgSpan);
Shape shape_pixel_shuffle(sym::Context&, ArgSpan);
Shape shape_pixel_unshuffle(sym::Context&, ArgSpan);

}  // namespace vitrify::ops
