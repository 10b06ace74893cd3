// Shape rules of calls that have no lowering, as ATen's kernels for the CPU make their results.
#include "ops/extern_shapes.h"

#include <algorithm>
#include <numeric>

#include "ops/reduction.h"
#include "ops/rules.h"

namespace vitrify::ops {
namespace {

const TensorType* native_on_cpu(ArgSpan args, size_t i) {
  const TensorType* t = tensor_arg(args, i);
  return t && is_native(t->dtype) && t->device.kind == DeviceKind::CPU ? t : nullptr;
}
const TensorType* float_on_cpu(ArgSpan args, size_t i) {
  const TensorType* t = native_on_cpu(args, i);
  return t && is_float(t->dtype) ? t : nullptr;
}
std::optional<std::vector<int64_t>> numbers(sym::Context& ctx, ArgSpan args, size_t i, size_t n) {
  auto* l = i < args.size() ? std::get_if<std::vector<Int>>(&args[i]) : nullptr;
  if (!l || l->size() != n) return std::nullopt;
  std::vector<int64_t> r;
  for (Int x : *l) r.push_back(x.is_const() ? x.value() : ctx.specialize(x));
  return r;
}
bool equal(sym::Context& ctx, const Dims& a, const Dims& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [&](Int x, Int y) { return ctx.guard_eq(x, y); });
}
DType complex_of(DType t) { return t == DType::F64 ? DType::C128 : DType::C64; }
DType real_of(DType t) { return t == DType::C128 ? DType::F64 : DType::F32; }
bool has_elements(sym::Context& ctx, const Dims& sizes) {
  return std::ranges::none_of(sizes, [&](Int s) { return ctx.guard_eq(s, 0); });
}

}  // namespace

// --- order

Shape shape_median(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = native_on_cpu(args, 0);
  if (!x || x->dtype == DType::Bool) return {};
  return reduction_shape(ctx, args, ReductionDType::Same, 99, 99, 99, 1);
}
Shape shape_median_dim(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = native_on_cpu(args, 0);
  if (!x || x->dtype == DType::Bool) return {};
  return reduction_shape(ctx, args, ReductionDType::WithIndex, 1, 2, 99, 2);
}
Shape shape_logcumsumexp(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = float_on_cpu(args, 0);
  if (!x || !dims_arg(ctx, args, 1, x->sizes.size())) return {};
  return one(contiguous_type(x->dtype, x->device, x->sizes));
}
Shape shape_cummax(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = native_on_cpu(args, 0);
  if (!x || !dims_arg(ctx, args, 1, x->sizes.size())) return {};
  return Types{contiguous_type(x->dtype, x->device, x->sizes), contiguous_type(DType::I64, x->device, x->sizes)};
}

// --- sums and norms

Shape shape_nansum(sym::Context& ctx, ArgSpan args) {
  if (!float_on_cpu(args, 0)) return {};
  return reduction_shape(ctx, args, ReductionDType::Sum, 1, 2, 3, 1);
}
Shape shape_trace(sym::Context&, ArgSpan args) {
  const TensorType* x = float_on_cpu(args, 0);
  if (!x || x->sizes.size() != 2) return {};
  return one(contiguous_type(x->dtype, x->device, {}));
}
Shape shape_renorm(sym::Context& ctx, ArgSpan args) {  // self, p, dim, maxnorm
  const TensorType* x = float_on_cpu(args, 0);
  if (!x || x->sizes.size() < 2 || !dims_arg(ctx, args, 2, x->sizes.size())) return {};
  return one(contiguous_type(x->dtype, x->device, x->sizes));
}
Shape shape_pdist(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = float_on_cpu(args, 0);
  if (!x || x->sizes.size() != 2 || ctx.guard_le(x->sizes[0], 1)) return {};
  const Int n = x->sizes[0];
  return one(contiguous_type(x->dtype, x->device, Dims{sym::floordiv(n * (n - 1), 2)}));
}
Shape shape_pdist_backward(sym::Context& ctx, ArgSpan args) {  // gradient, self, p, distances
  const TensorType* x = float_on_cpu(args, 1);
  if (!x || x->sizes.size() != 2 || ctx.guard_le(x->sizes[0], 1) || ctx.guard_eq(x->sizes[1], 0)) return {};
  return one(contiguous_type(x->dtype, x->device, x->sizes));
}

