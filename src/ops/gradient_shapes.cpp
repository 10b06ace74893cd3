// Shapes of derivatives that follow an operand whatever its sizes are.
#include "ops/gradient_shapes.h"

#include "ops/norm.h"

namespace vitrify::ops {
namespace {

const TensorType* float_arg(ArgSpan args, size_t i) {
  const TensorType* t = tensor_arg(args, i);
  return t && is_float(t->dtype) ? t : nullptr;
}
TensorType plain(const TensorType& like, Dims sizes) { return contiguous_type(like.dtype, like.device, std::move(sizes)); }
TensorType of_format(sym::Context& ctx, const TensorType& like) {
  TensorType t = plain(like, like.sizes);
  t.strides = strides_for(suggest_memory_format(ctx, like), like.sizes);
  return t;
}
// The gradient of x and of the affine parameters, which are of the weight's type or, without one, of x's.
Shape with_affine(TensorType dx, const TensorType& x, const TensorType* w, const Dims& of, int count) {
  Types r{std::move(dx)};
  for (int i = 0; i < count; ++i) r.push_back(plain(w ? *w : x, of));
  return r;
}
Shape over_normalized(ArgSpan args, size_t w, int count) {
  const TensorType* x = float_arg(args, 1);
  auto* shape = args.size() > w ? std::get_if<std::vector<Int>>(&args[2]) : nullptr;
  if (!x || !shape) return {};
  return with_affine(plain(*x, x->sizes), *x, tensor_arg(args, w), Dims(shape->begin(), shape->end()), count);
}

}  // namespace

Shape shape_layer_norm_backward(sym::Context&, ArgSpan args) { return over_normalized(args, 5, 2); }

Shape shape_batch_norm_backward(sym::Context& ctx, ArgSpan args) {
  const TensorType *g = tensor_arg(args, 0), *x = float_arg(args, 1);
  if (!g || !x || x->sizes.size() < 2) return {};
  TensorType dx = of_format(ctx, *x);
  // The kernel that walks memory is taken where both lie in an order of theirs and strides say the same of them; its result lies in x's order.
  if (x->sizes.size() > 3 && x->device.kind == DeviceKind::CPU)
    if (const auto order = batch_norm_order(ctx, *x);
        order && batch_norm_order(ctx, *g) && suggest_memory_format(ctx, *g) == suggest_memory_format(ctx, *x))
      dx.strides = strides_for(*order, x->sizes);
  return with_affine(std::move(dx), *x, tensor_arg(args, 2), {x->sizes[1]}, 2);
}

Shape shape_group_norm_backward(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = float_arg(args, 1);
  if (!x || x->sizes.size() < 2) return {};
  return with_affine(of_format(ctx, *x), *x, tensor_arg(args, 4), {x->sizes[1]}, 2);
}

Shape shape_nll_backward(sym::Context&, ArgSpan args) {
  const TensorType* x = float_arg(args, 1);
  return x ? one(plain(*x, x->sizes)) : Shape();
}

// Zeros like the input: where those are not contiguous, the kernel refuses them.
Shape shape_nll2d_backward(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = float_arg(args, 1);
  if (!x || !is_contiguous(ctx, *x)) return {};
  TensorType t = plain(*x, x->sizes);
  t.strides = x->strides;
  return one(t);
}

Shape shape_loss_backward(sym::Context& ctx, ArgSpan args) {
  if (args.size() < 3) return {};
  const TensorType *g = float_arg(args, 0), *x = float_arg(args, 1), *y = float_arg(args, 2);
  if (!g || !x || !y || g->dtype != x->dtype || y->dtype != x->dtype) return {};
  const TensorType* operands[] = {x, y, g};
  const auto r = elementwise_type(ctx, operands, x->dtype, x->dtype);
  if (!r || r->sizes != x->sizes) return {};
  return one(contiguous_type(x->dtype, x->device, x->sizes));  // it is written into contiguous zeros
}

Shape shape_convolution_backward(sym::Context& ctx, ArgSpan args) {
  const TensorType *g = float_arg(args, 0), *x = float_arg(args, 1), *w = float_arg(args, 2);
  if (!g || !x || !w || x->sizes.size() != w->sizes.size() || g->sizes.size() != x->sizes.size() || x->dtype != w->dtype || x->dtype != g->dtype)
    return {};
  if (x->sizes.size() == 3) {  // eager's is of images with one row, of an input that lies in rows
    const auto image = [](TensorType t) {
      t.sizes.insert(t.sizes.begin() + 2, Int(1));
      t.strides.insert(t.strides.begin() + 2, t.sizes[3] * t.strides[2]);
      return t;
    };
    for (const TensorType& t : {image(is_contiguous(ctx, *x) ? *x : plain(*x, x->sizes)), image(*w)})  // dims of one have strides of their own
      if (suggest_memory_format(ctx, t) != ir::MemoryFormat::Contiguous) return {};
    return Types{plain(*x, x->sizes), plain(*w, w->sizes), plain(*w, {g->sizes[1]})};
  }
  if (x->sizes.size() != 4) return {};
  return Types{of_format(ctx, *x), of_format(ctx, *w), plain(*w, {g->sizes[1]})};
}

Shape shape_pool_backward(sym::Context& ctx, ArgSpan args) {
  const TensorType *g = float_arg(args, 0), *x = float_arg(args, 1);
  if (!g || !x || g->dtype != x->dtype || (x->sizes.size() != 3 && x->sizes.size() != 4)) return {};
  return one(of_format(ctx, *x));
}

// Made as [batch, length, heads, width] whatever the operands are, and transposed.
Shape shape_flash_cpu_backward(sym::Context&, ArgSpan args) {
  Types r;
  for (size_t i = 1; i <= 3; ++i) {
    const TensorType* x = float_arg(args, i);
    if (!x || x->sizes.size() != 4) return {};
    const Int heads = x->sizes[1], length = x->sizes[2], width = x->sizes[3];
    r.push_back(plain(*x, x->sizes));
    r.back().strides = Dims{length * heads * width, width, heads * width, Int(1)};
  }
  return r;
}

}  // namespace vitrify::ops
