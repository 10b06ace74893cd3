// Every operation on every type: generated code against the interpreter, the interpreter against plain C++.
#include <cmath>
#include <limits>

#include "codegen/interp/value.h"
#include "harness.h"

using namespace vitrify;
using namespace vitrify::codegen;
using namespace vitrify::codegen::test;
using loop::Op;

namespace {

constexpr DType kTypes[] = {DType::Bool, DType::U8, DType::I8, DType::I16, DType::I32, DType::I64, DType::F32, DType::F64, DType::F16, DType::BF16};

std::vector<double> special_floats() {
  double inf = INFINITY;
  std::vector<double> v = {0.0,  -0.0,  1,        -1,        0.5,       -0.5,         1.5,           2.5,  -2.5, 2,     -2,     3,      7,
                           -7,   1e-8,  -1e-8,    1e-30,     1.4e-45,   -1.4e-45,     1e-39,         88.7, 88.8, -87.5, -103.5, -104.5, 127.9,
                           128,  -149,  -126.5,   1e4,       12345.678, -1e5,         1e10,          1e20, 3e38, -3e38, inf,    -inf,   NAN,
                           0.92, 0.625, 0.999999, -0.999999, 4.1,       2147483648.0, -2147483649.0, 1e19};
  return v;
}

// Bytes of `n` values of a storage type: special values first, then random ones of many magnitudes.
Bytes values(DType t, size_t n, uint32_t seed, bool second) {
  std::mt19937_64 g(seed);
  Bytes b(n * size_of(t));
  auto special = special_floats();
  for (size_t i = 0; i < n; ++i) {
    interp::Scalar s;
    if (is_float(t)) {
      size_t m = special.size();
      if (i < m * m) {
        s.f = special[second ? i / m : i % m];
      } else {
        std::uniform_real_distribution<double> mantissa(-1, 1), exponent(-20, 12);
        s.f = g() % 3 ? mantissa(g) * 4 : mantissa(g) * std::exp2(exponent(g));
      }
      if (t != DType::F64) s.f = float(s.f);
    } else {
      int64_t edge[] = {0, 1, -1, 2, -2, 7, -7, 127, -128, 255, 32767, -32768, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 31, 32, 63, 64, 8, 16};
      size_t m = std::size(edge);
      s.i = i < m * m ? edge[second ? i / m : i % m] : g() % 2 ? int64_t(g() % 21) - 10 : int64_t(g());
      if (t == DType::Bool) s.i &= 1;
    }
    interp::store(b.data(), int64_t(i), t, s);
  }
  return b;
}

uint64_t ordered(double v, DType t) {
  if (t == DType::F64) {
    int64_t i;
    memcpy(&i, &v, 8);
    return uint64_t(i < 0 ? std::numeric_limits<int64_t>::min() - i : i) ^ (uint64_t(1) << 63);
  }
  float f = float(v);
  int32_t i;
  memcpy(&i, &f, 4);
  return uint64_t(int64_t(i < 0 ? std::numeric_limits<int32_t>::min() - i : i) + (int64_t(1) << 40));
}
uint64_t ulps(double a, double b, DType t) {
  uint64_t x = ordered(a, t), y = ordered(b, t);
  return x > y ? x - y : y - x;
}

// Units in the last place of the compute type; 0: bitwise.
int tolerance(Op op, DType t) {
  if (!is_float(t)) return 0;
  switch (op) {
    case Op::exp:
    case Op::exp2:
    case Op::log:
    case Op::sin:
    case Op::cos:
      return 1;
    case Op::expm1:
    case Op::log2:
    case Op::log10:
    case Op::log1p:
    case Op::tanh:
    case Op::erf:
    case Op::sigmoid:
      return 2;
    case Op::ndtr:
      return 4;
    case Op::erfinv:
      return t == DType::F64 ? 64 : 1;
    case Op::lgamma:
      return t == DType::F64 ? 4 : 8;
    case Op::tan:
    case Op::asin:
    case Op::acos:
    case Op::atan:
    case Op::sinh:
    case Op::cosh:
    case Op::asinh:
    case Op::acosh:
    case Op::atanh:
    case Op::erfc:
    case Op::pow:
    case Op::atan2:
    case Op::hypot:
      return 3;
    default:
      return 0;
  }
}

bool applies(Op op, DType t) {
  t = compute_type(t);
  bool f = is_float(t);
  if ((op >= Op::sqrt && op <= Op::sigmoid) || op == Op::atan2 || op == Op::hypot || op == Op::copysign || op == Op::nextafter) return f;
  if (op >= Op::and_ && op <= Op::shr) return !f && !(t == DType::Bool && (op == Op::shl || op == Op::shr));
  if (t == DType::Bool && (op == Op::div || op == Op::floordiv || op == Op::fmod || op == Op::remainder || op == Op::pow)) return false;
  return true;
}

loop::Kernel op_kernel(Op op, DType t) {
  bool binary = loop::arity(op) == 2, compare = op >= Op::lt,
       fault = !is_float(t) && (op == Op::div || op == Op::floordiv || op == Op::fmod || op == Op::remainder);
  auto ct = to_string(compute_type(t)), st = to_string(t);
  std::string text = fmt::format(R"(kernel op(in {0}* b0 extent(s0), in {0}* b1 extent(s0), out {1}* b2 extent(s0); s0) outer() axis(inner){2}:
    stage inner(i1 < s0):
      %0 = load {3} b0[i1]
      %1 = load {3} b1[i1]
      %2 = {4} {3} %0 {5}
      store {6} b2[i1] = %2)",
                                 st, compare ? "b8" : st, fault ? " fault" : "", ct, loop::to_string(op), binary ? "%1" : "", compare ? "b8" : ct);
  return loop::parse(text, context("si"));
}