// --- search

namespace {
// Where each of `x` belongs in a row of `sorted`.
Shape places(sym::Context& ctx, const TensorType* sorted, const TensorType* x, bool int32) {
  if (!sorted || !x || sorted->dtype != x->dtype || sorted->sizes.empty()) return {};
  if (const size_t n = sorted->sizes.size(); n > 1) {
    if (x->sizes.size() != n) return {};
    for (size_t d = 0; d + 1 < n; ++d)
      if (!ctx.guard_eq(sorted->sizes[d], x->sizes[d])) return {};
  }
  return one(contiguous_type(int32 ? DType::I32 : DType::I64, x->device, x->sizes));
}
}  // namespace

Shape shape_searchsorted(sym::Context& ctx, ArgSpan args) {  // sorted_sequence, self, *, out_int32, right, side, sorter
  const TensorType *sorted = native_on_cpu(args, 0), *sorter = tensor_arg(args, 5);
  if (!sorted || (sorter && (sorter->dtype != DType::I64 || !equal(ctx, sorter->sizes, sorted->sizes)))) return {};
  return places(ctx, sorted, native_on_cpu(args, 1), bool_arg(args, 2));
}
Shape shape_bucketize(sym::Context& ctx, ArgSpan args) {  // self, boundaries, *, out_int32, right
  const TensorType* boundaries = native_on_cpu(args, 1);
  if (!boundaries || boundaries->sizes.size() != 1) return {};
  return places(ctx, boundaries, native_on_cpu(args, 0), bool_arg(args, 2));
}

// --- products of three, each put where its list of dims says, and summed

Shape shape_trilinear(sym::Context& ctx, ArgSpan args) {  // i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim
  std::vector<Dims> sizes;
  const TensorType* first = float_on_cpu(args, 0);
  auto* sum = args.size() > 6 ? std::get_if<std::vector<Int>>(&args[6]) : nullptr;
  if (!first || !sum) return {};
  const auto names = [](const std::vector<Int>& l, size_t d) { return std::ranges::any_of(l, [d](Int i) { return i.is(static_cast<int64_t>(d)); }); };
  for (size_t i = 0; i < 3; ++i) {
    const TensorType* t = float_on_cpu(args, i);
    auto* expand = std::get_if<std::vector<Int>>(&args[3 + i]);
    if (!t || t->dtype != first->dtype || !expand) return {};
    Dims s;
    size_t next = 0;
    for (size_t d = 0; d < t->sizes.size() + expand->size(); ++d) {
      const bool added = names(*expand, d);
      if (!added && next == t->sizes.size()) return {};
      s.push_back(added ? Int(1) : t->sizes[next++]);
    }
    sizes.push_back(std::move(s));
  }
  Dims out;
  for (size_t d = 0; d < sizes[0].size(); ++d) {
    Int size = 1;
    for (size_t i = 0; i < 3; ++i) {
      if (d >= sizes[i].size()) return {};
      if (names(*std::get_if<std::vector<Int>>(&args[3 + i]), d)) continue;
      if (!(size.is(1) || ctx.guard_eq(size, sizes[i][d]))) return {};
      size = sizes[i][d];
    }
    if (!names(*sum, d)) out.push_back(size);
  }
  return one(contiguous_type(first->dtype, first->device, out));
}

// --- windows as columns and back

