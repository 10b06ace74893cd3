// Normalisations and softmax, forward. Statistics in f32 (f64 for f64), two passes over the data at most besides the output.
#include "ops/norm.h"

#include <cmath>

namespace vitrify::ops {

Tensor as_type(Lowering& L, const Tensor& x, DType out) {
  if (x.dtype == out) return x;
  return map1(L, x, out, [out](Body&, Val v) { return cast(v, compute_type(out)); });
}

Tensor rstd_of(Lowering& L, const Moments& m, double eps) {
  return map1(L, m.m2, m.m2.dtype, [n = m.count, eps](Body& b, Val v) { return unary(LOp::rsqrt, v / numel_as(b, n, v.type) + eps); }, 5);
}

Tensor channelwise(Lowering& L, const Tensor& v, const Dims& sizes) {
  Dims s(sizes.size(), Int(1));
  s[1] = v.sizes.size() == 1 ? v.sizes[0] : sizes[1];
  return L.expand(L.reshape(v, s), sizes);
}

Tensor normalized(const Args& a, const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& weight, const Tensor& bias, DType out) {
  const DType t = compute_type(x.dtype);
  Tensor m = broadcast(a.L, mean, x.sizes), s = broadcast(a.L, rstd, x.sizes);
  Tensor w = weight ? broadcast(a.L, weight, x.sizes) : Tensor{}, c = bias ? broadcast(a.L, bias, x.sizes) : Tensor{};
  const int reads = x.reads + 2 + (w ? 1 : 0) + (c ? 1 : 0);
  return a.L.map(
      out, x.sizes,
      [=](Body& b, const Index& i) {
        Val v = (cast(x.at(b, i), t) - cast(m.at(b, i), t)) * cast(s.at(b, i), t);
        if (w) v = v * cast(w.at(b, i), t);
        if (c) v = v + cast(c.at(b, i), t);
        return cast(v, compute_type(out));
      },
      x.cost + m.cost + s.cost + 4, reads);
}

std::vector<int64_t> dims_from(size_t first, size_t rank) {
  std::vector<int64_t> d;
  for (size_t k = first; k < rank; ++k) d.push_back(static_cast<int64_t>(k));
  return d;
}
std::vector<int64_t> all_but_channel(size_t rank) {
  std::vector<int64_t> d{0};
  for (size_t k = 2; k < rank; ++k) d.push_back(static_cast<int64_t>(k));
  return d;
}

namespace {

// Moments where the sum is of type t, and overflows: all are infinitely far from the mean then.
Moments overflowing(Lowering& L, const Moments& m, DType t) {
  Tensor mean = map1(
      L, m.mean, m.mean.dtype,
      [count = m.count, t](Body& b, Val v) {
        Val sum = cast(v * numel_as(b, count, v.type), t);
        return where(b.op(LOp::isinf, sum.type, sum), cast(sum, v.type), v);
      },
      4);
  Tensor m2 = map2(L, m.m2, mean, m.m2.dtype, [](Body& b, Val v, Val at) { return where(b.op(LOp::isinf, at.type, at), v + at * at, v); }, 3);
  return {mean, m2, m.count};
}

// Rows as eager has them: of anything that is not finite NaNs, and also of the squares of those shorter than its vectors whose mean's square
// overflows.
Moments of_rows(Lowering& L, const Moments& m, DType stored) {
  constexpr double kVector = 32;  // bytes
  return {map2(
              L, m.mean, m.m2, m.mean.dtype, [](Body&, Val mean, Val v) { return where(eq(v, v), mean, v); }, 2),
          map2(
              L, m.m2, m.mean, m.m2.dtype,
              [n = m.count, width = kVector / static_cast<double>(size_of(stored))](Body& b, Val v, Val mean) {
                return where(numel_as(b, n, v.type) < v.lit(width), v + mean * mean * 0, v);
              },
              4),
          m.count};
}

// The squared distances where eager subtracts the mean's square from that of the squares.
Tensor of_squares(Lowering& L, const Moments& m) {
  return map2(
      L, m.m2, m.mean, m.m2.dtype,
      [n = m.count](Body& b, Val v, Val mean) {
        Val square = mean * mean, sum = v + square * numel_as(b, n, v.type);
        return where(finite(sum), v, sum - square);
      },
      6);
}

Tensor optional_tensor(const Args& a, size_t i) { return a.is_tensor(i) ? a.tensor(i) : Tensor{}; }

// All of one type, or halves beside parameters of float32: eager raises for others, which is left to it.
bool types_agree(const Args& a, std::initializer_list<size_t> parameters) {
  const DType x = a.tensor(0).dtype;
  std::optional<DType> found;
  for (size_t i : parameters) {
    if (!a.is_tensor(i)) continue;
    const DType p = a.tensor(i).dtype;
    if ((p != x && (p != DType::F32 || compute_type(x) != DType::F32)) || p != found.value_or(p)) return false;
    found = p;
  }
  return true;
}

bool lower_layer_norm(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const size_t k = a.ints(1).size();
  if (!is_float(x.dtype) || k == 0 || k > x.sizes.size()) return false;
  if (!types_agree(a, {2, 3})) return false;
  x = reused(a.L, x);
  const DType t = compute_type(x.dtype);
  auto m = of_rows(a.L, moments(a.L, x, dims_from(x.sizes.size() - k, x.sizes.size()), true, t, t), x.dtype);
  Tensor rstd = rstd_of(a.L, m, *a.scalar(4));
  r.push_back(normalized(a, x, m.mean, rstd, optional_tensor(a, 2), optional_tensor(a, 3), a.out().dtype));
  if (a.n.outs.size() > 1) {
    r.push_back(as_type(a.L, m.mean, a.out(1).dtype));
    r.push_back(as_type(a.L, rstd, a.out(2).dtype));
  }
  return true;
}

// rms_norm gives the result, _fused_rms_norm also the reciprocal of the root mean square.
bool lower_rms_norm(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const size_t k = a.ints(1).size();
  if (!is_float(x.dtype) || k == 0 || k > x.sizes.size()) return false;
  double eps;
  if (a.none(3)) {
    // Eager's default is the epsilon of the type it computes in.
    eps = x.dtype == DType::F64 ? 2.220446049250313e-16 : 1.1920928955078125e-07;
  } else {
    eps = *a.scalar(3);
  }
  x = reused(a.L, x);
  const DType t = compute_type(x.dtype);
  auto dims = dims_from(x.sizes.size() - k, x.sizes.size());
  Tensor ss = reduce_sum(a.L, x, dims, true, t, t, [](Val v) { return v * v; });
  Tensor scale =
      map1(a.L, ss, t, [n = product(x.sizes, dims), eps](Body& b, Val v) { return unary(LOp::rsqrt, v / numel_as(b, n, v.type) + eps); }, 5);
  Tensor s = a.L.expand(scale, x.sizes), w = a.is_tensor(2) ? broadcast(a.L, a.tensor(2), x.sizes) : Tensor{};
  const DType out = a.out().dtype;
  r.push_back(a.L.map(
      out, x.sizes,
      [=](Body& b, const Index& i) {
        Val v = x.at(b, i) * s.at(b, i);
        return w ? v * cast(w.at(b, i), t) : v;
      },
      x.cost + s.cost + 3, x.reads + 2));
  if (a.n.outs.size() > 1) r.push_back(as_type(a.L, scale, a.out(1).dtype));
  return true;
}

// normalized() as eager writes it where weights belong to channels: infinite ones give its NaNs.
Tensor scaled(const Args& a, const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& weight, const Tensor& bias, DType out) {
  const DType t = compute_type(x.dtype);
  Tensor m = broadcast(a.L, mean, x.sizes), s = broadcast(a.L, rstd, x.sizes);
  Tensor w = weight ? broadcast(a.L, weight, x.sizes) : Tensor{}, c = bias ? broadcast(a.L, bias, x.sizes) : Tensor{};
  const int reads = x.reads + 2 + (w ? 1 : 0) + (c ? 1 : 0);
  return a.L.map(
      out, x.sizes,
      [=](Body& b, const Index& i) {
        Val scale = cast(s.at(b, i), t);
        if (w) scale = scale * cast(w.at(b, i), t);
        const Val at = cast(m.at(b, i), t);
        Val shift = c ? fma(-scale, at, cast(c.at(b, i), t)) : -scale * at;
        return cast(fma(scale, cast(x.at(b, i), t), shift), compute_type(out));
      },
      x.cost + m.cost + s.cost + 5, reads);
}

// Shared by the batch norm overloads: positions of what differs between them.
struct BatchNorm {
  Tensor weight, bias, running_mean, running_var;
  bool training = false;
  double momentum = 0, eps = 0;
};
void batch_norm(const Args& a, const BatchNorm& p, std::vector<Tensor>& r, bool functional) {
  Tensor x = a.tensor(0);
  const DType t = compute_type(x.dtype), out = a.out().dtype;
  auto per_channel = [&](const Tensor& v) { return v ? channelwise(a.L, v, x.sizes) : Tensor{}; };
  const ir::TensorType& type = std::get<ir::Value>(a.n.args[0]).type();
  bool dense = false;  // eager has kernels of its own for these layouts
  for (auto f : {ir::MemoryFormat::Contiguous, ir::MemoryFormat::ChannelsLast, ir::MemoryFormat::ChannelsLast3d})
    dense = dense || is_contiguous(a.L.ctx(), type, f);
  const auto apply = dense ? scaled : normalized;
  if (!p.training) {
    Tensor rstd = map1(a.L, p.running_var, t, [t, eps = p.eps](Body&, Val v) { return unary(LOp::rsqrt, cast(v, t) + eps); }, 4);
    r.push_back(apply(a, x, per_channel(p.running_mean), per_channel(rstd), per_channel(p.weight), per_channel(p.bias), out));
    for (size_t i = 1; i < 3 && i < a.n.outs.size(); ++i) {
      // Saved statistics: empty on the CPU; some backends give the running ones.
      const bool full = !a.out(i).sizes.empty() && !a.out(i).sizes[0].is(0);
      r.push_back(full ? as_type(a.L, i == 1 ? p.running_mean : rstd, a.out(i).dtype) : a.L.full(a.out(i).dtype, a.out(i).sizes, 0));
    }
    if (functional) r.push_back(p.running_mean), r.push_back(p.running_var);
    return;
  }
  x = reused(a.L, x);
  // Of float32 eager sums in double precision, or the squares of what it has centred (channels-last images).
  const bool contiguous = a.n.as_contiguous || is_contiguous(a.L.ctx(), type, ir::MemoryFormat::Contiguous);
  const DType wide = x.dtype == DType::F32 ? DType::F64 : t;
  auto m = moments(a.L, x, all_but_channel(x.sizes.size()), false, wide, wide, AccumKind::Moments);
  if (!contiguous) m = overflowing(a.L, m, t);
  if (dense) m = {as_type(a.L, m.mean, t), as_type(a.L, m.m2, t), m.count};  // squares overflow as float32
  Tensor rstd = rstd_of(a.L, m, p.eps);
  if (p.eps == 0) rstd = map2(a.L, m.m2, rstd, t, [](Body&, Val v, Val s) { return where(eq(v, v.lit(0)), v.lit(0), s); });  // as eager has it
  // Eager applies half statistics as it rounds them, which cancel exactly where the mean is large: so does what is centred first.
  const DType given = a.out(1).dtype;
  const auto centre = given == compute_type(given) ? apply : normalized;
  r.push_back(centre(a, x, per_channel(m.mean), per_channel(rstd), per_channel(p.weight), per_channel(p.bias), out));
  r.push_back(as_type(a.L, m.mean, a.out(1).dtype));
  r.push_back(as_type(a.L, rstd, a.out(2).dtype));
  if (!functional) return;
  auto update = [&](const Tensor& old, const Tensor& now, bool unbiased) {
    return a.L.map(
        old.dtype, old.sizes,
        [=, n = m.count, k = p.momentum](Body& b, const Index& i) {
          Val v = now.at(b, i);
          if (unbiased) v = v / (numel_as(b, n, v.type) - 1.0);
          return cast(v * k + (1 - k) * cast(old.at(b, i), v.type), compute_type(old.dtype));
        },
        6, 2);
  };
  r.push_back(update(p.running_mean, m.mean, false));
  r.push_back(update(p.running_var, m.m2, true));
}

bool lower_batch_norm_no_training(const Args& a, std::vector<Tensor>& r) {
  if (!is_float(a.tensor(0).dtype) || a.tensor(0).sizes.size() < 2 || !types_agree(a, {1, 2, 3, 4})) return false;
  batch_norm(a, {optional_tensor(a, 1), optional_tensor(a, 2), a.tensor(3), a.tensor(4), false, 0, *a.scalar(6)}, r, false);
  return true;
}
// Eager refuses to take moments of nothing.
bool may_be_empty(const Dims& sizes) {
  return std::ranges::any_of(sizes, [](const Int& n) { return !sym::known_lt(Int(0), n).value_or(false); });
}
// native_batch_norm and _native_batch_norm_legit_functional. The former updates the running statistics behind the graph's back when it trains.
template <bool functional>
bool lower_batch_norm(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const bool training = a.boolean(5);
  if (!is_float(x.dtype) || x.sizes.size() < 2 || (training ? may_be_empty(x.sizes) : !a.is_tensor(3) || !a.is_tensor(4))) return false;
  if ((!functional && training && (a.is_tensor(3) || a.is_tensor(4))) || !types_agree(a, {1, 2, 3, 4})) return false;
  batch_norm(a, {optional_tensor(a, 1), optional_tensor(a, 2), optional_tensor(a, 3), optional_tensor(a, 4), training, *a.scalar(6), *a.scalar(7)}, r,
             functional);
  return true;
}
bool lower_batch_norm_no_stats(const Args& a, std::vector<Tensor>& r) {
  if (!is_float(a.tensor(0).dtype) || a.tensor(0).sizes.size() < 2 || !a.boolean(3) || !types_agree(a, {1, 2}) || may_be_empty(a.tensor(0).sizes))
    return false;
  batch_norm(a, {optional_tensor(a, 1), optional_tensor(a, 2), {}, {}, true, *a.scalar(4), *a.scalar(5)}, r, false);
  return true;
}

// [N, C, ...] as [N, groups, C / groups, ...]
Tensor grouped(Lowering& L, const Tensor& x, int64_t groups) {
  Dims s{x.sizes[0], Int(groups), sym::floordiv(x.sizes[1], groups)};
  for (size_t d = 2; d < x.sizes.size(); ++d) s.push_back(x.sizes[d]);
  return L.reshape(x, s);
}

bool lower_group_norm(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const int64_t groups = a.constant_int(6);
  if (!is_float(x.dtype) || x.sizes.size() < 2 || groups < 1 || !sym::mod(x.sizes[1], groups).is(0) || known_empty(x.sizes) ||
      !types_agree(a, {1, 2}))
    return false;
  x = reused(a.L, x);
  const DType t = compute_type(x.dtype);
  Tensor g = grouped(a.L, x, groups);
  const bool contiguous = a.n.as_contiguous || a.out().strides == ir::contiguous_strides(x.sizes);
  auto m = moments(a.L, g, dims_from(2, g.sizes.size()), false, t, t, contiguous ? AccumKind::Welford : AccumKind::Moments);
  if (contiguous) {
    m = of_rows(a.L, m, x.dtype);
  } else {
    m = overflowing(a.L, m, t);
    m.m2 = a.L.realize(of_squares(a.L, m));
    m.mean = a.L.realize(m.mean);
  }
  Tensor rstd = rstd_of(a.L, m, *a.scalar(7));
  const Int per = sym::floordiv(x.sizes[1], groups);
  auto spread = [&](const Tensor& v) {  // [N, groups] over [N, C, ...]
    return a.L.view(v, x.sizes, [per](const Index& i) { return Index{i[0], sym::floordiv(i[1], per)}; });
  };
  Tensor w = a.is_tensor(1) ? channelwise(a.L, a.tensor(1), x.sizes) : Tensor{},
         b = a.is_tensor(2) ? channelwise(a.L, a.tensor(2), x.sizes) : Tensor{};
  // Without weights, in contiguous memory, the mean is subtracted first: what is equal gives zeros.
  const bool subtracts = !w && !b && contiguous;
  r.push_back((subtracts ? normalized : scaled)(a, x, spread(m.mean), spread(rstd), w, b, a.out().dtype));
  r.push_back(as_type(a.L, m.mean, a.out(1).dtype));
  r.push_back(as_type(a.L, rstd, a.out(2).dtype));
  return true;
}

// --- softmax

enum class Soft : uint8_t { Plain, Log, Safe };
template <Soft kind>
bool lower_softmax(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const DType out = a.out().dtype;
  if (!is_float(x.dtype) || !is_float(out) || x.sizes.empty()) return false;
  const int64_t d[] = {a.dim(1, x.sizes.size())};
  const DType t = compute_type(out) == DType::F64 ? DType::F64 : compute_type(x.dtype);
  if (x.dtype != out && out != DType::F32 && kind != Soft::Safe && compute_type(x.dtype) != compute_type(out)) x = as_type(a.L, x, out);
  x = reused(a.L, x);
  Tensor top = a.L.reduce(AccumKind::Max, x, d, true, t, t, [t](Val v) { return cast(v, t); })[0];
  if (kind == Soft::Safe) top = map1(a.L, top, t, [](Body&, Val v) { return where(eq(v, v.lit(-INFINITY)), v.lit(0), v); });
  Tensor m = a.L.expand(top, x.sizes);
  Tensor e = map2(a.L, x, m, t, [t](Body&, Val v, Val k) { return unary(LOp::exp, cast(v, t) - k); }, 11);
  Tensor s = reduce_sum(a.L, e, d, true, t, t);
  if (kind == Soft::Log) {
    Tensor ls = a.L.expand(map1(a.L, s, t, [](Body&, Val v) { return unary(LOp::log, v); }, 12), x.sizes);
    r.push_back(a.L.map(
        out, x.sizes, [=](Body& b, const Index& i) { return cast(cast(x.at(b, i), t) - m.at(b, i) - ls.at(b, i), compute_type(out)); }, x.cost + 3,
        x.reads + 2));
    return true;
  }
  // One division a row: the sum is at least 1 (or 0 for a safe row of -inf), so its reciprocal is exact to half an ulp.
  Tensor scale = map1(
      a.L, s, t,
      [](Body&, Val v) {
        Val inverse = v.lit(1) / v;
        return kind == Soft::Safe ? where(eq(v, v.lit(0)), v.lit(0), inverse) : inverse;
      },
      4);
  r.push_back(map2(a.L, e, a.L.expand(scale, x.sizes), out, [out](Body&, Val p, Val q) { return cast(p * q, compute_type(out)); }, 2));
  return true;
}

const OpRow kRows[] = {
    {"aten::native_layer_norm", 0, shape_layer_norm, lower<lower_layer_norm>},
    {"aten::rms_norm", 0, nullptr, lower<lower_rms_norm>},
    {"aten::_fused_rms_norm", 0, shape_rms_norm, lower<lower_rms_norm>},
    {"aten::_native_batch_norm_legit_no_training", 0, shape_batch_norm_no_training, lower<lower_batch_norm_no_training>},
    {"aten::native_batch_norm", 0, shape_native_batch_norm, lower<lower_batch_norm<false>>},
    {"aten::_native_batch_norm_legit_functional", 0, shape_batch_norm_functional, lower<lower_batch_norm<true>>},
    {"aten::_native_batch_norm_legit.no_stats", 0, shape_batch_norm_no_stats, lower<lower_batch_norm_no_stats>},
    {"aten::native_group_norm", 0, shape_group_norm, lower<lower_group_norm>},
    {"aten::_softmax", 0, shape_softmax, lower<lower_softmax<Soft::Plain>>},
    {"aten::_log_softmax", 0, shape_softmax, lower<lower_softmax<Soft::Log>>},
    {"aten::softmax.int", 0, nullptr, lower<lower_softmax<Soft::Plain>>},
    {"aten::log_softmax.int", 0, nullptr, lower<lower_softmax<Soft::Log>>},
    {"aten::_safe_softmax", 0, nullptr, lower<lower_softmax<Soft::Safe>>},
};

}  // namespace

std::span<const OpRow> norm_rows() { return kRows; }

}  // namespace vitrify::ops
