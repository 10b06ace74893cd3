// Shape rules of views. A result shares its operand's memory, so its strides follow from the operand's.
#include "ops/rules.h"
#include "ops/view.h"

namespace vitrify::ops {
namespace {

std::optional<int64_t> dim_at(sym::Context& ctx, ArgSpan args, size_t i, size_t rank) {
  auto d = dims_arg(ctx, args, i, rank);
  if (!d || d->size() != 1 || rank == 0) return std::nullopt;
  return (*d)[0];
}
TensorType plain(const TensorType& x) {
  TensorType t = x;
  t.wrapped_number = false;
  return t;
}

// Strides of the same memory with other sizes, as at::detail::computeStride.
std::optional<Dims> view_strides(sym::Context& ctx, const TensorType& x, const Dims& sizes) {
  Dims out(sizes.size(), Int(1));
  if (x.sizes.empty()) return out;
  bool empty = false;
  for (auto& s : x.sizes) empty = empty || ctx.guard_eq(s, 0);
  if (empty) return sizes == x.sizes ? x.strides : ir::contiguous_strides(sizes);
  int64_t v = static_cast<int64_t>(sizes.size()) - 1;
  Int base = x.strides.back(), have = 1, want = 1;
  for (int64_t d = static_cast<int64_t>(x.sizes.size()) - 1; d >= 0; --d) {
    have = have * x.sizes[d];
    if (d > 0 && (ctx.guard_eq(x.sizes[d - 1], 1) || ctx.guard_eq(x.strides[d - 1], have * base))) continue;
    while (v >= 0 && (ctx.guard_lt(want, have) || ctx.guard_eq(sizes[v], 1))) {
      out[v] = want * base;
      want = want * sizes[v];
      --v;
    }
    if (!ctx.guard_eq(want, have)) return std::nullopt;
    if (d > 0) base = x.strides[d - 1], have = 1, want = 1;
  }
  if (v != -1) return std::nullopt;
  return out;
}

}  // namespace

Shape shape_view(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* size = args.size() > 1 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  if (!x || !size) return {};
  Dims sizes(size->begin(), size->end());
  Int known = 1, all = 1;
  int64_t free = -1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d].is(-1)) {
      if (free >= 0) return {};
      free = static_cast<int64_t>(d);
    } else {
      known = known * sizes[d];
    }
  }
  for (auto& s : x->sizes) all = all * s;
  if (free >= 0) {
    if (ctx.guard_eq(known, 0)) return {};
    sizes[free] = sym::floordiv(all, known);
    known = known * sizes[free];
  }
  if (!ctx.guard_eq(all, known)) return {};
  auto strides = view_strides(ctx, *x, sizes);
  if (!strides) return {};
  TensorType t = plain(*x);
  t.sizes = sizes, t.strides = *strides;
  return one(t);
}
std::optional<Dims> strides_of_view(sym::Context& ctx, const TensorType& x, const Dims& sizes) { return view_strides(ctx, x, sizes); }
Shape shape_unsafe_view(sym::Context& ctx, ArgSpan args) { return shape_view(ctx, args); }