TEST(Ops, EveryOpEveryType) {
  std::vector<std::pair<Op, DType>> what;
  std::vector<loop::Kernel> kernels;
  for (int o = int(Op::neg); o <= int(Op::isinf); ++o)
    for (DType t : kTypes)
      if (applies(Op(o), t)) {
        what.emplace_back(Op(o), t);
        kernels.push_back(op_kernel(Op(o), t));
        loop::verify(kernels.back());
      }
  std::vector<const loop::Kernel*> list;
  for (auto& k : kernels) list.push_back(&k);
  TargetOptions o;
  auto oracle = interp_backend().compile(list, o);
  for (auto& target : targets()) {
    o.target = target;
    auto code = llvm().compile(list, o);
    for (size_t i = 0; i < kernels.size(); ++i) {
      auto [op, t] = what[i];
      constexpr size_t n = 3001;
      bool compare = op >= Op::lt;
      DType result = compare ? DType::Bool : t;
      std::vector<Bytes> in = {values(t, n, 1, false), values(t, n, 2, true), Bytes(n * size_of(result))};
      auto got = call(code->functions[i], kernels[i], in, {n}, 0, n), want = call(oracle->functions[i], kernels[i], in, {n}, 0, n);
      std::string name = fmt::format("{} {} on {}", loop::to_string(op), to_string(t), target);
      EXPECT_EQ(got.fault, want.fault) << name;
      uint64_t worst = 0;
      size_t where = 0;
      for (size_t j = 0; j < n; ++j) {
        auto a = interp::load(got.buffers[2].data(), j, result), b = interp::load(want.buffers[2].data(), j, result);
        bool same = is_float(result) ? (a.f != a.f && b.f != b.f) || memcmp(&a.f, &b.f, 8) == 0 : a.i == b.i;
        if (same) continue;
        uint64_t d = !is_float(result) || a.f != a.f || b.f != b.f ? UINT64_MAX : ulps(a.f, b.f, compute_type(t));
        // the smallest results: absolute, one denormal step of the compute type, or the flush the table names
        if (op == Op::sigmoid && std::abs(a.f - b.f) < 1.2e-38) continue;
        if (op == Op::ndtr && compute_type(t) == DType::F32 && std::abs(a.f - b.f) < 6e-8) continue;  // the far tail
        // half results may round to the neighbour
        if (tolerance(op, t) && (t == DType::F16 || t == DType::BF16)) d >>= t == DType::BF16 ? 16 : 13;
        if (d > worst) worst = d, where = j;
      }
      auto x = interp::load(in[0].data(), where, t), y = interp::load(in[1].data(), where, t);
      auto a = interp::load(got.buffers[2].data(), where, result), b = interp::load(want.buffers[2].data(), where, result);
      EXPECT_LE(worst, uint64_t(tolerance(op, t))) << name
                                                   << fmt::format(" at {}: ({}, {} | {}, {}) got {} | {}, want {} | {}", where, x.f, y.f, x.i, y.i,
                                                                  a.f, a.i, b.f, b.i);
    }
  }
}