namespace {
// How many windows there are, one dim after the other.
std::optional<Int> count_windows(sym::Context& ctx, ArgSpan args, std::span<const Int> image, size_t kernel_at) {
  const auto kernel = numbers(ctx, args, kernel_at, 2), dilation = numbers(ctx, args, kernel_at + 1, 2), pad = numbers(ctx, args, kernel_at + 2, 2),
             stride = numbers(ctx, args, kernel_at + 3, 2);
  if (!kernel || !dilation || !pad || !stride) return std::nullopt;
  Int all = 1;
  for (size_t d = 0; d < 2; ++d) {
    const int64_t k = (*kernel)[d], l = (*dilation)[d], p = (*pad)[d], s = (*stride)[d];
    if (k < 1 || l < 1 || p < 0 || s < 1 || ctx.guard_le(image[d], 0)) return std::nullopt;
    const Int n = sym::floordiv(image[d] + 2 * p - (l * (k - 1) + 1), s) + 1;
    if (ctx.guard_lt(n, 1)) return std::nullopt;
    all = all * n;
  }
  return all;
}
}  // namespace

Shape shape_im2col(sym::Context& ctx, ArgSpan args) {  // self, kernel_size, dilation, padding, stride
  const TensorType* x = float_on_cpu(args, 0);
  const auto kernel = numbers(ctx, args, 1, 2);
  if (!x || !kernel || (x->sizes.size() != 3 && x->sizes.size() != 4) || !has_elements(ctx, x->sizes)) return {};
  const size_t c = x->sizes.size() - 3;
  const auto count = count_windows(ctx, args, std::span<const Int>(x->sizes.data() + c + 1, 2), 1);
  if (!count) return {};
  Dims sizes{x->sizes[c] * ((*kernel)[0] * (*kernel)[1]), *count};
  if (c) sizes.insert(sizes.begin(), x->sizes[0]);
  return one(contiguous_type(x->dtype, x->device, sizes));
}
Shape shape_col2im(sym::Context& ctx, ArgSpan args) {  // self, output_size, kernel_size, dilation, padding, stride
  const TensorType* x = float_on_cpu(args, 0);
  const auto kernel = numbers(ctx, args, 2, 2);
  auto* image = args.size() > 1 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  if (!x || !kernel || !image || image->size() != 2 || (x->sizes.size() != 2 && x->sizes.size() != 3) || !has_elements(ctx, x->sizes)) return {};
  const size_t c = x->sizes.size() - 2;
  const auto count = count_windows(ctx, args, *image, 2);
  const int64_t taps = (*kernel)[0] * (*kernel)[1];
  if (!count || taps < 1 || !ctx.guard_eq(*count, x->sizes[c + 1]) || !ctx.guard_eq(sym::mod(x->sizes[c], taps), 0)) return {};
  Dims sizes{sym::floordiv(x->sizes[c], taps), (*image)[0], (*image)[1]};
  if (c) sizes.insert(sizes.begin(), x->sizes[0]);
  return one(contiguous_type(x->dtype, x->device, sizes));
}

// --- recurrent layers

namespace {
// input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first. `states`: for each layer and direction.
Shape recurrent(sym::Context& ctx, ArgSpan args, std::span<const ir::Value> states) {
  const TensorType* x = float_on_cpu(args, 0);
  if (!x || args.size() < 9 || states.empty() || x->sizes.size() != 3 || !has_elements(ctx, x->sizes)) return {};
  const auto* drop = std::get_if<double>(&args[5]);
  const auto layers = int_arg(ctx, args, 4);
  if (!drop || (*drop != 0 && bool_arg(args, 6)) || !layers || *layers < 1) return {};
  const bool batch_first = bool_arg(args, 8);
  const int64_t ways = bool_arg(args, 7) ? 2 : 1;
  const Int length = x->sizes[batch_first ? 1 : 0], batch = x->sizes[batch_first ? 0 : 1];
  Types after;
  for (const ir::Value& v : states) {
    const TensorType& h = v.type();
    if (h.dtype != x->dtype || h.sizes.size() != 3 || !ctx.guard_eq(h.sizes[0], *layers * ways) || !ctx.guard_eq(h.sizes[1], batch)) return {};
    after.push_back(contiguous_type(x->dtype, x->device, Dims{Int(*layers * ways), batch, h.sizes[2]}));
  }
  TensorType out = contiguous_type(x->dtype, x->device, Dims{length, batch, after[0].sizes[2] * ways});
  if (batch_first) std::swap(out.sizes[0], out.sizes[1]), std::swap(out.strides[0], out.strides[1]);
  after.insert(after.begin(), out);
  return after;
}
}  // namespace

