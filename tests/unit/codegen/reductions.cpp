// Every accumulator on both vector axes: generated code against the interpreter.
#include <cmath>
#include <limits>

#include "harness.h"

using namespace vitrify;
using namespace vitrify::codegen;
using namespace vitrify::codegen::test;

namespace {

struct Case {
  const char* kind;
  const char* type;
  bool product = false;  // of each element and itself
};
const Case kCases[] = {{"sum", "f32"},     {"sum", "f64"},     {"sum", "i32"},       {"sum", "i64"},      {"prod", "f32"},   {"prod", "i32"},
                       {"min", "f32"},     {"max", "f32"},     {"max", "f64"},       {"min", "i64"},      {"max", "u8"},     {"min", "i8"},
                       {"any", "b8"},      {"all", "b8"},      {"argmin", "f32"},    {"argmax", "f32"},   {"argmax", "i32"}, {"argmin", "f64"},
                       {"welford", "f32"}, {"welford", "f64"}, {"sum", "f32", true}, {"sum", "f64", true}};

bool two(const std::string& kind) { return kind.rfind("arg", 0) == 0 || kind == "welford"; }
bool is_arg(const std::string& kind) { return kind.rfind("arg", 0) == 0; }

// b0[s0, s1] reduced over the inner loop (rows) or over the first dimension (columns).
loop::Kernel reduction(const Case& c, bool columns, bool masked) {
  std::string t = c.type, second = is_arg(c.kind) ? "i64" : t;
  std::string at = columns ? "i3*s0 + i2" : "i2*s1 + i3";
  std::string text = fmt::format(
      "kernel r(in {0}* b0 extent(s0*s1), in b8* b1 extent(s0*s1), out {0}* b2 extent(s0), out {1}* b3 extent(s0); s0, s1) outer(i2 < s0) "
      "axis({2}):\n"
      "  stage inner(i3 < s1) acc({3} {0} -> %4{4}):\n"
      "    %0 = load {0} b0[{5}]\n"
      "    %1 = load b8 b1[{5}]\n"
      "    %2 = index i64 [i3]\n"
      "    reduce {0} acc0 %0{6}{7}\n"
      "  stage inner():\n"
      "    store {0} b2[i2] = %4\n"
      "    store {1} b3[i2] = %{8}\n",
      t, second, columns ? "outer" : "inner", c.kind, two(c.kind) ? " %5" : "", at,
      is_arg(c.kind) ? " at %2"
      : c.product    ? " at %0"
                     : "",
      masked ? " mask %1" : "", two(c.kind) ? 5 : 4);
  return loop::parse(text, context("ssii"));
}

Bytes input(const std::string& t, size_t n, uint32_t seed, bool nan, bool infinities = false) {
  std::mt19937 g(seed);
  auto make = [&](auto zero) {
    using T = decltype(zero);
    std::vector<T> v(n);
    for (auto& x : v) {
      if constexpr (std::is_floating_point_v<T>) {
        x = T(int(g() % 2000)) / T(1000) - T(0.9);  // repeats, so that ties happen
        if (nan && g() % 50 == 0) x = std::numeric_limits<T>::quiet_NaN();
        if (infinities && g() % 90 == 0) x = -std::numeric_limits<T>::infinity();
      } else {
        x = T(g());
      }
    }
    return bytes(v);
  };
  if (t == "f32") return make(0.f);
  if (t == "f64") return make(0.0);
  if (t == "i32") return make(int32_t(0));
  if (t == "i64") return make(int64_t(0));
  if (t == "b8") {
    Bytes b(n);
    for (auto& x : b) x = g() % 20 != 0;
    return b;
  }
  return make(uint8_t(0));
}

template <class T>
void near(const Bytes& a, const Bytes& b, double tolerance, const std::string& what) {
  auto x = as<T>(a), y = as<T>(b);
  for (size_t i = 0; i < x.size(); ++i) {
    if (y[i] != y[i]) {
      ASSERT_TRUE(x[i] != x[i]) << what << " at " << i << " got " << x[i];
    } else if (std::isinf(double(y[i]))) {
      ASSERT_EQ(x[i], y[i]) << what << " at " << i;
    } else {
      ASSERT_NEAR(double(x[i]), double(y[i]), tolerance * (1 + std::abs(double(y[i])))) << what << " at " << i;
    }
  }
}

TEST(Reductions, EveryKind) {
  for (bool columns : {false, true})
    for (bool masked : {false, true}) {
      std::vector<loop::Kernel> kernels;
      std::vector<Case> cases;
      for (auto& c : kCases) {
        cases.push_back(c);
        kernels.push_back(reduction(c, columns, masked));
        loop::verify(kernels.back());
      }
      std::vector<const loop::Kernel*> list;
      for (auto& k : kernels) list.push_back(&k);
      TargetOptions o;
      auto oracle = interp_backend().compile(list, o);
      for (auto& target : targets()) {
        o.target = target;
        auto code = llvm().compile(list, o);
        for (size_t i = 0; i < kernels.size(); ++i)
          for (auto [outer, inner] : {std::pair<int64_t, int64_t>{3, 0}, {3, 1}, {5, 7}, {17, 16}, {70, 33}, {4, 1000}, {133, 5}})
            for (bool nan : {false, true}) {
              std::string t = cases[i].type, kind = cases[i].kind;
              std::string what = fmt::format("{} {} {} {} {}x{} {} {}", kind, t, columns ? "columns" : "rows", target, outer, inner, nan ? "nan" : "",
                                             masked ? "masked" : "");
              size_t element = input(t, 1, 0, false).size(), second = is_arg(kind) ? 8 : element;
              std::vector<Bytes> in = {input(t, outer * inner, 5, nan, nan && kind != "welford"), input("b8", outer * inner, 6, false),
                                       Bytes(outer * element), Bytes(outer * second)};
              auto got = call(code->functions[i], kernels[i], in, {outer, inner}, 1, outer),
                   want = call(oracle->functions[i], kernels[i], in, {outer, inner}, 1, outer);
              double tolerance = kind == "sum" || kind == "prod" || kind == "welford" ? (t == "f64" ? 1e-13 : 4e-6) : 0;
              for (int b : {2, 3}) {
                if (b == 3 && is_arg(kind)) {
                  if (inner > 0) EXPECT_EQ(got.buffers[b], want.buffers[b]) << what;
                } else if (t == "f32") {
                  near<float>(got.buffers[b], want.buffers[b], tolerance, what);
                } else if (t == "f64") {
                  near<double>(got.buffers[b], want.buffers[b], tolerance, what);
                } else {
                  EXPECT_EQ(got.buffers[b], want.buffers[b]) << what;
                }
              }
              if (HasFatalFailure()) return;
            }
      }
    }
}

TEST(Reductions, LongSumsStayAccurate) {
  for (bool columns : {false, true}) {
    auto k = reduction({"sum", "f32"}, columns, false);
    int64_t outer = columns ? 20 : 2, inner = 1 << 18;
    auto data = random_floats(outer * inner, 3, 0, 1);
    std::vector<Bytes> in = {bytes(data), Bytes(outer * inner), bytes(std::vector<float>(outer)), bytes(std::vector<float>(outer))};
    for (auto& target : targets()) {
      auto got = as<float>(run(llvm(), target, k, in, {outer, inner}, 0, outer).buffers[2]);
      for (int64_t o = 0; o < outer; ++o) {
        double sum = 0;
        for (int64_t i = 0; i < inner; ++i) sum += data[columns ? i * outer + o : o * inner + i];
        EXPECT_NEAR(got[o] / sum, 1, 5e-7) << target << (columns ? " columns" : " rows");
      }
    }
  }
}

// Columns in several strips, the last of them not full; rows that no group of them divides.
TEST(Reductions, StripsOfColumns) {
  auto k = reduction({"sum", "f32"}, true, true);
  for (auto [outer, inner] : {std::pair<int64_t, int64_t>{2077, 129}, {1024, 8}, {1041, 150}, {31, 1003}}) {
    auto data = random_floats(outer * inner, 3, -1, 1);
    Bytes mask = input("b8", outer * inner, 6, false);
    std::vector<Bytes> in = {bytes(data), mask, bytes(std::vector<float>(outer)), bytes(std::vector<float>(outer))};
    for (auto& target : targets()) {
      auto got = as<float>(run(llvm(), target, k, in, {outer, inner}, 0, outer).buffers[2]);
      for (int64_t o = 0; o < outer; ++o) {
        double sum = 0, size = 0;
        for (int64_t i = 0; i < inner; ++i)
          if (mask[i * outer + o]) sum += data[i * outer + o], size += std::abs(data[i * outer + o]);
        ASSERT_NEAR(got[o], sum, 2e-7 * size) << target << " " << outer << "x" << inner << " column " << o;
      }
    }
  }
}

TEST(Reductions, VarianceFarFromZero) {
  auto k = reduction({"welford", "f32"}, false, false);
  auto data = random_floats(3000, 4, 0, 1);
  double mean = 0, m2 = 0;
  for (auto& x : data) x += 10000, mean += x / 3000.0;
  for (auto& x : data) m2 += (x - mean) * (x - mean);
  std::vector<Bytes> in = {bytes(data), Bytes(3000), bytes(std::vector<float>(1)), bytes(std::vector<float>(1))};
  for (auto& target : targets()) {
    auto got = run(llvm(), target, k, in, {1, 3000}, 0, 1);
    EXPECT_NEAR(as<float>(got.buffers[2])[0] / mean, 1, 3e-7) << target;
    EXPECT_NEAR(as<float>(got.buffers[3])[0] / m2, 1, 2e-3) << target;
  }
}

}  // namespace
