#include "codegen/interp/value.h"

#include <math.h>

#include <cstring>
#include <limits>

namespace vitrify::codegen::interp {

using loop::Op;

namespace {
template <class T>
T read(const void* p, int64_t i) {
  T v;
  memcpy(&v, static_cast<const char*>(p) + i * int64_t(sizeof(T)), sizeof v);
  return v;
}
template <class T>
void write(void* p, int64_t i, T v) {
  memcpy(static_cast<char*>(p) + i * int64_t(sizeof(T)), &v, sizeof v);
}
template <class To, class From>
To bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  memcpy(&r, &v, sizeof r);
  return r;
}
bool is_unsigned(DType t) { return t == DType::U8 || t == DType::Bool; }
}  // namespace

float bfloat_to_float(uint16_t h) { return bits<float>(uint32_t(h) << 16); }

uint16_t float_to_bfloat(float f) {
  if (f != f) return 0x7fc0;
  uint32_t u = bits<uint32_t>(f);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

float half_to_float(uint16_t h) {
  int exponent = (h >> 10) & 31, mantissa = h & 1023;
  double v = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
  return float(copysign(v, h & 0x8000 ? -1.0 : 1.0));
}

uint16_t float_to_half(float f) {
  uint16_t sign = signbit(f) ? 0x8000 : 0;
  if (f != f) return sign | 0x7e00;
  double a = fabs(double(f));
  if (a >= 65520) return sign | 0x7c00;
  if (a < ldexp(1.0, -14)) return sign | uint16_t(nearbyint(ldexp(a, 24)));
  int e;
  frexp(a, &e);                              // a = m * 2^e, m in [0.5, 1)
  int m = int(nearbyint(ldexp(a, 11 - e)));  // 1024..2048
  return sign | uint16_t(((e + 14) << 10) + (m - 1024));
}

Scalar load(const void* p, int64_t i, DType t) {
  Scalar s;
  switch (t) {
    case DType::Bool:
      s.i = read<uint8_t>(p, i) != 0;
      break;
    case DType::U8:
      s.i = read<uint8_t>(p, i);
      break;
    case DType::I8:
      s.i = read<int8_t>(p, i);
      break;
    case DType::I16:
      s.i = read<int16_t>(p, i);
      break;
    case DType::I32:
      s.i = read<int32_t>(p, i);
      break;
    case DType::I64:
      s.i = read<int64_t>(p, i);
      break;
    case DType::F16:
      s.f = half_to_float(read<uint16_t>(p, i));
      break;
    case DType::BF16:
      s.f = bfloat_to_float(read<uint16_t>(p, i));
      break;
    case DType::F32:
      s.f = read<float>(p, i);
      break;
    case DType::F64:
      s.f = read<double>(p, i);
      break;
    default:
      VT_UNREACHABLE("{}", to_string(t));
  }
  return s;
}

void store(void* p, int64_t i, DType t, Scalar s) {
  switch (t) {
    case DType::Bool:
      return write<uint8_t>(p, i, s.i != 0);
    case DType::U8:
    case DType::I8:
      return write<int8_t>(p, i, int8_t(s.i));
    case DType::I16:
      return write<int16_t>(p, i, int16_t(s.i));
    case DType::I32:
      return write<int32_t>(p, i, int32_t(s.i));
    case DType::I64:
      return write<int64_t>(p, i, s.i);
    case DType::F16:
      return write<uint16_t>(p, i, float_to_half(float(s.f)));
    case DType::BF16:
      return write<uint16_t>(p, i, float_to_bfloat(float(s.f)));
    case DType::F32:
      return write<float>(p, i, float(s.f));
    case DType::F64:
      return write<double>(p, i, s.f);
    default:
      VT_UNREACHABLE("{}", to_string(t));
  }
}

Scalar wrap(Scalar s, DType t) {
  switch (t) {
    case DType::Bool:
      s.i = s.i != 0;
      break;
    case DType::U8:
      s.i = uint8_t(s.i);
      break;
    case DType::I8:
      s.i = int8_t(s.i);
      break;
    case DType::I16:
      s.i = int16_t(s.i);
      break;
    case DType::I32:
      s.i = int32_t(s.i);
      break;
    case DType::F32:
      s.f = float(s.f);
      break;
    default:
      break;
  }
  return s;
}

Scalar cast(Scalar s, DType from, DType to) {
  DType target = compute_type(to);
  Scalar r;
  if (is_float(from) && is_float(target)) {
    r.f = target == DType::F32 ? double(float(s.f)) : s.f;
  } else if (is_float(from)) {
    if (target == DType::Bool) {
      r.i = s.f != 0;
      return r;
    }
    // what cvttss2si does: the minimum when out of range; narrow results take the low bits
    bool wide = target == DType::I64 || target == DType::U8;
    double limit = wide ? 9223372036854775808.0 : 2147483648.0, v = ::trunc(s.f);
    r.i = v >= -limit && v < limit ? int64_t(v) : wide ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int32_t>::min();
    return wrap(r, target);
  } else if (is_float(target)) {
    r.f = target == DType::F32 ? double(float(s.i)) : double(s.i);
  } else {
    r.i = s.i;
    return wrap(r, target);
  }
  if (to == DType::BF16) r.f = bfloat_to_float(float_to_bfloat(float(r.f)));
  if (to == DType::F16) r.f = half_to_float(float_to_half(float(r.f)));
  return r;
}

Scalar bitcast(Scalar s, DType from, DType to) {
  char raw[8] = {};
  store(raw, 0, from, s);
  return load(raw, 0, to);
}

bool compare(Op op, DType t, Scalar a, Scalar b) {
  auto test = [&](auto x, auto y) {
    switch (op) {
      case Op::lt:
        return x < y;
      case Op::le:
        return x <= y;
      case Op::gt:
        return x > y;
      case Op::ge:
        return x >= y;
      case Op::eq:
        return x == y;
      case Op::ne:
        return x != y;
      case Op::isnan:
        return x != x;
      case Op::isinf:
        return x == x && x - x != 0;
      default:
        VT_UNREACHABLE("{}", to_string(op));
    }
  };
  if (op == Op::isnan) return is_float(t) && a.f != a.f;
  if (op == Op::isinf) return is_float(t) && ::isinf(a.f);
  return is_float(t) ? test(a.f, b.f) : test(a.i, b.i);
}

namespace {

double inverse_erf(double x) {
  if (!(x > -1 && x < 1)) return fabs(x) == 1 ? x * INFINITY : NAN;
  // bisection on the function itself
  double lo = 0, hi = 6, a = fabs(x), rest = 1 - a;
  for (int i = 0; i < 200; ++i) {
    double m = (lo + hi) / 2;
    bool below = a < 0.5 ? ::erf(m) < a : ::erfc(m) > rest;
    (below ? lo : hi) = m;
  }
  return copysign(x == 0 ? 0 : (lo + hi) / 2, x);
}

double float_unary(Op op, double x) {
  switch (op) {
    case Op::neg:
      return -x;
    case Op::abs:
      return fabs(x);
    case Op::sign:
      return x > 0 ? 1 : x < 0 ? -1 : 0;
    case Op::sqrt:
      return ::sqrt(x);
    case Op::exp:
      return ::exp(x);
    case Op::exp2:
      return ::exp2(x);
    case Op::expm1:
      return ::expm1(x);
    case Op::log:
      return ::log(x);
    case Op::log2:
      return ::log2(x);
    case Op::log10:
      return ::log10(x);
    case Op::log1p:
      return ::log1p(x);
    case Op::sin:
      return ::sin(x);
    case Op::cos:
      return ::cos(x);
    case Op::tan:
      return ::tan(x);
    case Op::asin:
      return ::asin(x);
    case Op::acos:
      return ::acos(x);
    case Op::atan:
      return ::atan(x);
    case Op::sinh:
      return ::sinh(x);
    case Op::cosh:
      return ::cosh(x);
    case Op::tanh:
      return ::tanh(x);
    case Op::asinh:
      return ::asinh(x);
    case Op::acosh:
      return ::acosh(x);
    case Op::atanh:
      return ::atanh(x);
    case Op::erf:
      return ::erf(x);
    case Op::erfc:
      return ::erfc(x);
    case Op::ndtr:
      return 0.5 * ::erfc(-M_SQRT1_2 * x);
    case Op::erfinv:
      return inverse_erf(x);
    case Op::lgamma: {
      int sign;
      return ::lgamma_r(x, &sign);
    }
    case Op::sigmoid:
      return 1 / (1 + ::exp(-x));
    case Op::floor:
      return ::floor(x);
    case Op::ceil:
      return ::ceil(x);
    case Op::round:
      return ::nearbyint(x);
    case Op::trunc:
      return ::trunc(x);
    default:
      return NAN;
  }
}

// T: the type itself, where the order of roundings matters.
template <class T>
T float_binary(Op op, T a, T b) {
  auto differ = [&](T m) { return m != 0 && (b < 0) != (m < 0); };
  switch (op) {
    case Op::rsqrt:
      return T(1) / T(::sqrt(a));
    case Op::reciprocal:
      return T(1) / a;
    case Op::add:
      return a + b;
    case Op::sub:
      return a - b;
    case Op::mul:
      return a * b;
    case Op::div:
      return a / b;
    case Op::fmod:
      return T(::fmod(a, b));
    case Op::remainder: {
      T m = T(::fmod(a, b));
      return differ(m) ? m + b : m;
    }
    case Op::floordiv: {
      if (b == 0) return a / b;
      T m = T(::fmod(a, b)), d = (a - m) / b;
      if (differ(m)) d -= 1;
      if (d == 0) return T(::copysign(T(0), a / b));
      T f = T(::floor(d));
      return d - f > T(0.5) ? f + 1 : f;
    }
    case Op::pow:
      return T(::pow(double(a), double(b)));
    case Op::atan2:
      return T(::atan2(double(a), double(b)));
    case Op::hypot:
      return T(::hypot(double(a), double(b)));
    case Op::copysign:
      return T(::copysign(a, b));
    case Op::nextafter:
      return sizeof(T) == 4 ? T(::nextafterf(float(a), float(b))) : T(::nextafter(double(a), double(b)));
    case Op::min:
      return a != a || a <= b ? a : b;
    case Op::max:
      return a != a || a >= b ? a : b;
    case Op::fmin:
      return b != b || a <= b ? a : b;
    case Op::fmax:
      return b != b || a >= b ? a : b;
    default:
      VT_UNREACHABLE("{}", to_string(op));
  }
}

int64_t int_pow(int64_t base, int64_t n) {
  if (n < 0) return base == 1 ? 1 : base == -1 ? (n % 2 ? -1 : 1) : 0;
  uint64_t r = 1;
  for (uint64_t b = uint64_t(base); n; n >>= 1, b *= b)
    if (n & 1) r *= b;
  return int64_t(r);
}

int64_t int_apply(Op op, DType t, int64_t a, int64_t b, KernelFault& fault) {
  bool is_bool = t == DType::Bool;
  auto u = [](int64_t v) { return uint64_t(v); };
  int bits = int(size_of(t)) * 8;
  switch (op) {
    case Op::neg:
      return is_bool ? a : int64_t(-u(a));
    case Op::abs:
      return a < 0 ? int64_t(-u(a)) : a;
    case Op::sign:
      return a > 0 ? 1 : a < 0 ? -1 : 0;
    case Op::floor:
    case Op::ceil:
    case Op::round:
    case Op::trunc:
      return a;
    case Op::add:
      return is_bool ? a | b : int64_t(u(a) + u(b));
    case Op::sub:
      return is_bool ? a ^ b : int64_t(u(a) - u(b));
    case Op::mul:
      return int64_t(u(a) * u(b));
    case Op::min:
    case Op::fmin:
      return a < b ? a : b;
    case Op::max:
    case Op::fmax:
      return a > b ? a : b;
    case Op::pow:
      return int_pow(a, b);
    case Op::and_:
      return a & b;
    case Op::or_:
      return a | b;
    case Op::xor_:
      return a ^ b;
    case Op::not_:
      return is_bool ? !a : ~a;
    case Op::shl:
      return b < 0 || b >= bits ? 0 : int64_t(u(a) << b);
    case Op::shr:
      return b < 0 || b >= bits ? (is_unsigned(t) ? 0 : a < 0 ? -1 : 0) : a >> b;
    case Op::div:
    case Op::floordiv:
    case Op::fmod:
    case Op::remainder: {
      if (b == 0) {
        fault = KernelFault::DivisionByZero;
        return 0;
      }
      int64_t q = b == -1 ? int64_t(-u(a)) : a / b, r = b == -1 ? 0 : a % b;
      bool adjust = r != 0 && (r < 0) != (b < 0);
      if (op == Op::div) return q;
      if (op == Op::fmod) return r;
      return op == Op::floordiv ? q - adjust : r + (adjust ? b : 0);
    }
    default:
      VT_UNREACHABLE("{} of {}", to_string(op), to_string(t));
  }
}

}  // namespace

Scalar apply(Op op, DType t, Scalar a, Scalar b, KernelFault& fault) {
  Scalar r;
  if (!is_float(t)) {
    r.i = int_apply(op, t, a.i, b.i, fault);
  } else if (loop::arity(op) == 1 && op != Op::rsqrt && op != Op::reciprocal) {
    r.f = float_unary(op, a.f);
  } else {
    r.f = t == DType::F32 ? double(float_binary<float>(op, float(a.f), float(b.f))) : float_binary<double>(op, a.f, b.f);
  }
  return wrap(r, t);
}

}  // namespace vitrify::codegen::interp
