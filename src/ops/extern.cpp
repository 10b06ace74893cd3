// Ops that stay calls: matmul, convolution, attention, scans, sorting. Only their shape rules are here.
#include "ir/faults.h"
#include "ops/extern_shapes.h"
#include "ops/gradient_shapes.h"
#include "ops/matmul.h"
#include "ops/rules.h"
#include "ops/view.h"

namespace vitrify::ops {
namespace {

bool same_kind(std::initializer_list<const TensorType*> ts) {
  const TensorType* first = *ts.begin();
  for (auto* t : ts)
    if (!t || !is_native(t->dtype) || t->dtype != first->dtype || !(t->device == first->device)) return false;
  return true;
}

// --- products. `first`: position of the left matrix.
template <size_t first>
Shape shape_mm(sym::Context& ctx, ArgSpan args) {
  const TensorType *a = tensor_arg(args, first), *b = tensor_arg(args, first + 1);
  if (!a || !b || !same_kind({a, b}) || a->sizes.size() != 2 || b->sizes.size() != 2 || !ctx.guard_eq(a->sizes[1], b->sizes[0])) return {};
  if (first == 1) {  // addmm: the bias broadcasts to the product
    const TensorType* c = tensor_arg(args, 0);
    Dims out, want{a->sizes[0], b->sizes[1]};
    if (!c || c->dtype != a->dtype || c->sizes.size() > 2 || !broadcast_sizes(ctx, c->sizes, want, out) || !(out == want)) return {};
  }
  return one(contiguous_type(a->dtype, a->device, Dims{a->sizes[0], b->sizes[1]}));
}
template <size_t first>
Shape shape_bmm(sym::Context& ctx, ArgSpan args) {
  const TensorType *a = tensor_arg(args, first), *b = tensor_arg(args, first + 1);
  if (!a || !b || !same_kind({a, b}) || a->sizes.size() != 3 || b->sizes.size() != 3) return {};
  if (!ctx.guard_eq(a->sizes[0], b->sizes[0]) || !ctx.guard_eq(a->sizes[2], b->sizes[1])) return {};
  if (first == 1) {
    const TensorType* c = tensor_arg(args, 0);
    if (!c || c->dtype != a->dtype) return {};
  }
  return one(contiguous_type(a->dtype, a->device, Dims{a->sizes[0], a->sizes[1], b->sizes[2]}));
}
template <size_t first>
Shape shape_mv(sym::Context& ctx, ArgSpan args) {
  const TensorType *a = tensor_arg(args, first), *b = tensor_arg(args, first + 1);
  if (!a || !b || !same_kind({a, b}) || a->sizes.size() != 2 || b->sizes.size() != 1 || !ctx.guard_eq(a->sizes[1], b->sizes[0])) return {};
  return one(contiguous_type(a->dtype, a->device, Dims{a->sizes[0]}));
}
Shape shape_dot(sym::Context& ctx, ArgSpan args) {
  const TensorType *a = tensor_arg(args, 0), *b = tensor_arg(args, 1);
  if (!a || !b || !same_kind({a, b}) || a->sizes.size() != 1 || b->sizes.size() != 1 || !ctx.guard_eq(a->sizes[0], b->sizes[0])) return {};
  return one(contiguous_type(a->dtype, a->device, {}));
}
Shape shape_linear(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *w = tensor_arg(args, 1), *b = tensor_arg(args, 2);
  if (!x || !w || !same_kind({x, w}) || (b && !same_kind({x, b})) || x->sizes.size() < 2 || w->sizes.size() != 2 || !is_contiguous(ctx, *x))
    return {};
  if (b && (b->sizes.size() != 1 || !ctx.guard_eq(b->sizes[0], w->sizes[0]))) return {};
  if (!ctx.guard_eq(x->sizes.back(), w->sizes[1])) return {};
  Dims sizes = x->sizes;
  sizes.back() = w->sizes[0];
  return one(contiguous_type(x->dtype, x->device, sizes));
}

// --- convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
std::optional<std::vector<int64_t>> spatial(sym::Context& ctx, ArgSpan args, size_t i, size_t n) {
  auto* l = std::get_if<std::vector<Int>>(&args[i]);
  if (!l) return std::nullopt;
  std::vector<int64_t> v;
  for (auto& x : *l) v.push_back(x.is_const() ? x.value() : ctx.specialize(x));
  if (v.size() == 1) v.resize(n, v[0]);
  if (v.size() != n) return std::nullopt;
  return v;
}
Shape shape_convolution(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *w = tensor_arg(args, 1), *b = tensor_arg(args, 2);
  if (args.size() < 9 || !x || !w || !same_kind({x, w}) || !is_float(x->dtype) || x->sizes.size() != w->sizes.size() || x->sizes.size() < 3 ||
      x->sizes.size() > 5)
    return {};
  const size_t n = x->sizes.size() - 2;
  auto stride = spatial(ctx, args, 3, n), pad = spatial(ctx, args, 4, n), dilation = spatial(ctx, args, 5, n), extra = spatial(ctx, args, 7, n);
  auto groups = int_arg(ctx, args, 8);
  if (!stride || !pad || !dilation || !extra || !groups || *groups < 1) return {};
  const bool transposed = bool_arg(args, 6);
  for (auto& s : x->sizes)
    if (ctx.guard_eq(s, 0)) return {};
  if (!ctx.guard_eq(transposed ? w->sizes[0] : w->sizes[1] * *groups, x->sizes[1])) return {};
  const Int channels = transposed ? w->sizes[1] * *groups : w->sizes[0];
  if (b && (b->dtype != x->dtype || b->sizes.size() != 1 || !ctx.guard_eq(b->sizes[0], channels))) return {};
  Dims sizes{x->sizes[0], channels};
  for (size_t k = 0; k < n; ++k) {
    const Int in = x->sizes[2 + k], reach = (w->sizes[2 + k] - 1) * (*dilation)[k];
    if ((*stride)[k] < 1 || (*pad)[k] < 0 || (*dilation)[k] < 1) return {};
    const Int out = transposed ? (in - 1) * (*stride)[k] - 2 * (*pad)[k] + reach + (*extra)[k] + 1
                               : sym::floordiv(in + 2 * (*pad)[k] - reach - 1, (*stride)[k]) + 1;
    if (ctx.guard_lt(out, 1)) return {};
    sizes.push_back(out);
  }
  // A row of pixels is an image of one row. ATen makes the input row-major before, which leaves dims of one element as they lie.
  const auto image = [&](TensorType t) {
    if (n != 1) return t;
    t.strides.insert(t.strides.begin() + 2, t.sizes[2] * t.strides[2]);
    t.sizes.insert(t.sizes.begin() + 2, Int(1));
    return t;
  };
  const bool copied = n == 1 && !is_contiguous(ctx, *x);
  auto format = suggest_memory_format(ctx, image(copied ? contiguous_type(x->dtype, x->device, x->sizes) : *x));
  if (format == ir::MemoryFormat::Contiguous) format = suggest_memory_format(ctx, image(*w));
  if (format != ir::MemoryFormat::Contiguous && (x->device.kind != DeviceKind::CPU || x->dtype == DType::F64 || n > 2)) return {};
  TensorType t = image(contiguous_type(x->dtype, x->device, sizes));
  t.strides = strides_for(format, t.sizes);
  if (n == 1) {
    t.sizes.erase(t.sizes.begin() + 2);
    t.strides.erase(t.strides.begin() + 2);
  }
  return one(t);
}

// --- channel_shuffle(input, groups): ATen's Meta kernel does not say that the result is laid out like the input
Shape shape_channel_shuffle(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto groups = int_arg(ctx, args, 1);
  if (!x || !groups || *groups < 1 || x->sizes.size() < 3 || x->device.kind != DeviceKind::CPU || !ctx.guard_eq(sym::mod(x->sizes[1], *groups), 0))
    return {};
  for (auto& s : x->sizes)
    if (ctx.guard_eq(s, 0)) return {};
  TensorType t = contiguous_type(x->dtype, x->device, x->sizes);
  t.strides = strides_for(suggest_memory_format(ctx, *x), x->sizes);
  return one(t);
}

// --- attention on the CPU: the result is laid out like the query
Shape shape_flash_cpu(sym::Context& ctx, ArgSpan args) {
  const TensorType *q = tensor_arg(args, 0), *k = tensor_arg(args, 1), *v = tensor_arg(args, 2);
  if (!q || !k || !v || !same_kind({q, k, v}) || q->sizes.size() != 4 || v->sizes.size() != 4 || !ctx.guard_eq(q->sizes[3], v->sizes[3])) return {};
  const Int B = q->sizes[0], H = q->sizes[1], S = q->sizes[2];
  TensorType out = contiguous_type(q->dtype, q->device, q->sizes);
  out.strides = preserved_strides(ctx, *q);
  TensorType lse = contiguous_type(compute_type(q->dtype), q->device, Dims{B, H, S});
  lse.strides = Dims{S * H, 1, H};
  return Types{out, lse};
}

// --- scans and order
Shape shape_scan(sym::Context& ctx, ArgSpan args) {  // cumsum, cumprod(self, dim, *, dtype)
  const TensorType* x = tensor_arg(args, 0);
  if (!x || args.size() < 3 || !is_native(x->dtype) || !dims_arg(ctx, args, 1, x->sizes.size())) return {};
  auto* d = std::get_if<DType>(&args[2]);
  const DType t = d ? *d : is_float(x->dtype) ? x->dtype : DType::I64;
  if (!is_native(t) || t == DType::Bool) return {};
  return one(contiguous_type(t, x->device, x->sizes));
}
Shape shape_topk(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || args.size() < 3 || x->sizes.empty() || !is_native(x->dtype)) return {};
  auto d = dims_arg(ctx, args, 2, x->sizes.size());
  auto* k = std::get_if<Int>(&args[1]);
  if (!d || d->size() != 1 || !k || !ctx.guard_le(0, *k) || !ctx.guard_le(*k, x->sizes[(*d)[0]])) return {};
  Dims sizes = x->sizes;
  sizes[(*d)[0]] = *k;
  return Types{contiguous_type(x->dtype, x->device, sizes), contiguous_type(DType::I64, x->device, sizes)};
}
template <size_t dim_at>
Shape shape_sort(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || x->sizes.empty() || !is_native(x->dtype) || x->device.kind != DeviceKind::CPU || !dims_arg(ctx, args, dim_at, x->sizes.size())) return {};
  TensorType t = *x;
  t.wrapped_number = false;
  t.strides = preserved_strides(ctx, *x);
  TensorType i = t;
  i.dtype = DType::I64;
  return Types{t, i};
}

