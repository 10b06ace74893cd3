// Shape rules of reductions, normalisations and softmax.
#include "ops/norm.h"

namespace vitrify::ops {

Shape reduction_shape(sym::Context& ctx, ArgSpan args, ReductionDType rule, size_t dims_at, size_t keep_at, size_t dtype_at, int results) {
  using R = ReductionDType;
  const TensorType* x = tensor_arg(args, 0);
  if (!x || !is_native(x->dtype) || x->sizes.size() > 64) return {};
  if (rule == R::BoolDims && dims_at < args.size())
    if (auto* l = std::get_if<std::vector<Int>>(&args[dims_at]); l && l->empty()) return {};
  auto dims = dims_arg(ctx, args, dims_at, x->sizes.size());
  if (!dims) return {};
  const bool keep = bool_arg(args, keep_at);
  std::vector<bool> reduced(x->sizes.size());
  for (int64_t d : *dims)
    if (d < static_cast<int64_t>(reduced.size())) reduced[d] = true;
  if (rule == R::Same || rule == R::Index || rule == R::WithIndex) {
    for (size_t d = 0; d < reduced.size(); ++d)
      if (reduced[d] && ctx.guard_eq(x->sizes[d], 0)) return {};
  }
  Dims sizes;
  for (size_t d = 0; d < reduced.size(); ++d) {
    if (!reduced[d])
      sizes.push_back(x->sizes[d]);
    else if (keep)
      sizes.push_back(Int(1));
  }
  DType t = x->dtype;
  auto* given = dtype_at < args.size() ? std::get_if<DType>(&args[dtype_at]) : nullptr;
  switch (rule) {
    case R::Sum:
      t = given ? *given : is_float(t) ? t : DType::I64;
      if (!is_native(t) || t == DType::Bool) return {};
      break;
    case R::Mean:
      if (given) t = *given;
      if (!is_float(t)) return {};
      break;
    case R::Float:
      if (!is_float(t) || (given && *given != t && (!is_float(*given) || size_of(*given) <= size_of(t)))) return {};  // eager raises
      if (given) t = *given;
      break;
    case R::Bool:
    case R::BoolDims:
      if (t != DType::U8) t = DType::Bool;
      break;
    case R::Index:
      if (t == DType::Bool) return {};
      t = DType::I64;
      break;
    case R::Same:
    case R::WithIndex:
      break;
  }
  Types r;
  r.push_back(contiguous_type(t, x->device, sizes));
  if (results == 2) r.push_back(contiguous_type(rule == R::WithIndex ? DType::I64 : t, x->device, sizes));
  return r;
}

namespace {
// Rank of the normalised part, if it is the end of x's sizes.
std::optional<size_t> normalized_rank(sym::Context& ctx, const TensorType& x, const ir::Arg& shape) {
  auto* s = std::get_if<std::vector<Int>>(&shape);
  if (!s || s->empty() || s->size() > x.sizes.size()) return std::nullopt;
  for (size_t k = 0; k < s->size(); ++k)
    if (!ctx.guard_eq((*s)[k], x.sizes[x.sizes.size() - s->size() + k])) return std::nullopt;
  return s->size();
}
Dims statistics_sizes(const TensorType& x, size_t k) {
  Dims s = x.sizes;
  for (size_t d = s.size() - k; d < s.size(); ++d) s[d] = 1;
  return s;
}
DType accumulate_type(DType t) { return compute_type(t); }
}  // namespace

Shape shape_layer_norm(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || args.size() < 5 || !is_float(x->dtype)) return {};
  auto k = normalized_rank(ctx, *x, args[1]);
  if (!k) return {};
  const TensorType *w = tensor_arg(args, 2), *b = tensor_arg(args, 3);
  for (const TensorType* p : {w, b}) {
    if (p && p->sizes.size() != *k) return {};
    for (size_t d = 0; p && d < *k; ++d)
      if (!ctx.guard_eq(p->sizes[d], x->sizes[x->sizes.size() - *k + d])) return {};
  }
  const DType param = w ? w->dtype : b ? b->dtype : x->dtype;
  const DType stat = x->device.kind == DeviceKind::CPU ? param : accumulate_type(x->dtype);
  auto s = contiguous_type(stat, x->device, statistics_sizes(*x, *k));
  return Types{contiguous_type(x->dtype, x->device, x->sizes), s, s};
}
Shape shape_rms_norm(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || args.size() < 4 || !is_float(x->dtype) || x->device.kind == DeviceKind::Other) return {};
  auto k = normalized_rank(ctx, *x, args[1]);
  const TensorType* w = tensor_arg(args, 2);
  if (!k || (w && w->dtype != x->dtype) || !is_contiguous(ctx, *x)) return {};
  return Types{contiguous_type(x->dtype, x->device, x->sizes), contiguous_type(accumulate_type(x->dtype), x->device, statistics_sizes(*x, *k))};
}