Shape shape_lstm(sym::Context& ctx, ArgSpan args) {
  auto* states = args.size() > 1 ? std::get_if<std::vector<ir::Value>>(&args[1]) : nullptr;
  return states && states->size() == 2 ? recurrent(ctx, args, *states) : Shape{};
}
Shape shape_rnn(sym::Context& ctx, ArgSpan args) {
  auto* state = args.size() > 1 ? std::get_if<ir::Value>(&args[1]) : nullptr;
  return state && *state ? recurrent(ctx, args, std::span(state, 1)) : Shape{};
}

// --- distances

Shape shape_cdist(sym::Context& ctx, ArgSpan args) {  // x1, x2, p, compute_mode
  const TensorType *a = float_on_cpu(args, 0), *b = float_on_cpu(args, 1);
  if (!a || !b || a->dtype != b->dtype || a->sizes.size() < 2 || b->sizes.size() < 2 || !ctx.guard_eq(a->sizes.back(), b->sizes.back())) return {};
  Dims out;
  if (!broadcast_sizes(ctx, Dims(a->sizes.begin(), a->sizes.end() - 2), Dims(b->sizes.begin(), b->sizes.end() - 2), out)) return {};
  out.push_back(a->sizes[a->sizes.size() - 2]);
  out.push_back(b->sizes[b->sizes.size() - 2]);
  return one(contiguous_type(a->dtype, a->device, out));
}

Shape shape_cdist_backward(sym::Context& ctx, ArgSpan args) {  // gradient, x1, x2, p, distances
  const ir::Arg pair[] = {args[1], args[2]};
  const auto distances = shape_cdist(ctx, pair);
  const TensorType* x = float_on_cpu(args, 1);
  if (!distances || !has_elements(ctx, distances->front().sizes) || !has_elements(ctx, x->sizes)) return {};
  Dims sizes = distances->front().sizes;
  sizes.back() = x->sizes.back();
  return one(contiguous_type(x->dtype, x->device, sizes));
}

// --- systems of equations

Shape shape_lu_solve(sym::Context& ctx, ArgSpan args) {  // LU, pivots, B, left, adjoint
  const TensorType *lu = float_on_cpu(args, 0), *pivots = tensor_arg(args, 1), *b = float_on_cpu(args, 2);
  if (!lu || !pivots || !b || args.size() < 5 || lu->dtype != b->dtype || pivots->dtype != DType::I32 || lu->sizes.size() < 2 || b->sizes.size() < 2)
    return {};
  const bool left = bool_arg(args, 3);
  const size_t rank = b->sizes.size();
  const Int n = lu->sizes.back();
  Dims sizes;
  if (!equal(ctx, pivots->sizes, Dims(lu->sizes.begin(), lu->sizes.end() - 1)) || !ctx.guard_eq(n, lu->sizes[lu->sizes.size() - 2]) ||
      !ctx.guard_eq(n, b->sizes[left ? rank - 2 : rank - 1]) ||
      !broadcast_sizes(ctx, Dims(lu->sizes.begin(), lu->sizes.end() - 2), Dims(b->sizes.begin(), b->sizes.end() - 2), sizes))
    return {};
  sizes.insert(sizes.end(), b->sizes.end() - 2, b->sizes.end());
  if (!has_elements(ctx, sizes)) return {};
  TensorType t = contiguous_type(b->dtype, b->device, sizes);
  if (left) {  // columns are dense
    t.strides.end()[-2] = 1;
    t.strides.back() = sizes.end()[-2];
  }
  return one(t);
}

