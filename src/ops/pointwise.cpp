// Elementwise arithmetic, mathematics, comparison, selection and conversion. Operands are computed in the type eager computes in; the node's result
// type is eager's decision already.
#include "ops/pointwise.h"

#include <array>
#include <cmath>
#include <limits>

#include "ir/faults.h"
#include "ir/views.h"
#include "ops/extern_shapes.h"
#include "ops/rules.h"

namespace vitrify::ops {
namespace {

using enum DType;

DType computed(const Args& a) { return compute_type(a.out().dtype); }

void done(std::vector<Tensor>& r, Tensor t) { r.push_back(std::move(t)); }

// --- one operand

// `edged`: of some numbers there is no result, and a half operand's missing rounding may be what makes it one of them.
template <LOp O, int cost, bool edged = false>
bool unary_float(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  if (!is_float(out.dtype)) return false;
  done(r, elementwise(a, {operand(a, 0, out.sizes)}, computed(a), out.dtype, out.sizes, cost, [](Body&, Val* v) { return unary(O, v[0]); }, edged));
  return true;
}

// Ops that keep integers; on integers the rounding ones are the identity.
template <LOp O, bool rounding = false>
bool unary_same(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  if (out.dtype == Bool && O != LOp::sign) return false;
  Tensor x = a.tensor(0);
  if (x.dtype == Bool || (rounding && is_int(x.dtype))) return x.dtype == out.dtype ? (done(r, x), true) : false;
  done(r, elementwise(
              a, {operand(a, 0, out.sizes)}, computed(a), out.dtype, out.sizes, 1, [](Body&, Val* v) { return unary(O, v[0]); },
              rounding || O == LOp::sign));
  return true;
}

bool lower_abs(const Args& a, std::vector<Tensor>& r) {
  if (a.tensor(0).dtype == U8) return done(r, a.tensor(0)), true;
  return unary_same<LOp::abs>(a, r);
}

template <class F>
bool unary_with(const Args& a, std::vector<Tensor>& r, int cost, F f, bool exact = false) {
  const auto& out = a.out();
  done(r, elementwise(a, {operand(a, 0, out.sizes)}, computed(a), out.dtype, out.sizes, cost, [f](Body& b, Val* v) { return f(b, v[0]); }, exact));
  return true;
}

bool lower_square(const Args& a, std::vector<Tensor>& r) {
  return a.out().dtype != Bool && unary_with(a, r, 1, [](Body&, Val x) { return x * x; });
}
bool lower_frac(const Args& a, std::vector<Tensor>& r) {
  return is_float(a.out().dtype) && unary_with(a, r, 2, [](Body&, Val x) { return x - unary(LOp::trunc, x); }, true);
}
template <bool to_rad>
bool lower_angle_unit(const Args& a, std::vector<Tensor>& r) {
  if (!is_float(a.out().dtype)) return false;
  const double k = to_rad ? M_PI / 180.0 : 180.0 / M_PI;
  return unary_with(a, r, 1, [k](Body&, Val x) { return x * k; });
}
// A number that eager's kernel converts to a half type before it computes.
Val rounded_to(Val number, DType out) { return is_float(out) && out != compute_type(out) ? number.body->op(LOp::cast, out, number) : number; }

bool lower_logit(const Args& a, std::vector<Tensor>& r) {
  if (!is_float(a.out().dtype)) return false;
  std::optional<double> eps;
  if (!a.none(1) && !(eps = a.scalar(1))) return false;
  const auto f = [eps, out = a.out().dtype](Body& b, Val x) {
    Val one = x.lit(1);
    if (eps && *eps >= 0) {
      Val lo = rounded_to(x.lit(*eps), out), hi = rounded_to(b.op(LOp::sub, x.type, one, lo), out);
      x = where(x < lo, lo, where(x > hi, hi, x));
    }
    return unary(LOp::log, x / (one - x));
  };
  return unary_with(a, r, 12, f, true);
}
bool lower_nan_to_num(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  if (!is_float(out.dtype)) return done(r, a.tensor(0)), true;
  const double top = largest(out.dtype);
  const double nan = a.none(1) ? 0 : a.scalar(1).value_or(0), hi = a.none(2) ? top : a.scalar(2).value_or(top),
               lo = a.none(3) ? -top : a.scalar(3).value_or(-top);
  const auto f = [=](Body& b, Val x) {
    const double inf = std::numeric_limits<double>::infinity();
    Val y = where(b.op(LOp::isnan, x.type, x), x.lit(nan), x);
    y = where(eq(x, x.lit(inf)), x.lit(hi), y);
    return where(eq(x, x.lit(-inf)), x.lit(lo), y);
  };
  return unary_with(a, r, 4, f, true);
}

// Predicates on the operand's own type.
template <class F>
bool predicate(const Args& a, std::vector<Tensor>& r, bool on_integers, F f) {
  Tensor x = a.tensor(0);
  if (!is_float(x.dtype)) return done(r, a.L.full(Bool, x.sizes, on_integers)), true;
  done(r, elementwise(a, {operand(a, 0, x.sizes)}, compute_type(x.dtype), Bool, x.sizes, 1, [f](Body& b, Val* v) { return f(b, v[0]); }));
  return true;
}
constexpr double kInf = std::numeric_limits<double>::infinity();
bool lower_isnan(const Args& a, std::vector<Tensor>& r) {
  return predicate(a, r, false, [](Body& b, Val x) { return b.op(LOp::isnan, x.type, x); });
}
bool lower_isinf(const Args& a, std::vector<Tensor>& r) {
  return predicate(a, r, false, [](Body& b, Val x) { return b.op(LOp::isinf, x.type, x); });
}
bool lower_isfinite(const Args& a, std::vector<Tensor>& r) {
  return predicate(a, r, true, [](Body&, Val x) { return unary(LOp::abs, x) < x.lit(kInf); });
}
bool lower_isposinf(const Args& a, std::vector<Tensor>& r) {
  return predicate(a, r, false, [](Body&, Val x) { return eq(x, x.lit(kInf)); });
}
bool lower_isneginf(const Args& a, std::vector<Tensor>& r) {
  return predicate(a, r, false, [](Body&, Val x) { return eq(x, x.lit(-kInf)); });
}
bool lower_logical_not(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (a.out().dtype != Bool) return false;
  done(r, elementwise(a, {operand(a, 0, x.sizes)}, compute_type(x.dtype), Bool, x.sizes, 1, [](Body&, Val* v) { return !logical(v[0]); }));
  return true;
}
bool lower_bitwise_not(const Args& a, std::vector<Tensor>& r) {
  return !is_float(a.out().dtype) && unary_with(a, r, 1, [](Body&, Val x) { return !x; });
}

// --- two operands

// What eager first rounds to a half common type: numbers and tensors of another type. Products and quotients take a second operand that is a scalar
// as it is: then `scalars` is false.
struct Promotion {
  DType common;
  bool rounds[2] = {};
  Promotion(const Args& a, DType to, bool scalars = true) : common(to) {
    for (size_t i : {0, 1}) {
      const bool scalar = !a.is_tensor(i) || (i == 1 && a.tensor(i).sizes.empty());
      rounds[i] = to != compute_type(to) && !(a.is_tensor(i) && a.tensor(i).dtype == to) && (scalars || !scalar);
    }
  }
  Val operator()(Body& b, Val* v, size_t i) const { return rounds[i] ? b.op(LOp::cast, common, v[i]) : v[i]; }
};

// `rounding` false: products and quotients.
template <bool rounding = true, class F>
bool binary_with(const Args& a, std::vector<Tensor>& r, int cost, F f, bool exact = false) {
  const auto& out = a.out();
  const DType t = computed(a);
  const Promotion p(a, out.dtype, rounding);
  for (size_t i : {0, 1})
    if (!a.is_tensor(i) && !number_fits(a.n.args[i], t)) return false;
  done(r, elementwise(
              a, {operand(a, 0, out.sizes), operand(a, 1, out.sizes)}, t, out.dtype, out.sizes, cost,
              [f, p](Body& b, Val* v) { return f(b, p(b, v, 0), p(b, v, 1)); }, exact));
  return true;
}

Val plus(Val x, Val y) { return x.type == Bool ? x | y : x + y; }
Val times(Val x, Val y) { return x.type == Bool ? x & y : x * y; }

// x + alpha * y; rsub swaps.
template <int sign, bool swap>
bool lower_add(const Args& a, std::vector<Tensor>& r) {
  const ir::Arg& alpha = a.n.args[2];
  const DType t = computed(a);
  if (!is_number(alpha) || !number_converts(alpha, a.out().dtype) || (sign < 0 && t == Bool)) return false;
  for (size_t i : {0, 1})  // eager refuses to subtract masks, and to subtract from them
    if (sign < 0 && (a.is_tensor(i) ? a.tensor(i).dtype == Bool : std::holds_alternative<bool>(a.n.args[i]))) return false;
  const bool plain = a.scalar(2) == 1.0;
  return binary_with(a, r, plain ? 1 : 2, [plain, alpha, t, out = a.out().dtype](Body& b, Val x, Val y) {
    if (swap) std::swap(x, y);
    if (plain) return sign > 0 ? plus(x, y) : x - y;
    if (t == Bool) return plus(x, times(y, number(b, alpha, t)));
    const Val factor = rounded_to(number(b, alpha, t), out);
    return fma(y, sign > 0 ? factor : -factor, x);
  });
}
bool lower_mul(const Args& a, std::vector<Tensor>& r) {
  return binary_with<false>(a, r, 1, [](Body&, Val x, Val y) { return times(x, y); });
}
bool lower_div(const Args& a, std::vector<Tensor>& r) {
  return is_float(a.out().dtype) && binary_with<false>(a, r, 2, [](Body&, Val x, Val y) { return x / y; }, true);
}
bool lower_floor_divide(const Args& a, std::vector<Tensor>& r) {
  return a.out().dtype != Bool && binary_with<false>(a, r, 6, [](Body&, Val x, Val y) { return binary(LOp::floordiv, x, y); }, true);
}
bool lower_div_mode(const Args& a, std::vector<Tensor>& r) {
  if (a.none(2)) return lower_div(a, r);
  if (a.string(2) == "floor") return lower_floor_divide(a, r);
  if (a.string(2) != "trunc" || a.out().dtype == Bool) return false;
  const DType out = a.out().dtype;
  const bool one = !a.is_tensor(1) || a.tensor(1).sizes.empty();
  return binary_with<false>(
      a, r, 4,
      [out, one](Body& b, Val x, Val y) {
        Val q = x / y;
        if (out != compute_type(out) && !one) q = b.op(LOp::cast, out, q);  // eager truncates the rounded quotient
        return is_float(out) ? unary(LOp::trunc, q) : q;
      },
      true);
}
bool lower_remainder(const Args& a, std::vector<Tensor>& r) {
  return a.out().dtype != Bool && binary_with(a, r, 8, [](Body&, Val x, Val y) { return binary(LOp::remainder, x, y); }, true);
}
bool lower_fmod(const Args& a, std::vector<Tensor>& r) {
  if (a.out().dtype == Bool) return false;
  // On integers through the division, which faults on zero as eager does.
  return binary_with(a, r, 8, [](Body&, Val x, Val y) { return is_float(x.type) ? binary(LOp::fmod, x, y) : x - (x / y) * y; }, true);
}

Val integer_power(Val x, int64_t n) {
  Val acc = x.body->constant_int(x.type, 1);
  for (; n > 0; n >>= 1) {
    if (n & 1) acc = acc * x;
    if (n > 1) x = x * x;
  }
  return acc;
}
bool lower_pow_scalar(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  const DType t = computed(a);
  auto e = a.scalar(1);
  if (!e || out.dtype == Bool || !number_converts(a.n.args[1], out.dtype)) return false;
  if (!is_float(t)) {
    if (*e < 0 || *e != std::trunc(*e) || *e > 1e6) return false;
    return unary_with(a, r, 2, [n = static_cast<int64_t>(*e)](Body&, Val x) { return integer_power(x, n); });
  }
  if (*e == 0) return done(r, a.L.full(out.dtype, out.sizes, 1)), true;
  // Of integers eager takes the exponent in double precision, in which it is not zero.
  if (!is_float(a.tensor(0).dtype) && static_cast<float>(*e) == 0) return false;
  const int cost = std::abs(*e) <= 3 ? 3 : 30;
  const bool roots = out.dtype != DType::F16;  // eager takes sqrt for 0.5 except in f16, and pow differs at -inf and -0
  const auto power = [e = *e, roots, type = out.dtype](Body&, Val x) {
    if (e == 1) return x;
    if (e == 2) return x * x;
    if (e == 3) return x * x * x;
    if (e == 0.5 && roots) return unary(LOp::sqrt, x);
    if (e == -0.5 && roots) return unary(LOp::rsqrt, x);
    if (e == -1) return x.lit(1) / x;
    if (e == -2) return x.lit(1) / (x * x);
    return binary(LOp::pow, x, rounded_to(x.lit(e), type));
  };
  return unary_with(a, r, cost, power, *e < 0 || *e != std::trunc(*e));
}
template <LOp O, int cost>
bool binary_float(const Args& a, std::vector<Tensor>& r) {
  return is_float(a.out().dtype) &&
         binary_with(a, r, cost, [](Body&, Val x, Val y) { return binary(O, x, y); }, O == LOp::nextafter || O == LOp::pow);
}
bool lower_nextafter(const Args& a, std::vector<Tensor>& r) {  // half types step in their own grid
  return a.out().dtype == computed(a) && binary_float<LOp::nextafter, 6>(a, r);
}
template <bool is_max, bool propagate>
bool lower_minmax(const Args& a, std::vector<Tensor>& r) {
  return binary_with(a, r, 1, [](Body&, Val x, Val y) {
    if (x.type == Bool) return is_max ? x | y : x & y;
    if (!is_float(x.type) || propagate) return binary(is_max ? LOp::max : LOp::min, x, y);
    return binary(is_max ? LOp::fmax : LOp::fmin, x, y);
  });
}
bool lower_xlogy(const Args& a, std::vector<Tensor>& r) {
  if (!is_float(a.out().dtype)) return false;
  const auto f = [](Body& b, Val x, Val y) {
    Val v = where(eq(x, x.lit(0)), x.lit(0), x * unary(LOp::log, y));
    return where(b.op(LOp::isnan, y.type, y), y, v);
  };
  return binary_with(a, r, 14, f, true);
}
bool lower_logaddexp(const Args& a, std::vector<Tensor>& r) {
  if (!is_float(a.out().dtype)) return false;
  return binary_with(a, r, 24, [](Body& b, Val x, Val y) {
    Val m = binary(LOp::max, x, y);
    Val v = m + unary(LOp::log1p, unary(LOp::exp, -unary(LOp::abs, x - y)));
    return where(b.op(LOp::isinf, x.type, x) & eq(x, y), x, v);
  });
}
bool lower_heaviside(const Args& a, std::vector<Tensor>& r) {
  if (a.out().dtype == Bool || a.tensor(0).dtype != a.tensor(1).dtype) return false;  // eager raises for unlike types
  return binary_with(a, r, 2, [](Body&, Val x, Val y) { return where(eq(x, x.lit(0)), y, where(x > x.lit(0), x.lit(1), x.lit(0))); }, true);
}

// Comparisons and logical ops happen in the promoted type of the operands, numbers rounded to it as eager rounds them.
template <LOp O>
bool lower_compare(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  const DType common = result_type({&a.n.args[0], &a.n.args[1]});
  if (!is_native(common) || out.dtype != Bool) return false;
  for (size_t i : {0, 1})
    if (!a.is_tensor(i) && !number_fits(a.n.args[i], common)) return false;
  const DType t = compute_type(common);
  const Promotion p(a, common);
  done(r, elementwise(a, {operand(a, 0, out.sizes), operand(a, 1, out.sizes)}, t, Bool, out.sizes, 1,
                      [p](Body& b, Val* v) { return binary(O, p(b, v, 0), p(b, v, 1)); }));
  return true;
}

template <LOp O>
bool lower_logical(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  const DType common = result_type({&a.n.args[0], &a.n.args[1]});
  if (!is_native(common) || out.dtype != Bool) return false;
  const Promotion p(a, common);
  done(r, elementwise(a, {operand(a, 0, out.sizes), operand(a, 1, out.sizes)}, compute_type(common), Bool, out.sizes, 1,
                      [p](Body& b, Val* v) { return b.op(O, Bool, logical(p(b, v, 0)), logical(p(b, v, 1))); }));
  return true;
}
template <LOp O>
bool lower_bitwise(const Args& a, std::vector<Tensor>& r) {
  return !is_float(a.out().dtype) && binary_with(a, r, 1, [](Body&, Val x, Val y) { return binary(O, x, y); });
}
template <LOp O>
bool lower_shift(const Args& a, std::vector<Tensor>& r) {
  return is_int(a.out().dtype) && lower_bitwise<O>(a, r);
}

// --- three operands and selection

bool lower_where(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  const DType t = computed(a);
  Tensor c = broadcast(a.L, a.tensor(0), out.sizes);
  Operand x = operand(a, 1, out.sizes), y = operand(a, 2, out.sizes);
  for (size_t i : {1, 2})
    if (!a.is_tensor(i) && !number_fits(a.n.args[i], t)) return false;
  int cost = c.cost + 1, reads = c.reads;
  for (auto* o : {&x, &y})
    if (o->tensor) cost += o->tensor.cost, reads += o->tensor.reads;
  done(r,
       a.L.map(out.dtype, out.sizes, [=](Body& b, const Index& i) { return where(logical(c.at(b, i)), x.at(b, i, t), y.at(b, i, t)); }, cost, reads));
  return true;
}
// Whether any number of the one type is in the range of the other.
bool holds_all(DType type, DType of) {
  if (type == of || of == Bool) return true;
  if (is_float(type)) return is_float(of) ? largest(of) <= largest(type) : type != F16 || size_of(of) <= 2;
  return type == Bool || (is_int(of) && size_of(type) > size_of(of));
}
bool lower_masked_fill(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  const DType t = computed(a);
  if (!a.is_tensor(2) && !number_converts(a.n.args[2], out.dtype)) return false;
  if (a.is_tensor(2) && !holds_all(out.dtype, a.tensor(2).dtype)) return false;  // eager refuses what does not fit
  Tensor m = broadcast(a.L, a.tensor(1), out.sizes);
  Operand x = operand(a, 0, out.sizes), v = operand(a, 2, out.sizes);
  done(r, a.L.map(
              out.dtype, out.sizes, [=](Body& b, const Index& i) { return where(logical(m.at(b, i)), v.at(b, i, t), x.at(b, i, t)); },
              m.cost + x.tensor.cost + 1, m.reads + x.tensor.reads));
  return true;
}

bool is_nan(const ir::Arg& a) {
  auto* d = std::get_if<double>(&a);
  return d && std::isnan(*d);
}

// clamp(x, lo?, hi?), with numbers or tensors.
bool lower_clamp(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  const DType t = computed(a);
  auto given = [&](size_t i) { return i < a.n.args.size() && !a.none(i) && (a.is_tensor(i) || is_number(a.n.args[i])); };
  const bool lo = given(1), hi = given(2);
  if ((!lo && !hi) || t == Bool || (lo && is_nan(a.n.args[1])) || (hi && is_nan(a.n.args[2])))
    return false;  // versions of ATen's differ in what no number bounds
  for (size_t i : {1, 2})
    if (given(i) && !a.is_tensor(i) && !number_converts(a.n.args[i], out.dtype)) return false;
  Operand x = operand(a, 0, out.sizes), l = lo ? operand(a, 1, out.sizes) : Operand{}, h = hi ? operand(a, 2, out.sizes) : Operand{};
  int cost = 2 + x.tensor.cost, reads = x.tensor.reads;
  for (auto* o : {&l, &h})
    if (o->tensor) cost += o->tensor.cost, reads += o->tensor.reads;
  done(r, a.L.map(
              out.dtype, out.sizes,
              [=](Body& b, const Index& i) {
                Val v = x.at(b, i, t);
                if (lo) v = binary(LOp::max, v, l.at(b, i, t));
                if (hi) v = binary(LOp::min, v, h.at(b, i, t));
                return v;
              },
              cost, reads));
  return true;
}
template <LOp O>
bool lower_clamp_one(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  if (!a.is_tensor(1) && !number_converts(a.n.args[1], out.dtype)) return false;
  if (is_nan(a.n.args[1])) return done(r, a.L.full(out.dtype, out.sizes, std::numeric_limits<double>::quiet_NaN())), true;
  return out.dtype != Bool && binary_with(a, r, 1, [](Body&, Val x, Val y) { return binary(O, x, y); });
}

bool lower_lerp(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  if (!is_float(out.dtype)) return false;
  const bool rounds = a.is_tensor(2) && a.tensor(2).dtype != out.dtype;  // a weight that is no number is converted
  done(r, elementwise(a, {operand(a, 0, out.sizes), operand(a, 1, out.sizes), operand(a, 2, out.sizes)}, computed(a), out.dtype, out.sizes, 4,
                      [rounds, type = out.dtype](Body& b, Val* v) {
                        Val x = v[0], y = v[1], w = rounds ? b.op(LOp::cast, type, v[2]) : v[2], d = y - x;
                        // the sign of a zero: end - d * (1 - w)
                        return where(unary(LOp::abs, w) < w.lit(0.5), fma(w, d, x), fma(w.lit(1) - w, -d, y));
                      }));
  return true;
}
template <bool divide>
bool lower_addc(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  const DType t = computed(a);
  const ir::Arg& value = a.n.args[3];
  if (t == Bool || !is_number(value) || !number_fits(value, t) || (divide && !is_float(t))) return false;
  const bool plain = a.scalar(3) == 1.0;
  std::array<bool, 3> rounds{};  // what eager first converts to a half type
  for (size_t i : {0, 1, 2}) rounds[i] = t != out.dtype && a.tensor(i).dtype != out.dtype;
  done(r, elementwise(
              a, {operand(a, 0, out.sizes), operand(a, 1, out.sizes), operand(a, 2, out.sizes)}, t, out.dtype, out.sizes, 4,
              [=](Body& b, Val* v) {
                for (size_t i : {0, 1, 2})
                  if (rounds[i]) v[i] = b.op(LOp::cast, out.dtype, v[i]);
                Val x = v[1];
                if (!plain) x = number(b, value, t) * x;
                return divide ? v[0] + x / v[2] : fma(x, v[2], v[0]);
              },
              divide));
  return true;
}

// --- copies and conversions

bool lower_identity(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (x.dtype != a.out().dtype) return false;
  return done(r, x), true;
}
Tensor converted(Lowering& L, const Tensor& x, DType to) {
  if (x.dtype == to) return x;
  return map1(L, x, to, [x, to](Body& b, Val v) {
    v = cast(stored(x, v), compute_type(to));
    return to == compute_type(to) ? v : b.op(LOp::cast, to, v);
  });
}
bool lower_convert(const Args& a, std::vector<Tensor>& r) { return done(r, converted(a.L, a.tensor(0), a.out().dtype)), true; }
bool lower_copy(const Args& a, std::vector<Tensor>& r) {
  return done(r, converted(a.L, broadcast(a.L, a.tensor(1), a.out().sizes), a.out().dtype)), true;
}

// --- shapes

using P = PointwiseDType;
template <P rule, int tensors>
Shape shape_of(sym::Context& ctx, ArgSpan args) {
  return pointwise_shape(ctx, args, rule, tensors);
}

// Eager refuses some kinds of alpha.
bool takes_alpha(const Shape& r, ArgSpan args) {
  if (!r || args.size() < 3) return true;
  const DType t = (*r)[0].dtype;
  return std::holds_alternative<bool>(args[2]) ? t == Bool : !std::holds_alternative<double>(args[2]) || is_float(t);
}
Shape shape_add(sym::Context& ctx, ArgSpan args) {
  auto r = pointwise_shape(ctx, args, P::Promote, 2);
  return takes_alpha(r, args) ? r : Shape();
}

constexpr ShapeFn same1 = shape_of<P::Same, 1>, not_bool = shape_of<P::NotBool, 1>, float1 = shape_of<P::Float, 1>, bool1 = shape_of<P::Bool, 1>;
constexpr ShapeFn same2 = shape_of<P::Promote, 2>, float2 = shape_of<P::Float, 2>, bool2 = shape_of<P::Bool, 2>;

// Eager multiplies into an empty_like of its argument.
Shape shape_angle_unit(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto r = float1(ctx, args);
  if (x && r) (*r)[0].strides = preserved_strides(ctx, *x);
  return r;
}
// Eager subtracts the first operand from the second, which thereby leads where they lie otherwise.
Shape shape_rsub(sym::Context& ctx, ArgSpan args) {
  if (args.size() < 2) return {};
  const ir::Arg both[] = {args[1], args[0]};
  auto r = pointwise_shape(ctx, both, P::Promote, 2);
  return takes_alpha(r, args) ? r : Shape();
}
// A comparison of x with itself times another: the iterator that makes the result goes over results, not over x.
Shape shape_isfinite(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto r = bool1(ctx, args);
  if (!x || !r) return {};
  if (!is_float(x->dtype) && !is_complex(x->dtype)) {
    (*r)[0].strides = preserved_strides(ctx, *x);  // ones_like
    return r;
  }
  const TensorType* both[] = {&(*r)[0], &(*r)[0]};
  return one(elementwise_type(ctx, both, Bool));
}
Shape shape_where(sym::Context& ctx, ArgSpan args) {
  const TensorType *c = tensor_arg(args, 0), *x = tensor_arg(args, 1), *y = tensor_arg(args, 2);
  if (!c || !x || !y || (c->dtype != Bool && c->dtype != U8)) return {};
  const DType t = result_type({&args[1], &args[2]});
  if (t == Opaque) return {};
  std::vector<TensorType> sides{*x, *y};
  for (auto& s : sides)
    if (s.dtype != t && !s.sizes.empty()) s.strides = preserved_strides(ctx, s), s.dtype = t;
  const TensorType* ops[] = {c, &sides[0], &sides[1]};
  return one(elementwise_type(ctx, ops, t));
}
// clamp.Tensor: either bound may be missing.
Shape shape_clamp_tensor(sym::Context& ctx, ArgSpan args) {
  std::vector<ir::Arg> given;
  for (auto& a : args)
    if (has_value(a)) given.push_back(a);
  if (given.size() < 2 || !has_value(args[0])) return {};
  return pointwise_shape(ctx, given, P::Promote, static_cast<int>(given.size()));
}
Shape shape_masked_fill(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *m = tensor_arg(args, 1), *v = tensor_arg(args, 2);
  if (!x || !m || m->dtype != Bool || (v && (!v->sizes.empty() || is_complex(v->dtype)))) return {};
  if (!v && !is_number(args[2])) return {};
  if (std::holds_alternative<double>(args[2]) && !is_float(x->dtype) && !is_complex(x->dtype)) return {};
  Dims sizes;
  if (!broadcast_sizes(ctx, x->sizes, m->sizes, sizes)) return {};
  return masked_fill_shape(ctx, *x, sizes);
}
Shape shape_preserved(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x) return {};
  TensorType t = *x;
  t.wrapped_number = false;
  t.strides = preserved_strides(ctx, *x);
  return one(t);
}
Shape shape_row_major(sym::Context& ctx, ArgSpan args) {  // what stands for a view, without one
  const TensorType* x = tensor_arg(args, 0);
  return x ? formatted_shape(ctx, *x, ir::MemoryFormat::Contiguous) : Shape();
}
Shape shape_clone(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x) return {};
  auto* f = args.size() > 1 ? std::get_if<ir::MemoryFormat>(&args[1]) : nullptr;
  return formatted_shape(ctx, *x, f ? *f : ir::MemoryFormat::Preserve);
}
Shape shape_to_copy(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || args.size() < 7) return {};
  TensorType t = *x;
  t.wrapped_number = false;
  if (auto* d = std::get_if<DType>(&args[1])) t.dtype = *d, t.opaque_scalar_type = 0;
  if (auto* d = std::get_if<Device>(&args[3])) t.device = *d;
  if (t.dtype == Opaque) return {};
  auto* f = std::get_if<ir::MemoryFormat>(&args[6]);
  return formatted_shape(ctx, t, f ? *f : ir::MemoryFormat::Preserve);
}
Shape shape_as_self(sym::Context& ctx, ArgSpan args) {  // aten::copy: clone of self, then written
  return shape_preserved(ctx, args);
}

