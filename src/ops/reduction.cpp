// Reductions over dims. Half types accumulate in f32, integers in i64; variances of the CPU in f64, as eager's.
#include "ops/reduction.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ir/faults.h"
#include "ops/rules.h"

namespace vitrify::ops {

Tensor reduce_sum(Lowering& L, const Tensor& x, std::span<const int64_t> dims, bool keepdim, DType acc, DType out, const std::function<Val(Val)>& f) {
  return L.reduce(AccumKind::Sum, x, dims, keepdim, acc, out, [acc, f](Val v) {
    v = cast(v, acc);
    return f ? f(v) : v;
  })[0];
}

Moments moments(Lowering& L, const Tensor& x, std::span<const int64_t> dims, bool keepdim, DType acc, DType out, AccumKind kind) {
  auto w = L.reduce(kind, x, dims, keepdim, acc, out, [acc](Val v) { return cast(v, acc); });
  return {w[0], w[1], product(x.sizes, dims)};
}

namespace {

// The dims of argument i; a 0-d operand has none. nullopt: out of range or repeated, for eager to refuse.
std::optional<std::vector<int64_t>> reduced_dims(const Args& a, size_t i, size_t rank) {
  std::vector<int64_t> d;
  if (i < a.n.args.size())
    d = a.dims(i, rank);
  else
    for (size_t k = 0; k < rank; ++k) d.push_back(static_cast<int64_t>(k));
  if (rank == 0) return std::vector<int64_t>{};
  std::vector<bool> seen(rank);
  for (int64_t k : d) {
    if (k < 0 || k >= static_cast<int64_t>(rank) || seen[k]) return std::nullopt;
    seen[k] = true;
  }
  return d;
}
bool keepdim_arg(const Args& a, size_t i) {
  auto* k = i < a.n.args.size() ? std::get_if<bool>(&a.n.args[i]) : nullptr;
  return k && *k;
}

// Position of dims and keepdim: `whole` overloads have neither.
struct Where {
  size_t dims = 99, keepdim = 99;
};

// Sums start from zero: that of -0 is 0.
template <AccumKind kind>
Val sum_of_one(Val v) {
  return kind == AccumKind::Sum && is_float(v.type) ? v + v.lit(0) : v;
}

// As stored, so that ties are eager's ties, and a wider type shows no more than there is.
Tensor exact(Lowering& L, const Tensor& x) {
  if (x.dtype == compute_type(x.dtype)) return x;
  return map1(L, x, x.dtype, [x](Body&, Val v) { return stored(x, v); });
}
template <AccumKind kind, size_t dims_at, size_t keep_at>
bool lower_accumulate(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto dims = reduced_dims(a, dims_at, x.sizes.size());
  const DType out = a.out().dtype;
  if (!dims || out == DType::Bool) return false;
  const DType acc = is_float(out) ? compute_type(out) : DType::I64;
  const auto converted = [x, acc, out](Val v) {  // to the type of the result, and that before it is summed
    if (x.dtype == out) return cast(v, acc);
    v = stored(x, v);
    return cast(cast(v, out), acc);
  };
  if (dims->empty()) {
    r.push_back(map1(a.L, x, out, [converted, out](Body&, Val v) { return cast(sum_of_one<kind>(converted(v)), compute_type(out)); }));
    return true;
  }
  r.push_back(a.L.reduce(kind, x, *dims, keepdim_arg(a, keep_at), acc, out, converted)[0]);
  return true;
}

template <size_t dims_at, size_t keep_at>
bool lower_mean(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto dims = reduced_dims(a, dims_at, x.sizes.size());
  const DType out = a.out().dtype;
  if (!dims || !is_float(out)) return false;
  const DType acc = compute_type(out);
  if (x.dtype != out) x = exact(a.L, x);
  if (dims->empty()) return r.push_back(map1(a.L, x, out, [acc](Body&, Val v) { return sum_of_one<AccumKind::Sum>(cast(v, acc)); })), true;
  Tensor s = reduce_sum(a.L, x, *dims, keepdim_arg(a, keep_at), acc, acc);
  r.push_back(map1(a.L, s, out, [acc, n = product(x.sizes, *dims)](Body& b, Val v) { return v / numel_as(b, n, acc); }, 2));
  return true;
}

// Extremes need at least one element; an empty dim is eager's error.
bool has_elements(const Tensor& x, std::span<const int64_t> dims) {
  for (int64_t d : dims)
    if (!sym::known_lt(0, x.sizes[d]).value_or(sym::has_hint(x.sizes[d]) && sym::hint(x.sizes[d]) > 0)) return false;
  return true;
}
template <AccumKind kind, size_t dims_at, size_t keep_at>
bool lower_extreme(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto dims = reduced_dims(a, dims_at, x.sizes.size());
  if (!dims || !has_elements(x, *dims)) return false;
  if (dims->empty()) return r.push_back(x), true;
  constexpr AccumKind on_bool = kind == AccumKind::Max ? AccumKind::Any : AccumKind::All;
  r.push_back(a.L.reduce(x.dtype == DType::Bool ? on_bool : kind, x, *dims, keepdim_arg(a, keep_at), compute_type(x.dtype), x.dtype)[0]);
  return true;
}
bool lower_aminmax(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto dims = reduced_dims(a, 1, x.sizes.size());
  if (!dims || dims->empty() || x.dtype == DType::Bool || !has_elements(x, *dims)) return false;
  for (AccumKind k : {AccumKind::Min, AccumKind::Max}) r.push_back(a.L.reduce(k, x, *dims, a.boolean(2), compute_type(x.dtype), x.dtype)[0]);
  return true;
}

template <AccumKind kind>
bool lower_extreme_with_index(const Args& a, std::vector<Tensor>& r) {
  Tensor x = exact(a.L, a.tensor(0));
  if (x.sizes.empty() || x.dtype == DType::Bool) return false;
  const int64_t d[] = {a.dim(1, x.sizes.size())};
  if (!has_elements(x, d)) return false;
  r = a.L.reduce(kind, x, d, a.boolean(2), compute_type(x.dtype), x.dtype);
  return true;
}
template <AccumKind kind>
bool lower_arg_extreme(const Args& a, std::vector<Tensor>& r) {
  Tensor x = exact(a.L, a.tensor(0));
  if (x.sizes.empty() || x.dtype == DType::Bool) return false;
  const bool flat = a.none(1);
  if (flat && x.sizes.size() > 1) {
    Int n = 1;
    for (auto& s : x.sizes) n = n * s;
    x = a.L.reshape(x, Dims{n});
  }
  const int64_t d[] = {flat ? 0 : a.dim(1, x.sizes.size())};
  if (!has_elements(x, d)) return false;
  Tensor i = a.L.reduce(kind, x, d, a.boolean(2), compute_type(x.dtype), x.dtype)[1];
  r.push_back(i.sizes == a.out().sizes ? i : a.L.reshape(i, a.out().sizes));
  return true;
}

// Whether elements are other than zero: 0.5 is no integer, and is.
Tensor as_logical(Lowering& L, const Tensor& x) {
  return map1(L, x, DType::Bool, [x](Body&, Val v) { return logical(stored(x, v)); });
}
template <AccumKind kind, size_t dims_at, size_t keep_at>
bool lower_logical(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto dims = reduced_dims(a, dims_at, x.sizes.size());
  if (!dims || a.out().dtype != DType::Bool) return false;
  // dims=[] of the .dims overloads is "none", unlike everywhere else.
  if (dims_at == 1 && !a.none(1) && std::holds_alternative<std::vector<Int>>(a.n.args[1]) && a.ints(1).empty()) return false;
  x = as_logical(a.L, x);
  r.push_back(dims->empty() ? x : a.L.reduce(kind, x, *dims, keepdim_arg(a, keep_at), DType::Bool, DType::Bool)[0]);
  return true;
}

// The mean as eager's runs over the elements: of any that is not finite it makes NaNs of those after it.
Tensor running_mean(Lowering& L, const Tensor& x, std::span<const int64_t> dims, bool keepdim, const Tensor& mean, DType out) {
  Tensor odd = reduce_sum(L, x, dims, keepdim, mean.dtype, mean.dtype, [](Val v) { return where(finite(v), v.lit(0), v.lit(1)); });
  Tensor last = x;
  for (int64_t d : dims) last = L.slice(last, d, x.sizes[d] - 1, 1, 1);
  if (!keepdim) last = L.reshape(last, mean.sizes);
  return L.map(
      out, mean.sizes,
      [=](Body& b, const Index& i) {
        Val m = mean.at(b, i), n = odd.at(b, i), end = cast(last.at(b, i), m.type);
        Val here = where(eq(n, n.lit(1)) & !finite(end), end, m.lit(NAN));
        return cast(where(eq(n, n.lit(0)), m, here), compute_type(out));
      },
      8, 3);
}

// var, std, var_mean, std_mean (self, dim?, correction?, keepdim)
template <bool root, bool with_mean>
bool lower_variance(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto dims = reduced_dims(a, 1, x.sizes.size());
  const DType out = a.out().dtype;
  if (!dims || dims->empty() || !is_float(out)) return false;
  double correction = 1;
  if (!a.none(2)) {
    auto c = a.scalar(2);
    if (!c) return false;
    correction = *c;
  }
  const Int count = product(x.sizes, *dims);
  if (sym::known_le(count, Int(static_cast<int64_t>(std::floor(std::clamp(correction, -1e15, 1e15))))).value_or(false)) return false;  // ATen warns
  const DType acc = a.out().device.kind == DeviceKind::CPU ? DType::F64 : compute_type(out);
  const auto has_some = [&](int64_t d) { return sym::known_lt(Int(0), x.sizes[d]).value_or(false); };
  if (with_mean && !std::ranges::all_of(*dims, has_some)) return false;  // the last element is looked at
  if (with_mean) x = reused(a.L, x);
  auto m = moments(a.L, x, *dims, a.boolean(3), acc, acc);
  r.push_back(map1(
      a.L, m.m2, out,
      [n = m.count, correction, out](Body& b, Val v) {
        const Val all = numel_as(b, n, v.type), k = all - correction;
        v = v / where(eq(all, all.lit(0)), all, where(k > k.lit(0), k, k.lit(0)));  // of nothing NaN, whatever the correction; not of one that is NaN
        if (root) v = unary(LOp::sqrt, v);
        return cast(v, compute_type(out));
      },
      4));
  if (with_mean && m.count.is(0)) return r.push_back(a.L.full(out, m.mean.sizes, std::numeric_limits<double>::quiet_NaN())), true;
  if (with_mean) r.push_back(running_mean(a.L, x, *dims, a.boolean(3), m.mean, out));
  return true;
}

bool vector_norm(const Args& a, std::vector<Tensor>& r, double p, const std::vector<int64_t>& dims, bool keepdim) {
  Tensor x = a.tensor(0);
  const DType out = a.out().dtype;
  if (!is_float(out) || !is_float(x.dtype) || dims.empty()) return false;
  const DType acc = compute_type(out);
  if (x.dtype != out || p == 0) x = exact(a.L, x);
  const Int count = product(x.sizes, dims);
  if (count.is(1)) {  // nothing is squared, and nothing overflows
    Tensor kept = x;
    for (size_t d = x.sizes.size(); !keepdim && d-- > 0;)
      if (std::find(dims.begin(), dims.end(), static_cast<int64_t>(d)) != dims.end()) kept = a.L.squeeze(kept, static_cast<int64_t>(d));
    r.push_back(map1(a.L, kept, out, [acc, p](Body&, Val v) {
      v = cast(v, acc);
      return p == 0 ? where(ne(v, v.lit(0)), v.lit(1), v.lit(0)) : unary(LOp::abs, v);
    }));
    return true;
  }
  if (std::isinf(p)) {
    if (!has_elements(x, dims)) return false;
    r.push_back(
        a.L.reduce(p > 0 ? AccumKind::Max : AccumKind::Min, x, dims, keepdim, acc, out, [acc](Val v) { return unary(LOp::abs, cast(v, acc)); })[0]);
    return true;
  }
  if (p < 0 && !has_elements(x, dims)) return false;  // eager raises
  // Of a count that calls differ in, each finds whether it is of one.
  const auto of_one = [count](Val one, Val more) {
    Body& b = *more.body;
    return count.is_const() ? more : where(eq(b.index(count), b.index(1)), one, more);
  };
  Tensor s = reduce_sum(a.L, x, dims, keepdim, acc, acc, [p, of_one](Val v) {
    if (p == 0) return where(ne(v, v.lit(0)), v.lit(1), v.lit(0));
    const Val positive = unary(LOp::abs, v);
    return p == 1 ? positive : of_one(positive, p == 2 ? v * v : binary(LOp::pow, positive, v.lit(p)));
  });
  r.push_back(map1(
      a.L, s, out,
      [p, of_one](Body&, Val v) {
        if (p == 0 || p == 1) return v;
        return of_one(v, p == 2 ? unary(LOp::sqrt, v) : binary(LOp::pow, v, v.lit(1 / p)));
      },
      3));
  return true;
}
bool lower_vector_norm(const Args& a, std::vector<Tensor>& r) {
  auto p = a.scalar(1);
  auto dims = reduced_dims(a, 2, a.tensor(0).sizes.size());
  return p && dims && vector_norm(a, r, *p, *dims, a.boolean(3));
}
bool lower_norm_dim(const Args& a, std::vector<Tensor>& r) {
  auto p = a.none(1) ? 2.0 : a.scalar(1);
  auto dims = reduced_dims(a, 2, a.tensor(0).sizes.size());
  return p && dims && vector_norm(a, r, *p, *dims, a.boolean(3));
}
bool lower_norm_all(const Args& a, std::vector<Tensor>& r) {
  auto p = a.scalar(1);
  auto dims = reduced_dims(a, 99, a.tensor(0).sizes.size());
  return p && vector_norm(a, r, *p, *dims, false);
}

bool lower_logsumexp(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto dims = reduced_dims(a, 1, x.sizes.size());
  const DType out = a.out().dtype;
  if (!dims || dims->empty() || !is_float(x.dtype) || !has_elements(x, *dims)) return false;
  if (a.ints(1).empty()) return false;  // eager raises
  x = reused(a.L, x);
  const DType t = compute_type(out);
  // An infinite maximum is not subtracted: inf - inf is no number.
  Tensor top = a.L.reduce(AccumKind::Max, x, *dims, true, t, t)[0];
  Tensor m = map1(a.L, top, t, [](Body& b, Val v) { return where(b.op(LOp::isinf, v.type, v), v.lit(0), v); }, 2);
  Tensor mx = a.L.expand(m, x.sizes);
  Tensor e = map2(a.L, x, mx, t, [](Body&, Val v, Val k) { return unary(LOp::exp, v - k); }, 11);
  Tensor s = reduce_sum(a.L, e, *dims, true, t, t);
  Tensor y = map2(a.L, s, m, out, [](Body&, Val v, Val k) { return unary(LOp::log, v) + k; }, 13);
  r.push_back(y.sizes == a.out().sizes ? y : a.L.reshape(y, a.out().sizes));
  return true;
}
bool lower_count_nonzero(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto dims = reduced_dims(a, a.n.args.size() > 1 && !a.none(1) ? 1 : 99, x.sizes.size());
  if (!dims || dims->empty()) return false;
  r.push_back(a.L.reduce(AccumKind::Sum, as_logical(a.L, x), *dims, false, DType::I64, DType::I64)[0]);
  return true;
}

using R = ReductionDType;
template <R rule, size_t dims_at, size_t keep_at, size_t dtype_at = 99, int results = 1>
Shape shape_of(sym::Context& ctx, ArgSpan args) {
  return reduction_shape(ctx, args, rule, dims_at, keep_at, dtype_at, results);
}

// The largest and smallest elements, and sums of negative powers, of nothing: eager raises.
template <size_t dims_at, size_t keep_at, size_t dtype_at = 99>
Shape shape_norm(sym::Context& ctx, ArgSpan args) {
  const auto* real = std::get_if<double>(&args[1]);
  const auto* whole = std::get_if<Int>(&args[1]);
  if ((real && (*real < 0 || std::isinf(*real))) || (whole && sym::known_lt(*whole, 0).value_or(true))) {
    const TensorType* x = tensor_arg(args, 0);
    const auto dims = x ? dims_arg(ctx, args, dims_at, x->sizes.size()) : std::nullopt;
    if (!dims) return {};
    for (int64_t d : *dims)
      if (d < static_cast<int64_t>(x->sizes.size()) && ctx.guard_eq(x->sizes[static_cast<size_t>(d)], 0)) return {};
  }
  return shape_of<R::Float, dims_at, keep_at, dtype_at>(ctx, args);
}

Shape shape_logsumexp(sym::Context& ctx, ArgSpan args) {
  auto* dims = args.size() > 1 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  if (dims && dims->empty()) return {};  // eager raises, of what has dims
  return shape_of<R::Float, 1, 2>(ctx, args);
}

constexpr AccumKind Sum = AccumKind::Sum, Prod = AccumKind::Prod, Max = AccumKind::Max, Min = AccumKind::Min;

const OpRow kRows[] = {
    {"aten::sum", 0, shape_of<R::Sum, 99, 99, 1>, lower<lower_accumulate<Sum, 99, 99>>},
    {"aten::sum.dim_IntList", 0, shape_of<R::Sum, 1, 2, 3>, lower<lower_accumulate<Sum, 1, 2>>},
    {"aten::prod", 0, shape_of<R::Sum, 99, 99, 1>, lower<lower_accumulate<Prod, 99, 99>>},
    {"aten::prod.dim_int", 0, shape_of<R::Sum, 1, 2, 3>, lower<lower_accumulate<Prod, 1, 2>>},
    {"aten::mean", 0, shape_of<R::Mean, 99, 99, 1>, lower<lower_mean<99, 99>>},
    {"aten::mean.dim", 0, shape_of<R::Mean, 1, 2, 3>, lower<lower_mean<1, 2>>},
    {"aten::amax", 0, shape_of<R::Same, 1, 2>, lower<lower_extreme<Max, 1, 2>>},
    {"aten::amin", 0, shape_of<R::Same, 1, 2>, lower<lower_extreme<Min, 1, 2>>},
    {"aten::max", 0, shape_of<R::Same, 99, 99>, lower<lower_extreme<Max, 99, 99>>},
    {"aten::min", 0, shape_of<R::Same, 99, 99>, lower<lower_extreme<Min, 99, 99>>},
    {"aten::aminmax", 0, nullptr, lower<lower_aminmax>},
    {"aten::max.dim", 0, shape_of<R::WithIndex, 1, 2, 99, 2>, lower<lower_extreme_with_index<AccumKind::ArgMax>>},
    {"aten::min.dim", 0, shape_of<R::WithIndex, 1, 2, 99, 2>, lower<lower_extreme_with_index<AccumKind::ArgMin>>},
    {"aten::argmax", 0, shape_of<R::Index, 1, 2>, lower<lower_arg_extreme<AccumKind::ArgMax>>},
    {"aten::argmin", 0, shape_of<R::Index, 1, 2>, lower<lower_arg_extreme<AccumKind::ArgMin>>},
    {"aten::any", 0, shape_of<R::Bool, 99, 99>, lower<lower_logical<AccumKind::Any, 99, 99>>},
    {"aten::any.dim", 0, shape_of<R::Bool, 1, 2>, lower<lower_logical<AccumKind::Any, 1, 2>>},
    {"aten::any.dims", 0, shape_of<R::BoolDims, 1, 2>, lower<lower_logical<AccumKind::Any, 1, 2>>},
    {"aten::all", 0, shape_of<R::Bool, 99, 99>, lower<lower_logical<AccumKind::All, 99, 99>>},
    {"aten::all.dim", 0, shape_of<R::Bool, 1, 2>, lower<lower_logical<AccumKind::All, 1, 2>>},
    {"aten::all.dims", 0, shape_of<R::BoolDims, 1, 2>, lower<lower_logical<AccumKind::All, 1, 2>>},
    {"aten::var.correction", 0, shape_of<R::Float, 1, 3>, lower<lower_variance<false, false>>},
    {"aten::std.correction", 0, shape_of<R::Float, 1, 3>, lower<lower_variance<true, false>>},
    {"aten::var_mean.correction", 0, shape_of<R::Float, 1, 3, 99, 2>, lower<lower_variance<false, true>>},
    {"aten::std_mean.correction", 0, shape_of<R::Float, 1, 3, 99, 2>, lower<lower_variance<true, true>>},
    {"aten::linalg_vector_norm", 0, shape_norm<2, 3, 4>, lower<lower_vector_norm>},
    {"aten::norm.ScalarOpt_dim", 0, shape_norm<2, 3>, lower<lower_norm_dim>},
    {"aten::norm.ScalarOpt_dim_dtype", 0, nullptr, lower<lower_norm_dim>},
    {"aten::norm.Scalar", 0, shape_norm<99, 99>, lower<lower_norm_all>},
    {"aten::logsumexp", ir::kNamesDims, shape_logsumexp, lower<lower_logsumexp>},
    {"aten::count_nonzero.dim_IntList", 0, nullptr, lower<lower_count_nonzero>},
    {"aten::count_nonzero", 0, nullptr, lower<lower_count_nonzero>},
};

}  // namespace

std::span<const OpRow> reduction_rows() { return kRows; }

}  // namespace vitrify::ops
