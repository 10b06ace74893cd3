// Whole kernels: generated code against the interpreter.
#include "harness.h"

using namespace vitrify;
using namespace vitrify::codegen;
using namespace vitrify::codegen::test;

namespace {

void expect_near(const std::vector<float>& got, const std::vector<float>& want, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i])) {
      ASSERT_TRUE(std::isnan(got[i])) << what << " at " << i;
    } else if (std::isinf(want[i])) {
      ASSERT_EQ(got[i], want[i]) << what << " at " << i;
    } else {
      ASSERT_NEAR(got[i], want[i], tolerance * (1 + std::abs(want[i]))) << what << " at " << i;
    }
  }
}

TEST(Kernels, PointwiseFlatEveryLength) {
  auto k = loop::parse(R"(kernel gelu(in f32* b0 extent(s0), in f32* b1 extent(s0), out f32* b2 extent(s0); s0) outer() axis(inner):
    stage inner(i1 < s0):
      %0 = load f32 b0[i1]
      %1 = load f32 b1[i1]
      %2 = add f32 %0 %1
      %3 = constant f32 0.70710678
      %4 = mul f32 %2 %3
      %5 = erf f32 %4
      %6 = constant f32 1
      %7 = add f32 %5 %6
      %8 = constant f32 0.5
      %9 = mul f32 %2 %8
      %10 = mul f32 %9 %7
      store f32 b2[i1] = %10)",
                       context("si"));
  loop::verify(k);
  for (auto& target : targets()) {
    TargetOptions o;
    o.target = target;
    auto code = llvm().compile({&k}, o);
    auto oracle = interp_backend().compile({&k}, o);
    for (int64_t n : {0, 1, 7, 15, 16, 17, 31, 64, 65, 1000}) {
      std::vector<Bytes> in = {bytes(random_floats(n, 1)), bytes(random_floats(n, 2)), bytes(std::vector<float>(n, 77))};
      for (auto [b, e] : {std::pair<int64_t, int64_t>{0, n}, {n / 3, n - n / 4}}) {
        auto got = call(code->functions[0], k, in, {n}, b, e), want = call(oracle->functions[0], k, in, {n}, b, e);
        expect_near(as<float>(got.buffers[2]), as<float>(want.buffers[2]), 1e-6, target + " n=" + std::to_string(n));
      }
    }
  }
}

const char* kSoftmax =
    R"(kernel softmax(in f32* b0 extent(s0*s1), out f32* b1 extent(s0*s1), scratch f32* b2 extent(s1); s0, s1) outer(i2 < s0) axis(inner):
    stage inner(i3 < s1) acc(max f32 -> %1):
      %0 = load f32 b0[i2*s1 + i3]
      reduce f32 acc0 %0
    stage inner(i4 < s1) acc(sum f32 -> %5):
      %2 = load f32 b0[i2*s1 + i4]
      %3 = sub f32 %2 %1
      %4 = exp f32 %3
      store f32 b2[i4] = %4
      reduce f32 acc0 %4
    stage inner():
      %6 = reciprocal f32 %5
    stage inner(i5 < s1):
      %7 = load f32 b2[i5]
      %8 = mul f32 %7 %6
      store f32 b1[i2*s1 + i5] = %8)";

const char* kLayerNorm =
    R"(kernel layer_norm(in f32* b0 extent(s0*s1), in bf16* b1 extent(s1), out bf16* b2 extent(s0*s1), out f32* b3 extent(s0); s0, s1) outer(i2 < s0) axis(inner):
    stage inner(i3 < s1) acc(welford f32 -> %1 %2):
      %0 = load f32 b0[i2*s1 + i3]
      reduce f32 acc0 %0
    stage inner():
      %3 = index i64 [s1]
      %4 = cast f32 %3
      %5 = div f32 %2 %4
      %6 = constant f32 0.00001
      %7 = add f32 %5 %6
      %8 = rsqrt f32 %7
      store f32 b3[i2] = %8
    stage inner(i4 < s1):
      %9 = load f32 b0[i2*s1 + i4]
      %10 = sub f32 %9 %1
      %11 = mul f32 %10 %8
      %12 = load bf16 b1[i4]
      %13 = mul f32 %11 %12
      store bf16 b2[i2*s1 + i4] = %13)";