// A number to the power of a tensor: always row-major.
Shape shape_pow_scalar_base(sym::Context& ctx, ArgSpan args) {
  auto r = pointwise_shape(ctx, args, P::Promote, 2);
  if (r) (*r)[0].strides = ir::contiguous_strides((*r)[0].sizes);
  return r;
}

// In ATen every binary op has a family of overloads; they differ only in which operand is a number.
#define VT_UNARY_FLOAT(name, op, cost) {"aten::" #name, 0, float1, lower<unary_float<LOp::op, cost>>}
#define VT_UNARY_EDGED(name, op, cost) {"aten::" #name, 0, float1, lower<unary_float<LOp::op, cost, true>>}
#define VT_COMPARE(name) \
  {"aten::" #name ".Tensor", 0, bool2, lower<lower_compare<LOp::name>>}, { "aten::" #name ".Scalar", 0, bool2, lower<lower_compare<LOp::name>> }
#define VT_BITWISE(name, fn)                                                                        \
  {"aten::" name ".Tensor", 0, same2, lower<fn>}, {"aten::" name ".Scalar", 0, same2, lower<fn>}, { \
    "aten::" name ".Scalar_Tensor", 0, same2, lower<fn>                                             \
  }

const OpRow kRows[] = {
    VT_UNARY_FLOAT(exp, exp, 10),
    VT_UNARY_FLOAT(exp2, exp2, 10),
    VT_UNARY_FLOAT(expm1, expm1, 12),
    VT_UNARY_EDGED(log, log, 12),
    VT_UNARY_EDGED(log2, log2, 12),
    VT_UNARY_EDGED(log10, log10, 12),
    VT_UNARY_EDGED(log1p, log1p, 14),
    VT_UNARY_FLOAT(sin, sin, 14),
    VT_UNARY_FLOAT(cos, cos, 14),
    VT_UNARY_FLOAT(tan, tan, 20),
    VT_UNARY_EDGED(asin, asin, 16),
    VT_UNARY_EDGED(acos, acos, 16),
    VT_UNARY_FLOAT(atan, atan, 16),
    VT_UNARY_FLOAT(sinh, sinh, 16),
    VT_UNARY_FLOAT(cosh, cosh, 16),
    VT_UNARY_FLOAT(tanh, tanh, 12),
    VT_UNARY_FLOAT(asinh, asinh, 20),
    VT_UNARY_EDGED(acosh, acosh, 20),
    VT_UNARY_EDGED(atanh, atanh, 20),
    VT_UNARY_FLOAT(erf, erf, 14),
    VT_UNARY_FLOAT(erfc, erfc, 16),
    VT_UNARY_EDGED(erfinv, erfinv, 20),
    VT_UNARY_FLOAT(lgamma, lgamma, 30),
    VT_UNARY_FLOAT(sigmoid, sigmoid, 12),
    VT_UNARY_EDGED(sqrt, sqrt, 2),
    VT_UNARY_EDGED(rsqrt, rsqrt, 3),
    VT_UNARY_EDGED(reciprocal, reciprocal, 2),
    VT_UNARY_FLOAT(special_erf, erf, 14),
    VT_UNARY_FLOAT(special_expm1, expm1, 12),
    VT_UNARY_FLOAT(special_exp2, exp2, 10),
    {"aten::neg", 0, complex_or<not_bool, 1>, lower<unary_same<LOp::neg>>},
    {"aten::abs", 0, magnitude_or<not_bool>, lower<lower_abs>},
    {"aten::sign", 0, same1, lower<unary_same<LOp::sign>>},
    {"aten::sgn", 0, complex_or<same1, 1>, lower<unary_same<LOp::sign>>},
    {"aten::floor", 0, not_bool, lower<unary_same<LOp::floor, true>>},
    {"aten::ceil", 0, not_bool, lower<unary_same<LOp::ceil, true>>},
    {"aten::round", 0, not_bool, lower<unary_same<LOp::round, true>>},
    {"aten::trunc", 0, not_bool, lower<unary_same<LOp::trunc, true>>},
    {"aten::square", 0, nullptr, lower<lower_square>},
    {"aten::frac", 0, shape_of<P::FloatOnly, 1>, lower<lower_frac>},
    {"aten::deg2rad", 0, shape_angle_unit, lower<lower_angle_unit<true>>},
    {"aten::rad2deg", 0, shape_angle_unit, lower<lower_angle_unit<false>>},
    {"aten::logit", 0, float1, lower<lower_logit>},
    {"aten::nan_to_num", 0, shape_preserved, lower<lower_nan_to_num>},
    {"aten::isnan", 0, bool1, lower<lower_isnan>},
    {"aten::isinf", 0, bool1, lower<lower_isinf>},
    {"aten::isfinite", 0, shape_isfinite, lower<lower_isfinite>},
    {"aten::isposinf", 0, bool1, lower<lower_isposinf>},
    {"aten::isneginf", 0, bool1, lower<lower_isneginf>},
    {"aten::logical_not", 0, bool1, lower<lower_logical_not>},
    {"aten::bitwise_not", 0, same1, lower<lower_bitwise_not>},

    {"aten::add.Tensor", 0, complex_or<shape_add>, lower<lower_add<1, false>>},
    {"aten::add.Scalar", 0, complex_or<shape_add>, lower<lower_add<1, false>>},
    {"aten::sub.Tensor", 0, complex_or<shape_add>, lower<lower_add<-1, false>>},
    {"aten::sub.Scalar", 0, complex_or<shape_add>, lower<lower_add<-1, false>>},
    {"aten::rsub.Tensor", 0, shape_rsub, lower<lower_add<-1, true>>},
    {"aten::rsub.Scalar", 0, shape_add, lower<lower_add<-1, true>>},
    {"aten::mul.Tensor", 0, complex_or<same2>, lower<lower_mul>},
    {"aten::mul.Scalar", 0, complex_or<same2>, lower<lower_mul>},
    {"aten::div.Tensor", 0, complex_or<float2>, lower<lower_div>},
    {"aten::div.Scalar", 0, complex_or<float2>, lower<lower_div>},
    {"aten::true_divide.Tensor", 0, float2, lower<lower_div>},
    {"aten::div.Tensor_mode", ir::kDivides, shape_of<P::DivMode, 2>, lower<lower_div_mode>},
    {"aten::div.Scalar_mode", ir::kDivides, shape_of<P::DivMode, 2>, lower<lower_div_mode>},
    {"aten::floor_divide", ir::kDivides, same2, lower<lower_floor_divide>},
    {"aten::floor_divide.Scalar", ir::kDivides, same2, lower<lower_floor_divide>},
    {"aten::remainder.Tensor", ir::kDivides, same2, lower<lower_remainder>},
    {"aten::remainder.Scalar", ir::kDivides, same2, lower<lower_remainder>},
    {"aten::remainder.Scalar_Tensor", ir::kDivides, same2, lower<lower_remainder>},
    {"aten::fmod.Tensor", ir::kDivides, same2, lower<lower_fmod>},
    {"aten::fmod.Scalar", ir::kDivides, same2, lower<lower_fmod>},
    {"aten::pow.Tensor_Scalar", 0, shape_of<P::Clamp, 1>, lower<lower_pow_scalar>},
    {"aten::pow.Tensor_Tensor", 0, same2, lower<binary_float<LOp::pow, 30>>},
    {"aten::pow.Scalar", 0, shape_pow_scalar_base, lower<binary_float<LOp::pow, 30>>},
    {"aten::atan2", 0, float2, lower<binary_float<LOp::atan2, 20>>},
    {"aten::hypot", 0, same2, lower<binary_float<LOp::hypot, 8>>},
    {"aten::copysign.Tensor", 0, float2, lower<binary_float<LOp::copysign, 1>>},
    {"aten::copysign.Scalar", 0, float2, lower<binary_float<LOp::copysign, 1>>},
    {"aten::nextafter", 0, same2, lower<lower_nextafter>},
    {"aten::maximum", 0, same2, lower<lower_minmax<true, true>>},
    {"aten::minimum", 0, same2, lower<lower_minmax<false, true>>},
    {"aten::max.other", 0, same2, lower<lower_minmax<true, true>>},
    {"aten::min.other", 0, same2, lower<lower_minmax<false, true>>},
    {"aten::fmax", 0, same2, lower<lower_minmax<true, false>>},
    {"aten::fmin", 0, same2, lower<lower_minmax<false, false>>},
    {"aten::xlogy.Tensor", 0, float2, lower<lower_xlogy>},
    {"aten::xlogy.Scalar_Self", 0, float2, lower<lower_xlogy>},
    {"aten::xlogy.Scalar_Other", 0, float2, lower<lower_xlogy>},
    {"aten::logaddexp", 0, same2, lower<lower_logaddexp>},
    {"aten::heaviside", 0, shape_of<P::Same, 2>, lower<lower_heaviside>},
    VT_COMPARE(eq),
    VT_COMPARE(ne),
    VT_COMPARE(lt),
    VT_COMPARE(le),
    VT_COMPARE(gt),
    VT_COMPARE(ge),
    {"aten::logical_and", 0, bool2, lower<lower_logical<LOp::and_>>},
    {"aten::logical_or", 0, bool2, lower<lower_logical<LOp::or_>>},
    {"aten::logical_xor", 0, bool2, lower<lower_logical<LOp::xor_>>},
    VT_BITWISE("bitwise_and", lower_bitwise<LOp::and_>),
    VT_BITWISE("bitwise_or", lower_bitwise<LOp::or_>),
    VT_BITWISE("bitwise_xor", lower_bitwise<LOp::xor_>),
    {"aten::bitwise_left_shift.Tensor", 0, same2, lower<lower_shift<LOp::shl>>},
    {"aten::bitwise_left_shift.Tensor_Scalar", 0, same2, lower<lower_shift<LOp::shl>>},
    {"aten::bitwise_right_shift.Tensor", 0, same2, lower<lower_shift<LOp::shr>>},
    {"aten::bitwise_right_shift.Tensor_Scalar", 0, same2, lower<lower_shift<LOp::shr>>},
    {"aten::__lshift__.Scalar", 0, nullptr, lower<lower_shift<LOp::shl>>},
    {"aten::__lshift__.Tensor", 0, nullptr, lower<lower_shift<LOp::shl>>},
    {"aten::__rshift__.Scalar", 0, nullptr, lower<lower_shift<LOp::shr>>},
    {"aten::__rshift__.Tensor", 0, nullptr, lower<lower_shift<LOp::shr>>},
    {"aten::where.self", 0, shape_where, lower<lower_where>},
    {"aten::masked_fill.Scalar", 0, shape_masked_fill, lower<lower_masked_fill>},
    {"aten::masked_fill.Tensor", ir::kNarrows, shape_masked_fill, lower<lower_masked_fill>},
    {"aten::clamp", 0, shape_of<P::Clamp, 1>, lower<lower_clamp>},
    {"aten::clamp.Tensor", 0, shape_clamp_tensor, lower<lower_clamp>},
    {"aten::clamp_min", 0, shape_of<P::Clamp, 1>, lower<lower_clamp_one<LOp::max>>},
    {"aten::clamp_max", 0, shape_of<P::Clamp, 1>, lower<lower_clamp_one<LOp::min>>},
    {"aten::clamp_min.Tensor", 0, same2, lower<lower_clamp_one<LOp::max>>},
    {"aten::clamp_max.Tensor", 0, same2, lower<lower_clamp_one<LOp::min>>},
    {"aten::lerp.Scalar", 0, shape_of<P::Same, 2>, lower<lower_lerp>},
    {"aten::lerp.Tensor", 0, shape_of<P::Same, 3>, lower<lower_lerp>},
    {"aten::addcmul", 0, shape_of<P::Promote, 3>, lower<lower_addc<false>>},
    {"aten::addcdiv", 0, shape_of<P::Addcdiv, 3>, lower<lower_addc<true>>},

    {"aten::clone", 0, shape_clone, lower<lower_identity>},
    {"aten::alias", ir::kView, nullptr, lower<lower_identity>},
    {"aten::detach", ir::kView, nullptr, lower<lower_identity>},
    {"aten::positive", ir::kView, nullptr, lower<lower_identity>},
    {"aten::_neg_view", ir::kView | ir::kMakesBits, nullptr, lower<unary_same<LOp::neg>>},  // a value is what its tensor reads as: bits are resolved
    {"aten::contiguous", 0, nullptr, lower<lower_identity>},
    {"aten::lift_fresh", ir::kView, nullptr, lower<lower_identity>},
    {"aten::lift_fresh_copy", 0, shape_row_major, lower<lower_identity>},
    {"aten::alias_copy", 0, shape_row_major, lower<lower_identity>},
    {"aten::detach_copy", 0, shape_row_major, lower<lower_identity>},
    {"aten::_to_copy", 0, shape_to_copy, lower<lower_convert>},
    {"aten::to.dtype", 0, nullptr, lower<lower_convert>},
    {"aten::copy", 0, shape_as_self, lower<lower_copy>},
};

}  // namespace

std::span<const OpRow> pointwise_rows() { return kRows; }

}  // namespace vitrify::ops
