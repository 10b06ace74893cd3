// Attention against double precision, with operands that end where readable memory ends.
#include "runtime/attention.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "guarded.h"

using vitrify::runtime::DotProductAttention;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Case {
  int64_t batch, heads, queries, keys, width;
  bool causal = false;
  std::function<float(int64_t i, int64_t j)> mask = nullptr;
  bool heads_inside = false;  // memory is [B,S,H,D]
  int parts = 1;
};

size_t floats(int64_t n) { return static_cast<size_t>(n); }

void check(const Case& t) {
  SCOPED_TRACE(testing::Message() << t.batch << "," << t.heads << "," << t.queries << "," << t.keys << "," << t.width << (t.causal ? " causal" : "")
                                  << (t.heads_inside ? " heads inside" : "") << " parts " << t.parts);
  const auto strides = [&](int64_t rows) {
    return t.heads_inside ? DotProductAttention::Strides{rows * t.heads * t.width, t.width, t.heads * t.width}
                          : DotProductAttention::Strides{t.heads * rows * t.width, rows * t.width, t.width};
  };
  const int64_t all = t.batch * t.heads;
  Guarded q(floats(all * t.queries * t.width)), k(floats(all * t.keys * t.width)), v(floats(all * t.keys * t.width)), out(q.size()), whole(q.size());
  Guarded lse(floats(all * t.queries)), mask(floats(t.queries * t.keys));
  q.randomize(1), k.randomize(2), v.randomize(3);
  if (t.mask)
    for (int64_t i = 0; i < t.queries; ++i)
      for (int64_t j = 0; j < t.keys; ++j) mask.data()[i * t.keys + j] = t.mask(i, j);
  const float scale = 1 / std::sqrt(static_cast<float>(t.width));
  DotProductAttention a{q.data(),
                        k.data(),
                        v.data(),
                        strides(t.queries),
                        strides(t.keys),
                        strides(t.keys),
                        t.mask ? mask.data() : nullptr,
                        {0, 0, t.keys, 1},
                        t.causal,
                        scale,
                        whole.data(),
                        strides(t.queries),
                        lse.data(),
                        {t.heads * t.queries, t.queries, 1},
                        t.batch,
                        t.heads,
                        t.queries,
                        t.keys,
                        t.width};
  ASSERT_TRUE(vitrify::runtime::can_attend(a));
  vitrify::runtime::attend(a, 0, 1);
  a.out = out.data();
  for (int part = 0; part < t.parts; ++part) vitrify::runtime::attend(a, part, t.parts);
  EXPECT_EQ(std::memcmp(out.data(), whole.data(), out.size() * sizeof(float)), 0) << "depends on the number of parts";
  for (int64_t n = 0; n < all; ++n) {
    const auto at = [&](float* base, int64_t rows, int64_t row) {
      const auto s = strides(rows);
      return base + n / t.heads * s[0] + n % t.heads * s[1] + row * s[2];
    };
    for (int64_t i = 0; i < t.queries; ++i) {
      std::vector<double> weight;
      double most = -kInf, sum = 0;
      for (int64_t j = 0; j < (t.causal ? std::min(t.keys, i + 1) : t.keys); ++j) {
        double score = 0;
        for (int64_t d = 0; d < t.width; ++d) score += double{at(q.data(), t.queries, i)[d]} * at(k.data(), t.keys, j)[d];
        weight.push_back(score * scale + (t.mask ? t.mask(i, j) : 0));
        most = std::max(most, weight.back());
      }
      for (double& w : weight) sum += w = std::isinf(w) && w < 0 ? 0 : std::exp(w - most);
      const double want_lse = sum == 0 ? 0 : most + std::log(sum), got_lse = lse.data()[n * t.queries + i];
      if (std::isnan(sum))
        ASSERT_TRUE(std::isnan(got_lse)) << i;
      else
        ASSERT_NEAR(got_lse, want_lse, 3e-6) << i;
      for (int64_t d = 0; d < t.width; ++d) {
        double want = 0;
        for (size_t j = 0; j < weight.size(); ++j) want += weight[j] / (sum == 0 ? 1 : sum) * at(v.data(), t.keys, static_cast<int64_t>(j))[d];
        const float got = at(out.data(), t.queries, i)[d];
        if (std::isnan(sum))
          ASSERT_TRUE(std::isnan(got)) << i << "," << d;
        else
          ASSERT_NEAR(got, want, 5e-6) << i << "," << d;
      }
    }
  }
}

class AttentionTest : public testing::Test {
  void SetUp() override {
    if (DotProductAttention a{.keys = 1, .width = 1}; !vitrify::runtime::can_attend(a)) GTEST_SKIP() << "this processor has no AVX-512";
  }
};

// Around the borders of 8 queries, 16 and 48 keys and columns, 384 keys.
TEST_F(AttentionTest, SizesAroundEveryBorder) {
  for (bool causal : {false, true})
    for (int64_t queries : {1, 8, 9, 20})
      for (int64_t keys : {1, 5, 16, 49, 100})
        for (int64_t width : {1, 7, 16, 33, 64}) check({2, 2, queries, keys, width, causal, nullptr, (queries + keys) % 2 == 0, 3});
  for (bool causal : {false, true})
    for (int64_t keys : {383, 384, 385, 800}) check({1, 1, 400, keys, 20, causal, nullptr, false, 5});
  check({1, 1, 4, 10, 384});
}

TEST_F(AttentionTest, Masks) {
  const std::vector<std::function<float(int64_t, int64_t)>> masks = {
      [](int64_t i, int64_t j) { return static_cast<float>((i * 7 + j * 3) % 11) - 5; },
      [](int64_t i, int64_t j) { return i == 3 || j % 3 == 0 ? -kInf : 0; },  // row 3 sees nothing
      [](int64_t, int64_t j) { return j < 400 ? -kInf : 0; },                 // nor any row the first run of keys
      [](int64_t i, int64_t j) { return i == 2 && j == 1 ? NAN : 0; },
  };
  for (const auto& mask : masks)
    for (bool causal : {false, true}) check({1, 2, 19, 500, 16, causal, mask, true, 2});
}

// Copies of a head's keys and values would take too much room.
TEST_F(AttentionTest, LongHeadsAreLeft) {
  DotProductAttention a{.keys = 1 << 13, .width = 64};
  EXPECT_TRUE(vitrify::runtime::can_attend(a));
  a.keys *= 2;
  EXPECT_FALSE(vitrify::runtime::can_attend(a));
  a.keys = 1, a.width = 385;
  EXPECT_FALSE(vitrify::runtime::can_attend(a));
}

}  // namespace
