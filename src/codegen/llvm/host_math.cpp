// What generated code calls for functions without a vector form: the host's libm, lane by lane.
#include <math.h>

#include <cstdint>
#include <limits>
#include <unordered_map>

#include "codegen/llvm/emitter.h"

namespace vitrify::codegen::x86 {
namespace {

template <class T, auto F>
void unary(T* x, const T*, int n) {
  for (int i = 0; i < n; ++i) x[i] = F(x[i]);
}
template <class T, auto F>
void binary(T* x, const T* y, int n) {
  for (int i = 0; i < n; ++i) x[i] = F(x[i], y[i]);
}

// lgamma without the global sign
double log_gamma(double x) {
  int s;
  return lgamma_r(x, &s);
}
float log_gammaf(float x) {
  int s;
  return lgammaf_r(x, &s);
}

// Start from a rational fit in w = -log(1 - x^2), then Newton's steps on erf (on erfc near 1, where erf has lost the digits).
double inverse_erf(double x) {
  if (!(x > -1 && x < 1)) return x == 1 || x == -1 ? x * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  if (x == 0) return x;
  constexpr double a = 0.147, pi = 3.14159265358979323846;
  double a_x = ::fabs(x), w = ::log1p(-x * x), h = 2 / (pi * a) + w / 2;
  double y = ::sqrt(::sqrt(h * h - w / a) - h);
  double rest = 1 - a_x;
  for (int i = 0; i < 4; ++i) {
    double error = a_x < 0.5 ? ::erf(y) - a_x : rest - ::erfc(y);
    double step = error / (1.1283791670955126 * ::exp(-y * y));
    y -= step / (1 + y * step);
  }
  return ::copysign(y, x);
}
float inverse_erff(float x) { return float(inverse_erf(x)); }
double logistic(double x) { return 1 / (1 + ::exp(-x)); }
float logisticf(float x) { return 1 / (1 + ::expf(-x)); }

// As ATen: negative exponents of integers give 0 except for bases 1 and -1.
int64_t int_pow(int64_t base, int64_t n) {
  if (n < 0) return base == 1 ? 1 : base == -1 ? (n % 2 ? -1 : 1) : 0;
  uint64_t r = 1, b = uint64_t(base);
  for (; n; n >>= 1, b *= b)
    if (n & 1) r *= b;
  return int64_t(r);
}

template <class F>
void* address(F* f) {
  return reinterpret_cast<void*>(f);
}

// clang-format off
#define VT_UNARY(_)                                                                                                     \
  _(exp, exp) _(exp2, exp2) _(expm1, expm1) _(log, log) _(log2, log2) _(log10, log10) _(log1p, log1p) _(sin, sin)       \
  _(cos, cos) _(tan, tan) _(asin, asin) _(acos, acos) _(atan, atan) _(sinh, sinh) _(cosh, cosh) _(tanh, tanh)           \
  _(asinh, asinh) _(acosh, acosh) _(atanh, atanh) _(erf, erf) _(erfc, erfc) _(erfinv, inverse_erf) _(lgamma, log_gamma) \
  _(sigmoid, logistic)
// clang-format on
#define VT_BINARY(_) _(pow, pow) _(atan2, atan2) _(hypot, hypot) _(nextafter, nextafter) _(fmod, fmod)

const std::unordered_map<std::string, void*>& table() {
  static const std::unordered_map<std::string, void*> t = {
#define _(n, g)                                                                    \
  {"vt_" #n "_f64", address(&unary<double, static_cast<double (*)(double)>(&g)>)}, \
      {"vt_" #n "_f32", address(&unary<float, static_cast<float (*)(float)>(&g##f)>)},
      VT_UNARY(_)
#undef _
#define _(n, g)                                                                             \
  {"vt_" #n "_f64", address(&binary<double, static_cast<double (*)(double, double)>(&g)>)}, \
      {"vt_" #n "_f32", address(&binary<float, static_cast<float (*)(float, float)>(&g##f)>)},
          VT_BINARY(_)
#undef _
              {"vt_pow_i64", address(&binary<int64_t, &int_pow>)},
  };
  return t;
}

}  // namespace

void* host_function(const std::string& name) {
  auto it = table().find(name);
  return it == table().end() ? nullptr : it->second;
}

}  // namespace vitrify::codegen::x86