Shape shape_squeeze_all(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x) return {};
  TensorType t = plain(*x);
  t.sizes.clear(), t.strides.clear();
  for (size_t d = 0; d < x->sizes.size(); ++d)
    if (!ctx.guard_eq(x->sizes[d], 1)) t.sizes.push_back(x->sizes[d]), t.strides.push_back(x->strides[d]);
  return one(t);
}
Shape shape_squeeze(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto dims = dims_arg(ctx, args, 1, x ? x->sizes.size() : 0, false);
  if (!x || !dims) return {};
  TensorType t = plain(*x);
  t.sizes.clear(), t.strides.clear();
  for (size_t d = 0; d < x->sizes.size(); ++d) {
    const bool named = std::find(dims->begin(), dims->end(), static_cast<int64_t>(d)) != dims->end();
    if (!named || !ctx.guard_eq(x->sizes[d], 1)) t.sizes.push_back(x->sizes[d]), t.strides.push_back(x->strides[d]);
  }
  return one(t);
}
Shape shape_unsqueeze(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x) return {};
  auto d = dim_at(ctx, args, 1, x->sizes.size() + 1);
  if (!d) return {};
  TensorType t = plain(*x);
  const Int stride = *d < static_cast<int64_t>(x->sizes.size()) ? x->sizes[*d] * x->strides[*d] : Int(1);
  t.sizes.insert(t.sizes.begin() + *d, Int(1));
  t.strides.insert(t.strides.begin() + *d, stride);
  return one(t);
}
Shape shape_as_strided(sym::Context&, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* size = args.size() > 2 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  auto* stride = args.size() > 2 ? std::get_if<std::vector<Int>>(&args[2]) : nullptr;
  if (!x || !size || !stride || size->size() != stride->size()) return {};
  TensorType t = plain(*x);
  t.sizes.assign(size->begin(), size->end());
  t.strides.assign(stride->begin(), stride->end());
  return one(t);
}
Shape shape_view_as_real(sym::Context&, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || (x->dtype != DType::C64 && x->dtype != DType::C128)) return {};
  TensorType t = plain(*x);
  t.dtype = x->dtype == DType::C64 ? DType::F32 : DType::F64;
  for (Int& s : t.strides) s = s * 2;
  t.sizes.push_back(Int(2)), t.strides.push_back(Int(1));
  return one(t);
}
Shape shape_view_as_complex(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || x->sizes.empty() || (x->dtype != DType::F32 && x->dtype != DType::F64) || !ctx.guard_eq(x->sizes.back(), 2) ||
      !ctx.guard_eq(x->strides.back(), 1))
    return {};
  TensorType t = plain(*x);
  t.dtype = x->dtype == DType::F32 ? DType::C64 : DType::C128;
  t.sizes.pop_back(), t.strides.pop_back();
  for (Int& s : t.strides) {
    if (!ctx.guard_eq(sym::mod(s, 2), 0)) return {};
    s = sym::floordiv(s, 2);
  }
  return one(t);
}
Shape shape_expand(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* size = args.size() > 1 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  if (!x || !size || size->size() < x->sizes.size()) return {};
  const size_t n = size->size(), lead = n - x->sizes.size();
  TensorType t = plain(*x);
  t.sizes.assign(n, Int(1)), t.strides.assign(n, Int(0));
  for (size_t k = n; k-- > 0;) {
    Int want = (*size)[k];
    if (k < lead) {
      if (want.is(-1)) return {};
      t.sizes[k] = want;
      t.strides[k] = k + 1 < n ? t.sizes[k + 1] * t.strides[k + 1] : Int(1);
    } else {
      t.sizes[k] = x->sizes[k - lead], t.strides[k] = x->strides[k - lead];
    }
    if (want.is(-1)) want = t.sizes[k];
    if (!ctx.guard_eq(t.sizes[k], want) || k < lead) {
      if (k >= lead && !ctx.guard_eq(t.sizes[k], 1)) return {};
      t.sizes[k] = want;
      if (k >= lead || !want.is(1)) t.strides[k] = 0;
    }
  }
  if (x->sizes.empty()) {
    t.strides.assign(n, Int(0));
    return one(t);
  }
  // Leading dims: strides as eager fills them, from the right.
  for (size_t k = lead; k-- > 0;) {
    const Int next = k + 1 < n ? t.sizes[k + 1] * t.strides[k + 1] : Int(1);
    t.strides[k] = t.sizes[k].is(1) ? next : Int(0);
  }
  return one(t);
}
Shape shape_permute(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto dims = dims_arg(ctx, args, 1, x ? x->sizes.size() : 0, false);
  if (!x || !dims || dims->size() != x->sizes.size()) return {};
  TensorType t = plain(*x);
  for (size_t d = 0; d < dims->size(); ++d) t.sizes[d] = x->sizes[(*dims)[d]], t.strides[d] = x->strides[(*dims)[d]];
  return one(t);
}
Shape shape_transpose(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto p = dims_arg(ctx, args, 1, x ? x->sizes.size() : 0), q = dims_arg(ctx, args, 2, x ? x->sizes.size() : 0);
  if (!x || !p || !q || p->size() != 1 || q->size() != 1) return {};
  TensorType t = plain(*x);
  if (!x->sizes.empty()) std::swap(t.sizes[(*p)[0]], t.sizes[(*q)[0]]), std::swap(t.strides[(*p)[0]], t.strides[(*q)[0]]);
  return one(t);
}
Shape shape_t(sym::Context&, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || x->sizes.size() > 2) return {};
  TensorType t = plain(*x);
  if (t.sizes.size() == 2) std::swap(t.sizes[0], t.sizes[1]), std::swap(t.strides[0], t.strides[1]);
  return one(t);
}
Shape shape_slice(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || args.size() < 5) return {};
  auto d = dim_at(ctx, args, 1, x->sizes.size());
  auto* step = std::get_if<Int>(&args[4]);
  if (!d || !step || !ctx.guard_lt(0, *step)) return {};
  auto *s = std::get_if<Int>(&args[2]), *e = std::get_if<Int>(&args[3]);
  Int start = s ? *s : Int(0);
  TensorType t = plain(*x);
  t.sizes[*d] = size_of_slice(ctx, x->sizes[*d], start, e ? *e : x->sizes[*d], *step);
  t.strides[*d] = x->strides[*d] * *step;
  return one(t);
}
Shape shape_select(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || args.size() < 3) return {};
  auto d = dim_at(ctx, args, 1, x->sizes.size());
  auto* i = std::get_if<Int>(&args[2]);
  if (!d || !i) return {};
  if (!ctx.guard_lt(*i, x->sizes[*d]) || !ctx.guard_le(-x->sizes[*d], *i)) return {};
  TensorType t = plain(*x);
  t.sizes.erase(t.sizes.begin() + *d);
  t.strides.erase(t.strides.begin() + *d);
  return one(t);
}
Shape shape_unfold(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x) return {};
  auto d = dim_at(ctx, args, 1, x->sizes.size());
  auto size = int_arg(ctx, args, 2), step = int_arg(ctx, args, 3);
  if (!d || !size || !step || *step < 1 || *size < 0 || ctx.guard_lt(x->sizes[*d], *size)) return {};
  TensorType t = plain(*x);
  t.sizes[*d] = sym::floordiv(x->sizes[*d] - *size, *step) + 1;
  t.strides[*d] = x->strides[*d] * *step;
  t.sizes.push_back(*size);
  t.strides.push_back(x->strides[*d]);
  return one(t);
}
Shape shape_diagonal(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || x->sizes.size() < 2) return {};
  auto offset = int_arg(ctx, args, 1);
  auto p = dim_at(ctx, args, 2, x->sizes.size()), q = dim_at(ctx, args, 3, x->sizes.size());
  if (!offset || !p || !q || *p == *q) return {};
  const Int rows = x->sizes[*p] + (*offset < 0 ? *offset : 0), cols = x->sizes[*q] - (*offset > 0 ? *offset : 0);
  Int length = ctx.guard_le(rows, cols) ? rows : cols;
  if (ctx.guard_lt(length, 0)) length = 0;
  TensorType t = plain(*x);
  const Int stride = x->strides[*p] + x->strides[*q];
  for (int64_t d : {std::max(*p, *q), std::min(*p, *q)}) t.sizes.erase(t.sizes.begin() + d), t.strides.erase(t.strides.begin() + d);
  t.sizes.push_back(length);
  t.strides.push_back(stride);
  return one(t);
}
Shape shape_flip(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || !dims_arg(ctx, args, 1, x->sizes.size(), false)) return {};
  TensorType t = plain(*x);
  t.strides = preserved_strides(ctx, *x);
  return one(t);
}

