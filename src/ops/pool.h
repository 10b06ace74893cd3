// Shape rules of pooling and resampling (pool_shapes.cpp).
#pragma once
#include "ops/shapes.h"

namespace vitrify::ops {

Shape shape_max_pool2d(sym::Context&, ArgSpan);
Shape shape_avg_pool2d(sym::Context&, ArgSpan);
Shape shape_adaptive_avg_pool2d(sym::Context&, ArgSpan);
Shape shape_upsample2d(sym::Context&, ArgSpan);

}  // namespace vitrify::ops
