// Shape rules of calls: order, search, scans, windows as columns, distances and Fourier transforms.
#pragma once
#include "ops/shapes.h"

namespace vitrify::ops {

Shape shape_median(sym::Context&, ArgSpan);
Shape shape_median_dim(sym::Context&, ArgSpan);
Shape shape_logcumsumexp(sym::Context&, ArgSpan);
Shape shape_cummax(sym::Context&, ArgSpan);  // cummin too
Shape shape_nansum(sym::Context&, ArgSpan);
Shape shape_trace(sym::Context&, ArgSpan);
Shape shape_renorm(sym::Context&, ArgSpan);
Shape shape_pdist(sym::Context&, ArgSpan);
Shape shape_pdist_backward(sym::Context&, ArgSpan);
Shape shape_searchsorted(sym::Context&, ArgSpan);
Shape shape_bucketize(sym::Context&, ArgSpan);
Shape shape_trilinear(sym::Context&, ArgSpan);
Shape shape_im2col(sym::Context&, ArgSpan);
Shape shape_col2im(sym::Context&, ArgSpan);
Shape shape_lstm(sym::Context&, ArgSpan);
Shape shape_rnn(sym::Context&, ArgSpan);  // gru too
Shape shape_cdist(sym::Context&, ArgSpan);
Shape shape_cdist_backward(sym::Context&, ArgSpan);
Shape shape_lu_solve(sym::Context&, ArgSpan);
template <size_t n>
Shape shape_edge_pad_backward(sym::Context&, ArgSpan);  // over the last n dims
// Arithmetic of two that gives complex numbers, which kernels of ours do not know; else as `of_others` says.
Shape shape_complex_arithmetic(sym::Context&, ArgSpan, int operands);
template <ShapeFn of_others, int operands = 2>
Shape complex_or(sym::Context& ctx, ArgSpan args) {
  if (auto r = shape_complex_arithmetic(ctx, args, operands)) return r;
  return of_others(ctx, args);
}
Shape shape_magnitude(sym::Context&, const TensorType&);
template <ShapeFn of_others>
Shape magnitude_or(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  return x && is_complex(x->dtype) ? shape_magnitude(ctx, *x) : of_others(ctx, args);
}
Shape shape_complex(sym::Context&, ArgSpan);
Shape shape_fft_r2c(sym::Context&, ArgSpan);
Shape shape_fft_c2c(sym::Context&, ArgSpan);
Shape shape_fft_c2r(sym::Context&, ArgSpan);

}  // namespace vitrify::ops
