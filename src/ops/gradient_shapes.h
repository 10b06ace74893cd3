// Shape rules of derivatives. Results that `output_mask` leaves out have a type as well.
#pragma once
#include "ops/shapes.h"

namespace vitrify::ops {

Shape shape_layer_norm_backward(sym::Context&, ArgSpan);
Shape shape_batch_norm_backward(sym::Context&, ArgSpan);
Shape shape_group_norm_backward(sym::Context&, ArgSpan);
Shape shape_nll_backward(sym::Context&, ArgSpan);
Shape shape_nll2d_backward(sym::Context&, ArgSpan);
Shape shape_loss_backward(sym::Context&, ArgSpan);
Shape shape_convolution_backward(sym::Context&, ArgSpan);
Shape shape_pool_backward(sym::Context&, ArgSpan);  // of two dims: gradient, input, ...
Shape shape_flash_cpu_backward(sym::Context&, ArgSpan);

}  // namespace vitrify::ops