std::optional<ir::MemoryFormat> batch_norm_order(sym::Context& ctx, const TensorType& t) {
  for (auto f : {ir::MemoryFormat::Contiguous, ir::MemoryFormat::ChannelsLast, ir::MemoryFormat::ChannelsLast3d})
    if (is_contiguous(ctx, t, f)) return f;
  return std::nullopt;
}

namespace {
std::optional<TensorType> batch_norm_out(sym::Context& ctx, const TensorType* x) {
  if (!x || !is_float(x->dtype) || x->sizes.size() < 2 || x->device.kind == DeviceKind::Other) return std::nullopt;
  TensorType t = contiguous_type(x->dtype, x->device, x->sizes);
  const auto order = batch_norm_order(ctx, *x);
  const auto format = order ? *order : suggest_memory_format(ctx, *x);
  t.strides = strides_for(format, x->sizes);
  return t;
}
// Half inputs with f32 parameters keep f32 statistics.
DType batch_norm_stat(ArgSpan args, const TensorType& x, size_t first, size_t last) {
  if (x.device.kind != DeviceKind::CPU) return accumulate_type(x.dtype);
  for (size_t i = first; i <= last; ++i)
    if (auto* p = tensor_arg(args, i)) return p->dtype;
  return x.dtype;
}
Shape batch_norm_types(sym::Context& ctx, ArgSpan args, bool training, size_t last_param) {
  const TensorType* x = tensor_arg(args, 0);
  auto out = batch_norm_out(ctx, x);
  if (!out) return {};
  const DType stat = batch_norm_stat(args, *x, 1, last_param);
  auto s = contiguous_type(stat, x->device, training ? Dims{x->sizes[1]} : Dims{Int(0)});
  if (!training && x->device.kind != DeviceKind::CPU) return {};
  return Types{*out, s, s};
}
}  // namespace

Shape shape_batch_norm_no_training(sym::Context& ctx, ArgSpan args) { return batch_norm_types(ctx, args, false, 4); }
Shape shape_native_batch_norm(sym::Context& ctx, ArgSpan args) {
  return args.size() < 8 ? Shape{} : batch_norm_types(ctx, args, bool_arg(args, 5), 4);
}
Shape shape_batch_norm_no_stats(sym::Context& ctx, ArgSpan args) {
  return args.size() < 6 ? Shape{} : batch_norm_types(ctx, args, bool_arg(args, 3), 2);
}
Shape shape_batch_norm_functional(sym::Context& ctx, ArgSpan args) {
  const TensorType *m = tensor_arg(args, 3), *v = tensor_arg(args, 4);
  if (args.size() < 8 || !m || !v) return {};
  auto r = batch_norm_types(ctx, args, bool_arg(args, 5), 4);
  if (!r) return {};
  for (auto* s : {m, v}) r->push_back(contiguous_type(s->dtype, s->device, s->sizes));
  return r;
}

Shape shape_group_norm(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *w = tensor_arg(args, 1), *b = tensor_arg(args, 2);
  auto groups = int_arg(ctx, args, 6);
  if (!x || !groups || *groups < 1 || x->sizes.size() < 2 || !is_float(x->dtype)) return {};
  const bool cpu = x->device.kind == DeviceKind::CPU;
  TensorType t = contiguous_type(x->dtype, x->device, x->sizes);
  if (cpu) t.strides = strides_for(suggest_memory_format(ctx, *x), x->sizes);
  const DType stat = cpu ? (w ? w->dtype : b ? b->dtype : x->dtype) : x->dtype;
  auto s = contiguous_type(stat, x->device, Dims{x->sizes[0], Int(*groups)});
  return Types{t, s, s};
}

Shape shape_softmax(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || args.size() < 3 || !is_float(x->dtype) || !dims_arg(ctx, args, 1, x->sizes.size())) return {};
  const bool widen = bool_arg(args, 2);
  if (widen && (x->dtype != DType::F16 || x->device.kind == DeviceKind::CPU)) return {};
  return one(contiguous_type(widen ? DType::F32 : x->dtype, x->device, x->sizes));
}

}  // namespace vitrify::ops
