// Shape rules of pooling and resampling.
#include "ops/pool.h"

namespace vitrify::ops {
namespace {

std::optional<std::vector<int64_t>> pair_arg(sym::Context& ctx, ArgSpan args, size_t i, std::vector<int64_t> if_empty) {
  auto* l = i < args.size() ? std::get_if<std::vector<Int>>(&args[i]) : nullptr;
  if (!l) return std::nullopt;
  std::vector<int64_t> v;
  for (auto& x : *l) v.push_back(x.is_const() ? x.value() : ctx.specialize(x));
  if (v.empty()) v = std::move(if_empty);
  if (v.size() == 1) v.push_back(v[0]);
  if (v.size() != 2) return std::nullopt;
  return v;
}

// As ATen's pooling_output_shape: with ceil_mode the last window must start inside the input or its left padding.
std::optional<Int> pooled(sym::Context& ctx, Int in, int64_t kernel, int64_t pad, int64_t stride, int64_t dilation, bool ceil_mode) {
  if (stride < 1 || kernel < 1 || dilation < 1 || pad < 0 || 2 * pad > kernel) return std::nullopt;
  const Int span = in + 2 * pad - dilation * (kernel - 1) - 1;
  Int out = sym::floordiv(ceil_mode ? span + stride - 1 : span, stride) + 1;
  if (ceil_mode && ctx.guard_le(in + pad, (out - 1) * stride)) out = out - 1;
  if (ctx.guard_lt(out, 1)) return std::nullopt;
  return out;
}

Shape pool2d(sym::Context& ctx, ArgSpan args, const std::vector<int64_t>& kernel, size_t stride_at, size_t pad_at,
             const std::vector<int64_t>& dilation, bool ceil_mode, bool indices) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || (x->sizes.size() != 3 && x->sizes.size() != 4) || !is_native(x->dtype) || x->dtype == DType::Bool) return {};
  auto stride = pair_arg(ctx, args, stride_at, kernel), pad = pair_arg(ctx, args, pad_at, {0, 0});
  if (!stride || !pad) return {};
  Dims sizes = x->sizes;
  for (auto& s : sizes)
    if (ctx.guard_eq(s, 0)) return {};
  for (size_t k = 0; k < 2; ++k) {
    auto o = pooled(ctx, sizes[sizes.size() - 2 + k], kernel[k], (*pad)[k], (*stride)[k], dilation[k], ceil_mode);
    if (!o) return {};
    sizes[sizes.size() - 2 + k] = *o;
  }
  TensorType t = contiguous_type(x->dtype, x->device, sizes);
  t.strides = strides_for(suggest_memory_format(ctx, *x), sizes);
  if (!indices) return one(t);
  TensorType i = t;
  i.dtype = DType::I64;
  return Types{t, i};
}

}  // namespace

Shape shape_max_pool2d(sym::Context& ctx, ArgSpan args) {
  auto kernel = pair_arg(ctx, args, 1, {}), dilation = pair_arg(ctx, args, 4, {1, 1});
  if (!kernel || !dilation) return {};
  return pool2d(ctx, args, *kernel, 2, 3, *dilation, bool_arg(args, 5), true);
}
Shape shape_max_pool1d(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  const auto number = [&](size_t i, std::optional<int64_t> if_empty) -> std::optional<int64_t> {
    auto* l = i < args.size() ? std::get_if<std::vector<Int>>(&args[i]) : nullptr;
    if (!l || l->size() > 1 || (l->size() == 1 && !(*l)[0].is_const())) return std::nullopt;
    return l->empty() ? if_empty : (*l)[0].value();
  };
  const auto kernel = number(1, {}), stride = number(2, kernel), pad = number(3, {}), dilation = number(4, {});
  if (!x || (x->sizes.size() != 2 && x->sizes.size() != 3) || !is_float(x->dtype) || !kernel || !stride || !pad || !dilation) return {};
  Dims sizes = x->sizes;
  for (auto& s : sizes)
    if (ctx.guard_eq(s, 0)) return {};
  const auto length = pooled(ctx, sizes.back(), *kernel, *pad, *stride, *dilation, bool_arg(args, 5));
  if (!length) return {};
  sizes.back() = *length;
  return one(contiguous_type(x->dtype, x->device, sizes));
}
Shape shape_adaptive_max_pool2d(sym::Context& ctx, ArgSpan args) {
  auto r = shape_adaptive_avg_pool2d(ctx, args);
  if (!r || ctx.guard_eq(r->front().sizes[0], 0)) return {};
  TensorType indices = r->front();
  indices.dtype = DType::I64;
  r->push_back(indices);
  return r;
}
Shape shape_avg_pool2d(sym::Context& ctx, ArgSpan args) {
  auto kernel = pair_arg(ctx, args, 1, {});
  if (!kernel) return {};
  return pool2d(ctx, args, *kernel, 2, 3, {1, 1}, bool_arg(args, 4), false);
}
Shape shape_adaptive_avg_pool2d(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* o = args.size() > 1 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  if (!x || !o || o->size() != 2 || (x->sizes.size() != 3 && x->sizes.size() != 4) || !is_float(x->dtype)) return {};
  Dims sizes = x->sizes;
  for (size_t d = 1; d < sizes.size(); ++d)
    if (ctx.guard_eq(sizes[d], 0)) return {};
  for (Int size : *o)
    if (ctx.guard_lt(size, 0)) return {};
  for (size_t k = 0; k < 2; ++k) sizes[sizes.size() - 2 + k] = (*o)[k];
  TensorType t = contiguous_type(x->dtype, x->device, sizes);
  t.strides = strides_for(suggest_memory_format(ctx, *x), sizes);
  return one(t);
}
Shape shape_upsample(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* o = args.size() > 1 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  if (!x || !o || o->empty() || x->sizes.size() != o->size() + 2 || !is_native(x->dtype) || x->device.kind != DeviceKind::CPU) return {};
  Dims sizes{x->sizes[0], x->sizes[1]};
  sizes.insert(sizes.end(), o->begin(), o->end());
  for (auto& s : sizes)
    if (ctx.guard_le(s, 0)) return {};
  for (auto& s : x->sizes)
    if (ctx.guard_eq(s, 0)) return {};
  return like_image(ctx, *x, sizes);
}
Shape shape_upsample_backward(sym::Context& ctx, ArgSpan args) {  // gradient, output_size, input_size
  const TensorType* g = tensor_arg(args, 0);
  auto list = [&](size_t i) { return i < args.size() ? std::get_if<std::vector<Int>>(&args[i]) : nullptr; };
  auto *out = list(1), *in = list(2);
  if (!g || !out || !in || out->empty() || g->sizes.size() != out->size() + 2 || in->size() != g->sizes.size() || !is_float(g->dtype) ||
      g->device.kind != DeviceKind::CPU)
    return {};
  for (size_t d = 0; d < in->size(); ++d)
    if (ctx.guard_le((*in)[d], 0) || !ctx.guard_eq(g->sizes[d], d < 2 ? (*in)[d] : (*out)[d - 2])) return {};
  return like_image(ctx, *g, Dims(in->begin(), in->end()));
}
Shape shape_upsample_backward_in_order(sym::Context& ctx, ArgSpan args) {
  Shape r = shape_upsample_backward(ctx, args);
  if (r)
    for (TensorType& t : *r) t.strides = ir::contiguous_strides(t.sizes);
  return r;
}

}  // namespace vitrify::ops
