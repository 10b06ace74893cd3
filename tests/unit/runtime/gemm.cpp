// Products of matrices against double precision, with operands that end where readable memory ends.
#include "runtime/gemm.h"

#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "guarded.h"

using vitrify::runtime::Product;

namespace {

constexpr float kUntouched = -77;

struct Case {
  int64_t m, n, k, extra = 0;  // extra: elements between rows
  bool transposed = false, bias = false;
  int parts = 1;
};

void check(const Case& t) {
  SCOPED_TRACE(testing::Message() << t.m << "x" << t.n << "x" << t.k << " extra " << t.extra << (t.transposed ? " transposed" : "")
                                  << (t.bias ? " bias" : "") << " parts " << t.parts);
  const int64_t a_stride = t.k + t.extra, b_stride = (t.transposed ? t.k : t.n) + t.extra, c_stride = t.n + t.extra;
  auto span = [](int64_t rows, int64_t stride, int64_t cols) { return static_cast<size_t>((rows - 1) * stride + cols); };
  Guarded a(span(t.m, a_stride, t.k)), b(t.transposed ? span(t.n, b_stride, t.k) : span(t.k, b_stride, t.n)), bias(static_cast<size_t>(t.n));
  Guarded c(span(t.m, c_stride, t.n), kUntouched), whole(c.size(), kUntouched);
  for (Guarded* x : {&a, &b, &bias}) x->randomize(static_cast<uint32_t>(t.m * 31 + t.n * 7 + t.k));
  Product p{a.data(), a_stride, b.data(), b_stride, t.transposed, t.bias ? bias.data() : nullptr, whole.data(), c_stride, t.m, t.n, t.k};
  vitrify::runtime::multiply(p, 0, 1);
  p.c = c.data();
  for (int part = 0; part < t.parts; ++part) vitrify::runtime::multiply(p, part, t.parts);
  EXPECT_EQ(std::memcmp(c.data(), whole.data(), c.size() * sizeof(float)), 0) << "depends on the number of parts";
  for (int64_t i = 0; i < t.m; ++i) {
    for (int64_t j = 0; j < t.n; ++j) {
      double want = t.bias ? bias.data()[j] : 0, size = std::abs(want);
      for (int64_t l = 0; l < t.k; ++l) {
        const double term =
            static_cast<double>(a.data()[i * a_stride + l]) * (t.transposed ? b.data()[j * b_stride + l] : b.data()[l * b_stride + j]);
        want += term, size += std::abs(term);
      }
      // Roundings of a chain, as a random walk (the sure bound has k in place of its root).
      const double bound = 2 * (std::sqrt(static_cast<double>(t.k)) + 2) * size * std::ldexp(1, -24);
      ASSERT_NEAR(c.data()[i * c_stride + j], want, bound) << i << "," << j;
    }
    for (int64_t j = t.n; i + 1 < t.m && j < c_stride; ++j) ASSERT_EQ(c.data()[i * c_stride + j], kUntouched) << "between rows";
  }
}

class Gemm : public testing::Test {
  void SetUp() override {
    if (!vitrify::runtime::can_multiply()) GTEST_SKIP() << "this processor has no AVX-512";
  }
};

// Sizes around the borders of every block: 8 rows, 16 and 48 columns, 144 and 96 columns, depths of 256 and 384.
TEST_F(Gemm, SizesAroundEveryBorder) {
  for (bool transposed : {false, true})
    for (int64_t m : {1, 7, 8, 9, 23})
      for (int64_t n : {1, 15, 16, 17, 47, 48, 49, 100, 150})
        for (int64_t k : {1, 3, 4, 5, 16, 33}) check({m, n, k, (m + n) % 3, transposed, n % 2 == 1, 1});
  for (bool transposed : {false, true})
    for (int64_t k : {255, 256, 257, 383, 384, 385, 800}) check({9, 200, k, 0, transposed, true, 2});
}

// From 64 rows on, what is copied of dense rows of b depends on how far they are apart.
TEST_F(Gemm, PanelsCopiedByTheFirstTiles) {
  for (int64_t m : {64, 71})
    for (int64_t n : {16, 47, 48, 49, 97, 150})
      for (int64_t k : {1, 5, 16, 255, 256, 257, 530}) check({m, n, k, k % 2, false, n % 2 == 1, 1});
  check({64, 1024, 300, 0, false, true, 2});
  check({64, 1010, 300, 14, false, true, 2});
}

TEST_F(Gemm, PartsByColumnsAndByRows) {
  for (int parts : {1, 2, 3, 4, 6, 7, 16})
    for (bool transposed : {false, true}) {
      check({40, 300, 70, 5, transposed, true, parts});
      check({300, 40, 70, 0, transposed, false, parts});
      check({5, 3, 9, 0, transposed, true, parts});
    }
}

TEST_F(Gemm, MoreRowsThanAreCopiedAtATime) {
  check({1030, 20, 40, 0, false, true, 1});
  check({1030, 20, 40, 3, true, false, 2});
}

// Nothing is left in a thread's room that a smaller product would read.
TEST_F(Gemm, InfinitiesOfAnEarlierProductStayThere) {
  std::vector<float> a(64 * 600, INFINITY), b(600 * 200, INFINITY), c(64 * 200);
  vitrify::runtime::multiply({a.data(), 600, b.data(), 200, false, nullptr, c.data(), 200, 64, 200, 600}, 0, 1);
  EXPECT_TRUE(std::isinf(c[0]));
  check({13, 37, 29, 0, false, true, 1});
  check({13, 37, 29, 0, true, true, 1});
}

TEST_F(Gemm, ThreadsHaveRoomOfTheirOwn) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([i] {
      for (int r = 0; r < 4; ++r) check({20 + i, 100 + i, 300 - i, 0, i % 2 == 0, true, 2});
    });
  for (auto& t : threads) t.join();
}

}  // namespace
