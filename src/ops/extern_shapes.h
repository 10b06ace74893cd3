// Shape rules of calls: order, search, scans, windows as columns, distances and Fourier transforms.
#pragma once
#include "ops/shapes.h"

namespace vitrify::ops {

Shape shape_median(sym::Context&, ArgSpan);
Shape shape_median_dim(sym::Context&, ArgSpan);
Shape shape_logcumsumexp(sym::Context&, ArgSpan);
Shape shape_searchsorted(sym::Context&, ArgSpan);
Shape shape_bucketize(sym::Context&, ArgSpan);
Shape shape_trilinear(sym::Context&, ArgSpan);
Shape shape_im2col(sym::Context&, ArgSpan);
Shape shape_col2im(sym::Context&, ArgSpan);
Shape shape_lstm(sym::Context&, ArgSpan);
Shape shape_rnn(sym::Context&, ArgSpan);  // gru too
Shape shape_cdist(sym::Context&, ArgSpan);
Shape shape_cdist_backward(sym::Context&, ArgSpan);
template <size_t n>
Shape shape_edge_pad_backward(sym::Context&, ArgSpan);  // over the last n dims
Shape shape_fft_r2c(sym::Context&, ArgSpan);
Shape shape_fft_c2c(sym::Context&, ArgSpan);
Shape shape_fft_c2r(sym::Context&, ArgSpan);

}  // namespace vitrify::ops