namespace {
Shape parts(sym::Context&, const TensorType& x, int64_t d, const std::vector<Int>& lengths) {
  Types r;
  for (Int n : lengths) {
    TensorType t = plain(x);
    t.sizes[d] = n;
    r.push_back(t);
  }
  return r;
}
}  // namespace
Shape shape_split(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || x->sizes.empty()) return {};
  auto d = dim_at(ctx, args, 2, x->sizes.size());
  auto* size = std::get_if<Int>(&args[1]);
  if (!d || !size || !ctx.guard_lt(0, *size)) return {};
  const Int all = x->sizes[*d];
  const int64_t n = std::max<int64_t>(1, [&] {
    Int c = sym::ceildiv(all, *size);
    return c.is_const() ? c.value() : ctx.specialize(c);
  }());
  std::vector<Int> lengths(n, *size);
  lengths.back() = all - *size * (n - 1);
  return parts(ctx, *x, *d, lengths);
}
Shape shape_split_sizes(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || x->sizes.empty()) return {};
  auto d = dim_at(ctx, args, 2, x->sizes.size());
  auto* sizes = std::get_if<std::vector<Int>>(&args[1]);
  if (!d || !sizes) return {};
  Int sum = 0;
  for (Int n : *sizes) {
    if (ctx.guard_lt(n, 0)) return {};
    sum = sum + n;
  }
  if (!ctx.guard_eq(sum, x->sizes[*d])) return {};
  return parts(ctx, *x, *d, *sizes);
}
Shape shape_unbind(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || x->sizes.empty()) return {};
  auto d = dim_at(ctx, args, 1, x->sizes.size());
  if (!d) return {};
  const int64_t n = x->sizes[*d].is_const() ? x->sizes[*d].value() : ctx.specialize(x->sizes[*d]);
  TensorType t = plain(*x);
  t.sizes.erase(t.sizes.begin() + *d);
  t.strides.erase(t.strides.begin() + *d);
  return Types(static_cast<size_t>(n), t);
}
// What is written, the second argument, must be as large as the view that the others say.
static Shape scattered(ShapeFn view, sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *s = tensor_arg(args, 1);
  if (!x || !s || s->dtype != x->dtype) return {};
  std::vector<ir::Arg> of_view(args.begin(), args.end());
  of_view.erase(of_view.begin() + 1);
  const Shape part = view(ctx, of_view);
  if (!part || (*part)[0].sizes.size() != s->sizes.size()) return {};
  for (size_t d = 0; d < s->sizes.size(); ++d)
    if (!ctx.guard_eq((*part)[0].sizes[d], s->sizes[d])) return {};
  // A clone that keeps gaps between elements too.
  TensorType t = plain(*x);
  for (size_t d = 0; d < t.sizes.size(); ++d)
    if (!ctx.guard_lt(0, t.strides[d]) && ctx.guard_lt(1, t.sizes[d])) return t.strides = preserved_strides(ctx, *x), one(t);
  return one(t);
}
Shape shape_slice_scatter(sym::Context& ctx, ArgSpan args) { return scattered(shape_slice, ctx, args); }
Shape shape_select_scatter(sym::Context& ctx, ArgSpan args) { return scattered(shape_select, ctx, args); }
Shape shape_diagonal_scatter(sym::Context& ctx, ArgSpan args) { return scattered(shape_diagonal, ctx, args); }
Shape shape_backward_of_view(sym::Context&, ArgSpan args) {
  const TensorType* g = tensor_arg(args, 0);
  auto* size = args.size() > 1 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  if (!g || !size) return {};
  return one(contiguous_type(g->dtype, g->device, Dims(size->begin(), size->end())));
}
namespace {
Shape pixel_shuffle(sym::Context& ctx, ArgSpan args, bool up) {
  const TensorType* x = tensor_arg(args, 0);
  auto f = int_arg(ctx, args, 1);
  if (!x || !f || *f < 1 || *f > 4096 || (x->sizes.size() != 3 && x->sizes.size() != 4) || !is_native(x->dtype) || x->device.kind != DeviceKind::CPU)
    return {};
  Dims sizes = x->sizes;
  const size_t c = sizes.size() - 3;
  for (auto& s : sizes)
    if (ctx.guard_eq(s, 0)) return {};
  if (up && !ctx.guard_eq(sym::mod(sizes[c], *f * *f), 0)) return {};
  for (size_t d : {c + 1, c + 2}) {
    if (!up && !ctx.guard_eq(sym::mod(sizes[d], *f), 0)) return {};
    sizes[d] = up ? sizes[d] * *f : sym::floordiv(sizes[d], *f);
  }
  sizes[c] = up ? sym::floordiv(sizes[c], *f * *f) : sizes[c] * (*f * *f);
  return like_image(ctx, *x, std::move(sizes));
}
}  // namespace
Shape shape_pixel_shuffle(sym::Context& ctx, ArgSpan args) { return pixel_shuffle(ctx, args, true); }
Shape shape_pixel_unshuffle(sym::Context& ctx, ArgSpan args) { return pixel_shuffle(ctx, args, false); }

}  // namespace vitrify::ops
