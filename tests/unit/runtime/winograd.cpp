// 3x3 convolutions against double precision, with operands that end where readable memory ends.
#include "runtime/winograd.h"

#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "guarded.h"

using vitrify::runtime::Winograd;

namespace {

constexpr float kUntouched = -77;

struct Case {
  int64_t n, h, w, c, k;
  bool bias = false, add = false, relu = false;
  int parts = 2;
};

void check(const Case& t) {
  SCOPED_TRACE(testing::Message() << t.n << "x" << t.h << "x" << t.w << " of " << t.c << " to " << t.k << " parts " << t.parts);
  Guarded x(static_cast<size_t>(t.n * t.h * t.w * t.c)), w(static_cast<size_t>(t.k * t.c * 9)), packed(w.size()), bias(static_cast<size_t>(t.k));
  Guarded add(static_cast<size_t>(t.n * t.h * t.w * t.k)), y(add.size(), kUntouched), whole(add.size(), kUntouched);
  for (Guarded* g : {&x, &w, &bias, &add}) g->randomize(static_cast<uint32_t>(g->size()));
  vitrify::runtime::winograd_weights(w.data(), t.k, t.c, packed.data());
  Winograd p{x.data(), packed.data(), t.bias ? bias.data() : nullptr, t.add ? add.data() : nullptr, whole.data(), t.n, t.h, t.w, t.c, t.k, t.relu};
  vitrify::runtime::convolve(p, 0, 1);
  p.y = y.data();
  std::vector<std::thread> threads;
  for (int part = 0; part < t.parts; ++part) threads.emplace_back([&, part] { vitrify::runtime::convolve(p, part, t.parts); });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(std::memcmp(y.data(), whole.data(), y.size() * sizeof(float)), 0) << "depends on the number of parts";
  for (int64_t at = 0; at < t.n * t.h * t.w; ++at)
    for (int64_t k = 0; k < t.k; ++k) {
      const int64_t image = at / (t.h * t.w), row = at / t.w % t.h, col = at % t.w;
      double want = t.bias ? bias.data()[k] : 0, size = 1;
      if (t.add) want += add.data()[at * t.k + k];
      for (int64_t i = std::max<int64_t>(row - 1, 0); i <= std::min(row + 1, t.h - 1); ++i)
        for (int64_t j = std::max<int64_t>(col - 1, 0); j <= std::min(col + 1, t.w - 1); ++j)
          for (int64_t c = 0; c < t.c; ++c) {
            const double term = static_cast<double>(x.data()[((image * t.h + i) * t.w + j) * t.c + c]) *
                                w.data()[((k * t.c + c) * 3 + (i - row + 1)) * 3 + (j - col + 1)];
            want += term, size += std::abs(term);
          }
      if (t.relu) want = std::max(want, 0.0);
      // Roundings of a chain as a random walk, of sums of four pixels and of nine weights.
      ASSERT_NEAR(y.data()[at * t.k + k], want, 4 * (std::sqrt(static_cast<double>(t.c)) + 4) * size * std::ldexp(1, -24)) << at << "," << k;
    }
}

class Convolve : public testing::Test {
  void SetUp() override {
    if (!vitrify::runtime::can_convolve()) GTEST_SKIP() << "this processor has no AVX-512";
  }
};

TEST_F(Convolve, ImagesAroundEveryBorder) {
  for (int64_t h : {1, 2, 3, 6, 7})
    for (int64_t w : {1, 2, 5, 8}) check({2, h, w, 16, 16, false, false, false, 3});
}

// 16 to 64 results at once, and more of them than one block holds.
TEST_F(Convolve, ChannelsAroundEveryBorder) {
  for (int64_t c : {16, 48})
    for (int64_t k : {16, 32, 48, 64, 80, 144}) check({1, 5, 6, c, k});
  check({3, 29, 31, 64, 32});
}

TEST_F(Convolve, WhatIsDoneToResults) {
  for (int what = 0; what < 8; ++what) check({2, 5, 5, 32, 80, (what & 1) != 0, (what & 2) != 0, (what & 4) != 0});
}

// Enough weights for parts to share them out; parts that have nothing to do.
TEST_F(Convolve, ManyWeightsAndManyParts) {
  for (int parts : {1, 2, 3, 4, 6, 8}) check({1, 6, 5, 128, 144, true, true, true, parts});
  check({1, 1, 2, 16, 16, false, false, false, 5});
}

TEST_F(Convolve, NaNStaysWithRelu) {
  Guarded x(16, NAN), w(16 * 16 * 9, 1), packed(w.size()), y(16);
  vitrify::runtime::winograd_weights(w.data(), 16, 16, packed.data());
  vitrify::runtime::convolve({x.data(), packed.data(), nullptr, nullptr, y.data(), 1, 1, 1, 16, 16, true}, 0, 1);
  for (int i = 0; i < 16; ++i) EXPECT_TRUE(std::isnan(y.data()[i]));
}

}  // namespace