TEST(Kernels, Rows) {
  auto softmax = loop::parse(kSoftmax, context("ssiiii")), norm = loop::parse(kLayerNorm, context("ssiii"));
  loop::verify(softmax);
  loop::verify(norm);
  for (auto& target : targets()) {
    TargetOptions o;
    o.target = target;
    auto code = llvm().compile({&softmax, &norm}, o);
    auto oracle = interp_backend().compile({&softmax, &norm}, o);
    for (int64_t n : {1, 7, 16, 17, 33, 130, 1000}) {
      int64_t rows = 5;
      std::vector<Bytes> in = {bytes(random_floats(rows * n, 1)), bytes(std::vector<float>(rows * n, 77))};
      auto got = call(code->functions[0], softmax, in, {rows, n}, 1, 5), want = call(oracle->functions[0], softmax, in, {rows, n}, 1, 5);
      expect_near(as<float>(got.buffers[1]), as<float>(want.buffers[1]), 1e-6, target + " softmax n=" + std::to_string(n));
      std::vector<Bytes> in2 = {in[0], Bytes(n * 2, 0x3f), Bytes(rows * n * 2), bytes(std::vector<float>(rows))};
      got = call(code->functions[1], norm, in2, {rows, n}, 0, 4);
      want = call(oracle->functions[1], norm, in2, {rows, n}, 0, 4);
      // one value, the variance of nothing: 1/sqrt(eps)
      expect_near(as<float>(got.buffers[3]), as<float>(want.buffers[3]), 2e-6, target + " rstd n=" + std::to_string(n));
      auto a = as<uint16_t>(got.buffers[2]), b = as<uint16_t>(want.buffers[2]);
      for (size_t i = 0; i < a.size(); ++i) ASSERT_LE(std::abs(int(a[i]) - int(b[i])), 1) << target << " n=" << n << " at " << i;
    }
  }
}

// Results too large for the caches: the last loop of a row runs within the one before it of the next (emit_trailing.cpp).
TEST(Kernels, RowsWhoseLastLoopTrails) {
  for (int64_t n : {16, 33, 512, 1003}) {
    auto text = [&](const char* last, const char* outputs) {
      return fmt::format(R"(
kernel rows(in f32* b0 extent(40000000), scratch f32* b1 extent({0}), {2}) outer(i0 < 30000) axis(inner):
  stage inner(i1 < {0}) acc(max f32 -> %1):
    %0 = load f32 b0[{0}*i0 + i1]
    reduce f32 acc0 %0
  stage inner(i1 < {0}) acc(sum f32 -> %5):
    %2 = load f32 b0[{0}*i0 + i1]
    %3 = sub f32 %2 %1
    %4 = exp f32 %3
    store f32 b1[i1] = %4
    reduce f32 acc0 %4
  stage inner(i1 < {0}):
    {1}
)",
                         n, fmt::format(fmt::runtime(last), n), outputs);
    };
    // with the numbers of its row: what was left in memory of the kernel's own, what the row reads again, and two results of two types
    const std::vector<std::pair<std::string, int>> kernels = {
        {text("%6 = load f32 b1[i1]\n%7 = div f32 %6 %5\nstore f32 b2[{0}*i0 + i1] = %7", "out f32* b2 extent(40000000);"), 1},
        {text("%6 = load f32 b0[{0}*i0 + i1]\n%7 = sub f32 %6 %1\n%8 = log f32 %5\n%9 = sub f32 %7 %8\nstore f32 b2[{0}*i0 + i1] = %9",
              "out f32* b2 extent(40000000);"),
         1},
        {text("%6 = load f32 b1[i1]\n%7 = div f32 %6 %5\nstore f32 b2[{0}*i0 + i1] = %7\n%8 = add f32 %6 %1\nstore bf16 b3[{0}*i0 + i1] = %8",
              "out f32* b2 extent(40000000), out bf16* b3 extent(40000000);"),
         2}};
    for (auto& target : targets())
      for (auto& [source, results] : kernels) {
        auto k = loop::parse(source, context("ii"));
        loop::verify(k);
        TargetOptions o;
        o.target = target;
        auto code = llvm().compile({&k}, o), oracle = interp_backend().compile({&k}, o);
        constexpr int64_t kRows = 5;
        for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, 5}, {1, 4}, {3, 4}, {2, 2}}) {
          std::vector<Bytes> buffers = {bytes(random_floats(kRows * n, 1)), bytes(std::vector<float>(kRows * n, 77))};
          if (results == 2) buffers.push_back(Bytes(kRows * n * 2, 0x42));
          auto got = call(code->functions[0], k, buffers, {}, begin, end), want = call(oracle->functions[0], k, buffers, {}, begin, end);
          const std::string where = fmt::format("{} n={} rows {} to {}", target, n, begin, end);
          expect_near(as<float>(got.buffers[1]), as<float>(want.buffers[1]), 2e-6, where);
          if (results < 2) continue;
          auto a = as<uint16_t>(got.buffers[2]), b = as<uint16_t>(want.buffers[2]);
          for (size_t i = 0; i < a.size(); ++i) ASSERT_LE(std::abs(int(a[i]) - int(b[i])), 1) << where << " at " << i;
        }
      }
  }
}

TEST(Kernels, ErrorsCrossTheLibraryBoundary) {
  auto k = loop::parse(
      "kernel k(out f32* b0 extent(4)) outer() axis(inner):\n  stage inner(i0 < 4):\n    %0 = constant f32 1\n    store f32 b0[i0] = %0\n",
      context("i"));
  TargetOptions o;
  o.target = "z80";
  EXPECT_THROW(llvm().compile({&k}, o), InternalError);
}

}  // namespace
