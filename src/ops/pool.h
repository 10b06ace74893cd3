// Shape rules of pooling and resampling (pool_shapes.cpp), and the rows of their gradients.
#pragma once
#include "ops/shapes.h"

namespace vitrify::ops {

std::span<const OpRow> pool_gradient_rows();

Shape shape_max_pool2d(sym::Context&, ArgSpan);
Shape shape_avg_pool2d(sym::Context&, ArgSpan);
Shape shape_adaptive_avg_pool2d(sym::Context&, ArgSpan);
Shape shape_upsample2d(sym::Context&, ArgSpan);

}  // namespace vitrify::ops