// --- gradients of what has been padded, of memory in rows

template <size_t n>
Shape shape_edge_pad_backward(sym::Context& ctx, ArgSpan args) {  // gradient, self, padding
  const TensorType *g = float_on_cpu(args, 0), *x = float_on_cpu(args, 1);
  const auto pad = numbers(ctx, args, 2, 2 * n);
  if (!g || !x || !pad || g->dtype != x->dtype || x->sizes.size() < n + 1 || x->sizes.size() > n + 2 || g->sizes.size() != x->sizes.size()) return {};
  for (const TensorType* t : {g, x})
    if (!has_elements(ctx, t->sizes) || suggest_memory_format(ctx, *t) != ir::MemoryFormat::Contiguous) return {};
  for (size_t k = 0, rank = x->sizes.size(); k < rank; ++k) {
    const size_t d = rank - 1 - k;
    if (!ctx.guard_eq(g->sizes[d], k < n ? x->sizes[d] + ((*pad)[2 * k] + (*pad)[2 * k + 1]) : x->sizes[d])) return {};
  }
  return one(contiguous_type(x->dtype, x->device, x->sizes));
}
template Shape shape_edge_pad_backward<1>(sym::Context&, ArgSpan);
template Shape shape_edge_pad_backward<2>(sym::Context&, ArgSpan);
template Shape shape_edge_pad_backward<3>(sym::Context&, ArgSpan);

// --- complex numbers

Shape shape_complex_arithmetic(sym::Context& ctx, ArgSpan args, int operands) {
  std::vector<const TensorType*> types;
  std::vector<const ir::Arg*> typed;
  const TensorType number;
  for (size_t i = 0; i < static_cast<size_t>(operands); ++i) {
    if (i >= args.size()) return {};
    typed.push_back(&args[i]);
    if (const TensorType* t = tensor_arg(args, i)) {
      if (t->device.kind != DeviceKind::CPU) return {};
      types.push_back(t);
    } else if (is_number(args[i]) || std::holds_alternative<ir::Complex>(args[i])) {
      types.push_back(&number);
    } else {
      return {};
    }
  }
  const DType t = result_type(typed);
  if ((t != DType::C64 && t != DType::C128) || std::ranges::none_of(types, [&](const TensorType* o) { return o != &number; })) return {};
  return one(elementwise_type(ctx, types, t, t));
}
Shape shape_magnitude(sym::Context& ctx, const TensorType& x) {  // as empty_like() lies
  if (x.device.kind != DeviceKind::CPU) return {};
  TensorType t = x;
  t.dtype = real_of(x.dtype);
  t.wrapped_number = false;
  t.strides = preserved_strides(ctx, x);
  return one(t);
}
Shape shape_complex(sym::Context& ctx, ArgSpan args) {  // real, imag
  const TensorType *real = float_on_cpu(args, 0), *imag = float_on_cpu(args, 1);
  if (!real || !imag || real->dtype != imag->dtype || (real->dtype != DType::F32 && real->dtype != DType::F64)) return {};
  const TensorType* operands[] = {real, imag};
  return one(elementwise_type(ctx, operands, complex_of(real->dtype)));
}

// --- Fourier transforms, by MKL