const OpRow kRows[] = {
    {"aten::mm", ir::kOneDtype, shape_mm<0>, lower<lower_small_mm>},
    {"aten::addmm", ir::kOneDtype, shape_mm<1>, lower<lower_small_addmm>},
    {"aten::bmm", ir::kOneDtype, shape_bmm<0>, nullptr},
    {"aten::baddbmm", ir::kOneDtype, shape_bmm<1>, nullptr},
    {"aten::mv", ir::kOneDtype, shape_mv<0>, nullptr},
    {"aten::addmv", ir::kOneDtype, shape_mv<1>, nullptr},
    {"aten::dot", ir::kOneDtype, shape_dot, nullptr},
    {"aten::linear", ir::kOneDtype, shape_linear, nullptr},
    {"aten::convolution", ir::kOneDtype, shape_convolution, nullptr},
    {"aten::convolution_backward", 0, shape_convolution_backward, nullptr},
    {"aten::channel_shuffle", 0, shape_channel_shuffle, nullptr},
    {"aten::native_channel_shuffle", 0, shape_channel_shuffle, nullptr},
    {"aten::_scaled_dot_product_flash_attention_for_cpu", 0, shape_flash_cpu, nullptr},
    {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", 0, shape_flash_cpu_backward, nullptr},
    {"aten::cumsum", 0, shape_scan, nullptr},
    {"aten::cumprod", 0, shape_scan, nullptr},
    {"aten::topk", 0, shape_topk, nullptr},
    {"aten::sort", 0, shape_sort<1>, nullptr},
    {"aten::sort.stable", 0, shape_sort<2>, nullptr},
    {"aten::median", ir::kFaults, shape_median, nullptr},
    {"aten::nanmedian", ir::kFaults, shape_median, nullptr},
    {"aten::median.dim", ir::kFaults, shape_median_dim, nullptr},
    {"aten::nanmedian.dim", ir::kFaults, shape_median_dim, nullptr},
    {"aten::logcumsumexp", ir::kFaults, shape_logcumsumexp, nullptr},
    {"aten::cummax", ir::kFaults, shape_cummax, nullptr},
    {"aten::cummin", ir::kFaults, shape_cummax, nullptr},
    {"aten::nansum", ir::kFaults, shape_nansum, nullptr},
    {"aten::trace", ir::kFaults, shape_trace, nullptr},
    {"aten::renorm", ir::kFaults, shape_renorm, nullptr},
    {"aten::_pdist_forward", ir::kFaults, shape_pdist, nullptr},
    {"aten::_pdist_backward", ir::kFaults, shape_pdist_backward, nullptr},
    {"aten::searchsorted.Tensor", ir::kFaults, shape_searchsorted, nullptr},
    {"aten::bucketize.Tensor", ir::kFaults, shape_bucketize, nullptr},
    {"aten::_trilinear", ir::kFaults, shape_trilinear, nullptr},
    {"aten::im2col", ir::kFaults, shape_im2col, nullptr},
    {"aten::col2im", ir::kFaults, shape_col2im, nullptr},
    {"aten::lstm.input", ir::kFaults, shape_lstm, nullptr},
    {"aten::gru.input", ir::kFaults, shape_rnn, nullptr},
    {"aten::rnn_tanh.input", ir::kFaults, shape_rnn, nullptr},
    {"aten::rnn_relu.input", ir::kFaults, shape_rnn, nullptr},
    {"aten::_cdist_forward", ir::kFaults, shape_cdist, nullptr},
    {"aten::_euclidean_dist", ir::kFaults, shape_cdist, nullptr},
    {"aten::_cdist_backward", ir::kFaults, shape_cdist_backward, nullptr},
    {"aten::unfold_backward", ir::kFaults, shape_backward_of_view, nullptr},
    {"aten::reflection_pad1d_backward", ir::kFaults, shape_edge_pad_backward<1>, nullptr},
    {"aten::reflection_pad2d_backward", ir::kFaults, shape_edge_pad_backward<2>, nullptr},
    {"aten::reflection_pad3d_backward", ir::kFaults, shape_edge_pad_backward<3>, nullptr},
    {"aten::replication_pad1d_backward", ir::kFaults, shape_edge_pad_backward<1>, nullptr},
    {"aten::replication_pad2d_backward", ir::kFaults, shape_edge_pad_backward<2>, nullptr},
    {"aten::replication_pad3d_backward", ir::kFaults, shape_edge_pad_backward<3>, nullptr},
    {"aten::complex", ir::kFaults, shape_complex, nullptr},
    {"aten::_fft_r2c", ir::kFaults, shape_fft_r2c, nullptr},
    {"aten::_fft_c2c", ir::kFaults, shape_fft_c2c, nullptr},
    {"aten::_fft_c2r", ir::kFaults, shape_fft_c2r, nullptr},
    {"aten::linalg_lu_solve", ir::kFaults, shape_lu_solve, nullptr},
    {"aten::_linalg_eigh", ir::kFaults, nullptr, nullptr},
    {"aten::_linalg_svd", ir::kFaults, nullptr, nullptr},
    {"aten::linalg_eig", ir::kFaults, nullptr, nullptr},
};

}  // namespace

std::span<const OpRow> extern_rows() { return kRows; }

}  // namespace vitrify::ops