TEST(Ops, CastsBothWays) {
  for (DType from : kTypes)
    for (DType to : kTypes) {
      auto k = loop::parse(fmt::format(R"(kernel cast(in {0}* b0 extent(s0), out {1}* b1 extent(s0); s0) outer() axis(inner):
    stage inner(i1 < s0):
      %0 = load {2} b0[i1]
      %1 = cast {1} %0
      store {1} b1[i1] = %1)",
                                       to_string(from), to_string(to), to_string(compute_type(from))),
                           context("si"));
      loop::verify(k);
      constexpr size_t n = 777;
      std::vector<Bytes> in = {values(from, n, 3, false), Bytes(n * size_of(to))};
      auto want = run(interp_backend(), "native", k, in, {n}, 0, n);
      for (auto& target : targets()) {
        auto got = run(llvm(), target, k, in, {n}, 0, n);
        for (size_t j = 0; j < n; ++j) {
          auto x = interp::load(in[0].data(), j, from), a = interp::load(got.buffers[1].data(), j, to),
               b = interp::load(want.buffers[1].data(), j, to);
          bool same = is_float(to) ? (a.f != a.f && b.f != b.f) || memcmp(&a.f, &b.f, 8) == 0 : a.i == b.i;
          ASSERT_TRUE(same) << fmt::format("{} to {} on {}: {} | {} gives {} | {}, want {} | {}", to_string(from), to_string(to), target, x.f, x.i,
                                           a.f, a.i, b.f, b.i);
        }
      }
    }
}

// Also where the product is of what the loop does not change, which a compiler moves out of it.
TEST(Ops, FmaRoundsOnce) {
  constexpr size_t n = 3000;  // the first are special values: few products of those are rounded
  for (DType t : {DType::F32, DType::F64})
    for (const char* factor : {"b0[i1]", "b0[2900]", "b0[2901]"}) {
      auto k = loop::parse(fmt::format(R"(kernel fused(in {0}* b0 extent(s0), in {0}* b1 extent(s0), out {0}* b2 extent(s0); s0) outer() axis(inner):
    stage inner(i1 < s0):
      %0 = load {0} {1}
      %1 = load {0} b1[i1]
      %2 = fma {0} %0 %0 %1
      store {0} b2[i1] = %2)",
                                       to_string(t), std::string_view(factor)),
                           context("si"));
      loop::verify(k);
      std::vector<Bytes> in = {values(t, n, 3, false), values(t, n, 5, false), Bytes(n * size_of(t))};
      auto want = run(interp_backend(), "native", k, in, {n}, 0, n);
      for (auto& target : targets()) {
        if (target == "x86-64-v2") continue;  // it has no such instruction: a product and a sum
        auto got = run(llvm(), target, k, in, {n}, 0, n);
        for (size_t j = 0; j < n; ++j) {
          const double a = interp::load(got.buffers[2].data(), j, t).f, b = interp::load(want.buffers[2].data(), j, t).f;
          ASSERT_TRUE(a == b || (a != a && b != b)) << fmt::format("{} of {} on {} at {}: {}, want {}", factor, to_string(t), target, j, a, b);
        }
      }
    }
}

TEST(Ops, InterpreterConversionsMatchTheCompiler) {
  for (double v : special_floats()) {
    interp::Scalar s;
    s.f = float(v);
    if (std::abs(v) < 2e9) {
      EXPECT_EQ(interp::cast(s, DType::F32, DType::I32).i, int32_t(float(v)));
      EXPECT_EQ(interp::cast(s, DType::F32, DType::I8).i, int8_t(int32_t(float(v))));
      EXPECT_EQ(interp::cast(s, DType::F32, DType::U8).i, uint8_t(int64_t(float(v))));
    }
    if (v == v) EXPECT_EQ(interp::cast(s, DType::F32, DType::Bool).i, float(v) != 0);
  }
  for (uint32_t h = 0; h < 65536; ++h) {
    float f = interp::half_to_float(uint16_t(h)), b = interp::bfloat_to_float(uint16_t(h));
    if (f == f) EXPECT_EQ(interp::float_to_half(f), h);
    if (b == b) EXPECT_EQ(interp::float_to_bfloat(b), h);
  }
  EXPECT_EQ(interp::float_to_bfloat(NAN), 0x7fc0);
  EXPECT_EQ(interp::float_to_half(65520.f), 0x7c00);
  EXPECT_EQ(interp::float_to_half(65519.f), 0x7bff);
}

TEST(Ops, PythonAndCDivision) {
  using S = interp::Scalar;
  KernelFault none = KernelFault::None;
  auto ints = [&](Op op, int64_t a, int64_t b) {
    S x, y;
    x.i = a, y.i = b;
    return interp::apply(op, DType::I32, x, y, none).i;
  };
  EXPECT_EQ(ints(Op::div, -7, 2), -3);
  EXPECT_EQ(ints(Op::floordiv, -7, 2), -4);
  EXPECT_EQ(ints(Op::remainder, -7, 2), 1);
  EXPECT_EQ(ints(Op::remainder, 7, -2), -1);
  EXPECT_EQ(ints(Op::fmod, -7, 2), -1);
  EXPECT_EQ(ints(Op::div, INT32_MIN, -1), INT32_MIN);
  EXPECT_EQ(none, KernelFault::None);
  EXPECT_EQ(ints(Op::div, 1, 0), 0);
  EXPECT_EQ(none, KernelFault::DivisionByZero);
}

}  // namespace