namespace {

// Dims that are not transformed come first, as they lie, and then the others: so is the result laid out.
Dims transformed_strides(sym::Context& ctx, const TensorType& x, const Dims& out, const std::vector<int64_t>& dims) {
  std::vector<int64_t> order(x.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  // As ATen does: of equal strides, those of dims of one element and of expanded ones among them, the order is what this leaves.
  const auto others = std::partition(order.begin(), order.end(), [&](int64_t d) { return std::ranges::find(dims, d) == dims.end(); });
  order.erase(others, order.end());
  for (size_t i = 1; i < order.size(); ++i)
    for (size_t j = i; j > 0 && ctx.guard_lt(x.strides[order[j - 1]], x.strides[order[j]]); --j) std::swap(order[j], order[j - 1]);
  order.insert(order.end(), dims.begin(), dims.end());
  Dims strides(out.size(), Int(1));
  Int next = 1;
  for (size_t k = order.size(); k-- > 0; next = next * out[order[k]]) strides[order[k]] = next;
  return strides;
}
// Of equal strides the one that was first stays so.
void sort_dims(sym::Context& ctx, const TensorType& x, std::vector<int64_t>& dims, size_t count) {
  for (size_t i = 1; i < count; ++i)
    for (size_t j = i; j > 0 && ctx.guard_lt(x.strides[dims[j - 1]], x.strides[dims[j]]); --j) std::swap(dims[j], dims[j - 1]);
}
std::optional<std::vector<int64_t>> transformed(sym::Context& ctx, ArgSpan args, const TensorType* x) {
  if (!x || x->device.kind != DeviceKind::CPU || x->sizes.size() > 16 || !has_elements(ctx, x->sizes)) return std::nullopt;
  auto dims = dims_arg(ctx, args, 1, x->sizes.size(), false);
  return dims && !dims->empty() ? dims : std::nullopt;
}
}  // namespace

Shape shape_fft_r2c(sym::Context& ctx, ArgSpan args) {  // self, dim, normalization, onesided
  const TensorType* x = tensor_arg(args, 0);
  auto dims = transformed(ctx, args, x);
  if (!dims || (x->dtype != DType::F32 && x->dtype != DType::F64)) return {};
  TensorType t = contiguous_type(complex_of(x->dtype), x->device, x->sizes);
  if (bool_arg(args, 3)) t.sizes[dims->back()] = sym::floordiv(x->sizes[dims->back()], 2) + 1;
  sort_dims(ctx, *x, *dims, dims->size() - 1);
  t.strides = transformed_strides(ctx, *x, t.sizes, *dims);
  return one(t);
}
Shape shape_fft_c2c(sym::Context& ctx, ArgSpan args) {  // self, dim, normalization, forward
  const TensorType* x = tensor_arg(args, 0);
  auto dims = transformed(ctx, args, x);
  if (!dims || (x->dtype != DType::C64 && x->dtype != DType::C128)) return {};
  TensorType t = contiguous_type(x->dtype, x->device, x->sizes);
  sort_dims(ctx, *x, *dims, dims->size());
  t.strides = transformed_strides(ctx, *x, t.sizes, *dims);
  return one(t);
}
Shape shape_fft_c2r(sym::Context& ctx, ArgSpan args) {  // self, dim, normalization, last_dim_size
  const TensorType* x = tensor_arg(args, 0);
  auto dims = transformed(ctx, args, x);
  auto* last = args.size() > 3 ? std::get_if<Int>(&args[3]) : nullptr;
  if (!dims || !last || ctx.guard_lt(*last, 1) || (x->dtype != DType::C64 && x->dtype != DType::C128)) return {};
  TensorType between = *x;  // the other dims are transformed before the last one
  if (dims->size() > 1) {
    std::vector<int64_t> others(dims->begin(), dims->end() - 1);
    sort_dims(ctx, *x, others, others.size());
    between.strides = transformed_strides(ctx, *x, x->sizes, others);
    dims->erase(dims->begin(), dims->end() - 1);
  }
  TensorType t = contiguous_type(real_of(x->dtype), x->device, x->sizes);
  t.sizes[dims->back()] = *last;
  t.strides = transformed_strides(ctx, between, t.sizes, *dims);
  return one(t);
}

}  // namespace vitrify::ops
