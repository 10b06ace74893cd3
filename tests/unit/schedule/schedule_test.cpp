// Text graphs through lowering, fusion and memory placement, run by the interpreter of loops.
#include "schedule/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "codegen/backend.h"
#include "runtime/layout.h"

namespace vitrify {
namespace {

using runtime::Slot;
using runtime::SlotKind;
using Data = std::vector<float>;

struct Ran {
  schedule::Scheduled scheduled;
  std::vector<Data> outputs;  // logical order
  const runtime::Plan& plan() const { return *scheduled.plan; }
  size_t kernels() const { return scheduled.kernels.size(); }
  size_t launches() const { return plan().launches.size(); }
};

int64_t number(sym::Int e) {
  EXPECT_TRUE(e.is_const());
  return e.value();
}

int64_t extent(const std::vector<sym::Int>& sizes, const std::vector<sym::Int>& strides) {
  int64_t n = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (number(sizes[d]) == 0) return 0;
    n += (number(sizes[d]) - 1) * number(strides[d]);
  }
  return n;
}

// Calls f(element offset) for every logical index, in order.
template <class F>
void for_each_index(const runtime::TensorRef& r, F&& f) {
  int64_t n = 1;
  for (auto s : r.sizes) n *= number(s);
  for (int64_t i = 0; i < n; ++i) {
    int64_t rest = i, at = number(r.offset);
    for (size_t d = r.sizes.size(); d-- > 0;) {
      at += rest % number(r.sizes[d]) * number(r.strides[d]);
      rest /= number(r.sizes[d]);
    }
    f(at);
  }
}

// Inputs are contiguous f32. Memory of the plan starts as NaN, so that nothing unwritten can pass for a result.
Ran run(const std::string& text, const std::vector<Data>& inputs, Options options = {}, const schedule::Destinations& to = {}) {
  options.verify = true;
  auto graph = std::make_shared<ir::Graph>(ir::parse(text));
  Ran r{schedule::schedule(graph, options, to), {}};
  runtime::Plan& plan = *r.scheduled.plan;
  std::vector<const loop::Kernel*> kernels;
  for (auto& k : r.scheduled.kernels) kernels.push_back(&k);
  auto code = codegen::interp_backend().compile(kernels, {});

  constexpr size_t kGuard = 64;
  std::vector<Data> own(plan.slots.size());
  std::vector<char> arena(plan.arena_bytes + kGuard, '\xff');
  std::vector<void*> memory(plan.slots.size());
  for (size_t s = 0; s < plan.slots.size(); ++s) {
    const Slot& slot = plan.slots[s];
    if (slot.kind == SlotKind::Arena) {
      memory[s] = arena.data() + slot.arena_offset;
      continue;
    }
    EXPECT_EQ(slot.dtype, DType::F32);
    own[s] = slot.kind == SlotKind::Input ? inputs.at(slot.index) : Data(extent(slot.sizes, slot.strides) + kGuard, NAN);
    memory[s] = own[s].data();
  }
  for (const runtime::Step& step : plan.steps) {
    if (step.kind != runtime::Step::Kind::Launch) {
      EXPECT_NE(step.kind, runtime::Step::Kind::Extern) << "not lowered";
      continue;
    }
    const runtime::Launch& l = plan.launches[step.index];
    std::vector<void*> args;
    for (uint32_t s : l.slots) args.push_back(memory[s]);
    int32_t fault = 0;
    if (plan.kernels[l.kernel].may_fault) args.push_back(&fault);
    std::vector<char> scratch(plan.kernels[l.kernel].scratch_bytes + kGuard, '\xff');
    args.push_back(scratch.data());
    std::vector<int64_t> sizes;
    for (auto s : l.sizes) sizes.push_back(number(s));
    // In two parts, as two threads would.
    const int64_t n = number(l.iterations), half = n / 2;
    for (auto [b, e] : {std::pair(half, n), std::pair(int64_t{0}, half)})
      if (b < e) code->functions[l.kernel](args.data(), sizes.data(), b, e);
    EXPECT_EQ(fault, 0);
    for (size_t k = plan.kernels[l.kernel].scratch_bytes; k < scratch.size(); ++k) EXPECT_EQ(scratch[k], '\xff') << "past the scratch row";
  }
  for (size_t k = plan.arena_bytes; k < arena.size(); ++k) EXPECT_EQ(arena[k], '\xff') << "past the arena";
  for (const runtime::Output& o : plan.outputs) {
    Data d;
    for_each_index(o.ref, [&](int64_t at) { d.push_back(static_cast<const float*>(memory[o.ref.slot])[at]); });
    r.outputs.push_back(std::move(d));
  }
  return r;
}

Data random(size_t n, uint32_t seed = 1) {
  std::mt19937 g(seed);
  std::normal_distribution<float> d;
  Data x(n);
  for (float& v : x) v = d(g);
  return x;
}

void expect_close(const Data& got, const std::vector<double>& want, double tolerance = 2e-6) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance * std::max(1.0, std::abs(want[i]))) << "element " << i;
}

// Arena slots alive at the same step do not share a byte.
void expect_no_overlap(const runtime::Plan& p) {
  const auto life = runtime::lifetimes(p);
  for (size_t a = 0; a < p.slots.size(); ++a)
    for (size_t b = a + 1; b < p.slots.size(); ++b) {
      const Slot &x = p.slots[a], &y = p.slots[b];
      if (x.kind != SlotKind::Arena || y.kind != SlotKind::Arena) continue;
      if (life[a].first < 0 || life[b].first < 0 || life[a].last < life[b].first || life[b].last < life[a].first) continue;
      EXPECT_TRUE(x.arena_offset + number(x.bytes) <= y.arena_offset || y.arena_offset + number(y.bytes) <= x.arena_offset) << a << " and " << b;
    }
  for (const Slot& s : p.slots)
    if (s.kind == SlotKind::Arena) EXPECT_LE(s.arena_offset + number(s.bytes), p.arena_bytes);
}

TEST(Schedule, SoftmaxIsOneKernel) {
  const size_t rows = 7, cols = 45;
  const Data x = random(rows * cols);
  auto r = run(R"(graph @g(%0: f32[7,45] arg "x") {
  %1: f32[7,45] = aten::mul.Tensor(%0, 2.0)
  %2: f32[7,45] = aten::_softmax(%1, 1, false)
  return %2
})",
               {x});
  std::vector<double> want(x.size());
  for (size_t i = 0; i < rows; ++i) {
    double top = -INFINITY, sum = 0;
    for (size_t j = 0; j < cols; ++j) top = std::max(top, 2.0 * x[i * cols + j]);
    for (size_t j = 0; j < cols; ++j) sum += want[i * cols + j] = std::exp(2.0 * x[i * cols + j] - top);
    for (size_t j = 0; j < cols; ++j) want[i * cols + j] /= sum;
  }
  expect_close(r.outputs[0], want);
  EXPECT_EQ(r.launches(), 1u);
  EXPECT_EQ(r.plan().arena_bytes, 0);
}

TEST(Schedule, LayerNormWithItsNeighboursIsOneKernel) {
  const size_t rows = 5, cols = 33;
  const Data x = random(rows * cols, 2), y = random(rows * cols, 3), w = random(cols, 4), b = random(cols, 5);
  auto r = run(R"(graph @g(%0: f32[5,33] arg "x", %1: f32[5,33] arg "y", %2: f32[33] param "w", %3: f32[33] param "b") {
  %4: f32[5,33] = aten::add.Tensor(%0, %1, 1)
  %5: (f32[5,33], f32[5,1], f32[5,1]) = aten::native_layer_norm(%4, [33], %2, %3, 1e-05)
  %6: f32[5,33] = aten::relu(%5)
  return %6, %4
})",
               {x, y, w, b});
  std::vector<double> want(x.size()), sum(x.size());
  for (size_t i = 0; i < rows; ++i) {
    double mean = 0, var = 0;
    for (size_t j = 0; j < cols; ++j) mean += sum[i * cols + j] = double(x[i * cols + j]) + y[i * cols + j];
    mean /= cols;
    for (size_t j = 0; j < cols; ++j) var += std::pow(sum[i * cols + j] - mean, 2) / cols;
    for (size_t j = 0; j < cols; ++j) want[i * cols + j] = std::max(0.0, (sum[i * cols + j] - mean) / std::sqrt(var + 1e-5) * w[j] + b[j]);
  }
  expect_close(r.outputs[0], want, 1e-5);
  expect_close(r.outputs[1], sum);
  EXPECT_EQ(r.launches(), 1u);
}

TEST(Schedule, ColumnSums) {
  const size_t rows = 64, cols = 9;
  const Data x = random(rows * cols);
  auto r = run(R"(graph @g(%0: f32[64,9] arg "x") {
  %1: f32[64,9] = aten::abs(%0)
  %2: f32[9] = aten::sum.dim_IntList(%1, [0], false, none)
  %3: f32[9] = aten::amax(%1, [0], false)
  return %2, %3
})",
               {x});
  std::vector<double> sums(cols), tops(cols);
  for (size_t i = 0; i < rows; ++i)
    for (size_t j = 0; j < cols; ++j) {
      sums[j] += std::abs(x[i * cols + j]);
      tops[j] = std::max<double>(tops[j], std::abs(x[i * cols + j]));
    }
  expect_close(r.outputs[0], sums, 1e-5);
  expect_close(r.outputs[1], tops, 0);
  EXPECT_EQ(r.launches(), 1u) << "both read the same data";
}

TEST(Schedule, LongSumsAreSplit) {
  const size_t n = 70001;  // a prime, so that the last part is short
  const Data x = random(n);
  auto r = run(R"(graph @g(%0: f32[70001] arg "x") {
  %1: f32[] = aten::sum.dim_IntList(%0, [0], false, none)
  %2: f32[] = aten::amin(%0, [0], false)
  return %1, %2
})",
               {x});
  double sum = 0, low = INFINITY;
  for (float v : x) sum += v, low = std::min<double>(low, v);
  expect_close(r.outputs[0], {sum}, 1e-4);
  expect_close(r.outputs[1], {low}, 0);
  bool parallel = false;
  for (auto& l : r.plan().launches) parallel = parallel || number(l.iterations) > 1;
  EXPECT_TRUE(parallel) << schedule::print(r.plan());
  expect_no_overlap(r.plan());
}

TEST(Schedule, CatWritesIntoOneBuffer) {
  const Data x = random(6, 1), y = random(10, 2);
  auto r = run(R"(graph @g(%0: f32[2,3] arg "x", %1: f32[2,5] arg "y") {
  %2: f32[2,3] = aten::neg(%0)
  %3: f32[2,8] = aten::cat([%2, %1], 1)
  return %3
})",
               {x, y});
  std::vector<double> want;
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 3; ++j) want.push_back(-x[i * 3 + j]);
    for (int j = 0; j < 5; ++j) want.push_back(y[i * 5 + j]);
  }
  expect_close(r.outputs[0], want, 0);
  EXPECT_EQ(r.plan().arena_bytes, 0) << "the parts are computed in place";
}

TEST(Schedule, TransposesCostNothing) {
  const Data x = random(12, 1), y = random(12, 2);
  auto r = run(R"(graph @g(%0: f32[3,4] arg "x", %1: f32[4,3] arg "y") {
  %2: f32[4,3]{1,4} = aten::t(%0) !view
  %3: f32[4,3] = aten::mul.Tensor(%1, %2)
  %4: f32[3,4]{1,3} = aten::t(%3) !view
  %5: f32[3,4]{1,3} = aten::exp(%4)
  return %5
})",
               {x, y});
  std::vector<double> want;
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 4; ++j) want.push_back(std::exp(double(y[j * 3 + i]) * x[i * 4 + j]));
  expect_close(r.outputs[0], want, 1e-5);
  EXPECT_EQ(r.launches(), 1u);
  EXPECT_EQ(r.plan().arena_bytes, 0);
  const auto& slot = r.plan().slots[r.plan().outputs[0].ref.slot];
  EXPECT_EQ(number(slot.strides[0]), 1);
  EXPECT_EQ(number(slot.strides[1]), 3);
}

TEST(Schedule, CopiesAcrossTheOrderOfMemoryRunInSquares) {
  const int64_t n = 3, c = 20, s = 37;
  auto r = run(R"(graph @f(%0: f32[3,20,37] arg "x", %1: f32[3,37,20] arg "y") {
  %2: f32[3,37,20]{740,1,37} = aten::permute(%0, [0, 2, 1]) !view
  %3: f32[3,37,20] = aten::add.Tensor(%1, %2, 1)
  return %3
})",
               {random(n * c * s, 1), random(n * c * s, 2)});
  const Data x = random(n * c * s, 1), y = random(n * c * s, 2);
  ASSERT_EQ(r.kernels(), 1u);
  EXPECT_EQ(r.scheduled.kernels[0].vector_axis, loop::VectorAxis::Tile) << loop::print(r.scheduled.kernels[0]);
  for (int64_t b = 0; b < n; ++b)
    for (int64_t i = 0; i < s; ++i)
      for (int64_t j = 0; j < c; ++j) EXPECT_EQ(r.outputs[0][(b * s + i) * c + j], y[(b * s + i) * c + j] + x[(b * c + j) * s + i]);
}

TEST(Schedule, ElementwiseChainsFuseUnlessToldNotTo) {
  const std::string chain = R"(graph @g(%0: f32[10,20] arg "x") {
  %1: f32[10,20] = aten::exp(%0)
  %2: f32[10,1] = aten::sum.dim_IntList(%1, [1], true, none)
  %3: f32[10,20] = aten::div.Tensor(%1, %2)
  %4: f32[10,20] = aten::relu(%3)
  return %4
})";
  const Data x = random(200);
  auto fused = run(chain, {x});
  Options off;
  off.fusion = "off";
  auto plain = run(chain, {x}, off);
  EXPECT_EQ(fused.launches(), 1u);
  EXPECT_GT(plain.launches(), 1u);
  expect_no_overlap(plain.plan());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_FLOAT_EQ(fused.outputs[0][i], plain.outputs[0][i]);
}

TEST(Schedule, IdenticalKernelsAreMadeOnce) {
  const Data x = random(24 * 24);
  auto r = run(R"(graph @g(%0: f32[24,24] arg "x") {
  %1: f32[24,24] = aten::_softmax(%0, 1, false)
  %2: f32[24,24]{1,24} = aten::t(%1) !view
  %3: f32[24,24] = aten::clone(%2, contiguous)
  %4: f32[24,24] = aten::_softmax(%3, 1, false)
  %5: f32[24,24]{1,24} = aten::t(%4) !view
  %6: f32[24,24] = aten::clone(%5, contiguous)
  %7: f32[24,24] = aten::_softmax(%6, 1, false)
  return %7
})",
               {x});
  EXPECT_LT(r.kernels(), r.launches()) << schedule::print(r.plan());
  std::vector<double> v(x.begin(), x.end());
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 24; ++i) {
      double sum = 0;
      for (int j = 0; j < 24; ++j) sum += v[i * 24 + j] = std::exp(v[i * 24 + j]);
      for (int j = 0; j < 24; ++j) v[i * 24 + j] /= sum;
    }
    if (round < 2)
      for (int i = 0; i < 24; ++i)
        for (int j = 0; j < i; ++j) std::swap(v[i * 24 + j], v[j * 24 + i]);
  }
  expect_close(r.outputs[0], v);
  expect_no_overlap(r.plan());
}

TEST(Schedule, RowsReadTwiceWaitInScratch) {
  const Data x = random(6 * 50);
  auto r = run(R"(graph @g(%0: f32[6,50] arg "x") {
  %1: f32[6,50] = aten::erf(%0)
  %2: (f32[6,50], f32[6,1], f32[6,1]) = aten::native_layer_norm(%1, [50], none, none, 1e-05)
  return %2
})",
               {x});
  ASSERT_EQ(r.launches(), 1u);
  EXPECT_EQ(r.plan().arena_bytes, 0);
  EXPECT_GE(r.plan().kernels[0].scratch_bytes, 50 * sizeof(float)) << "erf is computed once";
  std::vector<double> want(x.size());
  for (int i = 0; i < 6; ++i) {
    double mean = 0, var = 0;
    for (int j = 0; j < 50; ++j) mean += std::erf(double(x[i * 50 + j])) / 50;
    for (int j = 0; j < 50; ++j) var += std::pow(std::erf(double(x[i * 50 + j])) - mean, 2) / 50;
    for (int j = 0; j < 50; ++j) want[i * 50 + j] = (std::erf(double(x[i * 50 + j])) - mean) / std::sqrt(var + 1e-5);
  }
  expect_close(r.outputs[0], want, 1e-5);
}

TEST(Schedule, MemoryIsReusedAndNeverShared) {
  std::string text = "graph @g(%0: f32[40,40] arg \"x\") {\n";
  int last = 0;
  for (int k = 0; k < 6; ++k) {  // a transposed read in between: each stage needs the whole of the one before
    text += "  %" + std::to_string(last + 1) + ": f32[40,40] = aten::_softmax(%" + std::to_string(last) + ", 1, false)\n";
    text += "  %" + std::to_string(last + 2) + ": f32[40,40]{1,40} = aten::t(%" + std::to_string(last + 1) + ") !view\n";
    last += 2;
  }
  text += "  %" + std::to_string(last + 1) + ": f32[40] = aten::amax(%" + std::to_string(last) + ", [1], false)\n  return %" +
          std::to_string(last + 1) + "\n}";
  auto r = run(text, {random(1600)});
  expect_no_overlap(r.plan());
  EXPECT_GT(r.plan().arena_bytes, 0);
  EXPECT_LE(r.plan().arena_bytes, 3 * 1600 * 4 + 256) << "a stage has three buffers, and eleven take turns in them";
}

TEST(Schedule, ValuesPerRowLeaveTheVectorAlongTheRow) {
  const Data x = random(64 * 40), g = random(64);
  auto r = run(R"(graph @g(%0: f32[64,40] arg "x", %1: f32[64,1] arg "g") {
  %2: (f32[64,40], f32[64,1], f32[64,1]) = aten::native_layer_norm(%0, [40], none, none, 1e-05)
  %3: f32[64,40] = aten::mul.Tensor(%2.0, %1)
  return %3
})",
               {x, g});
  ASSERT_EQ(r.kernels(), 1u);
  EXPECT_EQ(r.scheduled.kernels[0].vector_axis, loop::VectorAxis::Inner)
      << "mean, deviation and scale are read once a row: they say nothing about the loop inside";
}

TEST(Schedule, StridesOfOutputsArePromises) {
  auto r = run(R"(graph @g(%0: f32[2,3] arg "x") {
  %1: f32[2,3]{10,2} = aten::empty_strided([2, 3], [10, 2], f32, none, cpu, none)
  %2: f32[2,0]{5,1} = aten::empty_strided([2, 0], [5, 1], f32, none, cpu, none)
  return %1, %2
})",
               {random(6)});
  EXPECT_EQ(number(r.plan().outputs[0].ref.strides[0]), 10);
  EXPECT_EQ(number(r.plan().outputs[0].ref.strides[1]), 2);
  EXPECT_EQ(number(r.plan().outputs[1].ref.strides[0]), 5);
}

TEST(Schedule, ElementwiseOutputsAreMadeWhereTheyGo) {
  const Data m = random(600), g = random(600);
  auto r = run(R"(graph @g(%0: f32[20,30] arg "m", %1: f32[20,30] arg "g") {
  %2: f32[20,30] = aten::mul.Tensor(%0, %1)
  %3: f32[20,30] = aten::add.Tensor(%2, %0, 1)
  %4: f32[20,30] = aten::mul.Tensor(%3, %3)
  return %3, %4
})",
               {m, g}, {}, {0, -1});
  EXPECT_EQ(r.plan().launches.size(), 1u);
  EXPECT_TRUE(r.plan().outputs[0].in_place);
  EXPECT_FALSE(r.plan().outputs[1].in_place);
  for (size_t i = 0; i < 600; ++i) {
    EXPECT_FLOAT_EQ(r.outputs[0][i], m[i] * g[i] + m[i]);
    EXPECT_FLOAT_EQ(r.outputs[1][i], r.outputs[0][i] * r.outputs[0][i]);
  }
}

TEST(Schedule, ColumnSumsTakeWhatTheySumFromTheSameKernel) {
  // Channels-last: the sums run down the columns of [rows, channels].
  const int64_t rows = 512, channels = 64;
  const Data x = random(rows * channels), g = random(rows * channels);
  auto r = run(R"(graph @g(%0: f32[512,64] arg "x", %1: f32[512,64] arg "g") {
  %2: f32[512,64] = aten::threshold_backward(%1, %0, 0)
  %3: f32[512,64] = aten::mul.Tensor(%2, %0)
  %4: f32[64] = aten::sum.dim_IntList(%2, [0], false, none)
  %5: f32[64] = aten::sum.dim_IntList(%3, [0], false, none)
  return %2, %4, %5
})",
               {x, g});
  EXPECT_EQ(r.plan().launches.size(), 1u);
  for (int64_t c = 0; c < channels; ++c) {
    double sum = 0, product = 0;
    for (int64_t k = 0; k < rows; ++k) {
      const size_t i = static_cast<size_t>(k * channels + c);
      const float kept = x[i] > 0 ? g[i] : 0;
      EXPECT_EQ(r.outputs[0][i], kept);
      sum += kept, product += double{kept} * x[i];
    }
    EXPECT_NEAR(r.outputs[1][static_cast<size_t>(c)], sum, 1e-3);
    EXPECT_NEAR(r.outputs[2][static_cast<size_t>(c)], product, 1e-3);
  }
}

TEST(Schedule, WhatIsStillReadIsNotOverwritten) {
  const char* texts[] = {// read at another index
                         R"(graph @g(%0: f32[24,24] arg "x") {
  %1: f32[24,24]{1,24} = aten::t(%0)
  %2: f32[24,24] = aten::add.Tensor(%0, %1, 1)
  return %2
})",
                         // read by a kernel that runs later
                         R"(graph @g(%0: f32[24,24] arg "x") {
  %1: f32[24,24] = aten::mul.Tensor(%0, %0)
  %2: f32[] = aten::sum(%1, none)
  %3: f32[24,24] = aten::add.Tensor(%0, %2, 1)
  %4: f32[24,24] = aten::mul.Tensor(%0, %3)
  %5: f32[24] = aten::amax(%4, [0], false)
  %6: f32[24,24] = aten::sub.Tensor(%0, %5, 1)
  return %1, %6
})",
                         // is a result itself
                         R"(graph @g(%0: f32[24,24] arg "x") {
  %1: f32[24,24] = aten::mul.Tensor(%0, %0)
  return %1, %0
})",
                         // before a call that may fail
                         R"(graph @g(%0: f32[24,24] arg "x") {
  %1: f32[24,24] = aten::mul.Tensor(%0, %0)
  %2: (f32[24,24], i64[24,24]) = aten::sort(%1, 0, false)
  return %1, %2
})"};
  for (const char* text : texts) {
    auto graph = std::make_shared<ir::Graph>(ir::parse(text));
    auto s = schedule::schedule(graph, {}, {0, -1});
    EXPECT_FALSE(s.plan->outputs[0].in_place) << text;
  }
}

TEST(Schedule, WhatAnOutputIsMadeOfLiesInItsMemory) {
  struct Case {
    const char *rest, *results;
    int64_t others;  // matrices in the arena
  };
  const Case cases[] = {{"%3: f32[700,700] = aten::_softmax(%1, 1, false)", "%3", 0},
                        // in one of two: the other and what it is made of are left
                        {"%3: f32[700,700] = aten::_softmax(%1, 1, false)\n  %4: f32[700,700] = aten::_softmax(%2, 1, false)\n"
                         "  %5: f32[700,700] = aten::mul.Tensor(%3, %4)",
                         "%5", 2},
                        // read at another index
                        {"%3: f32[700,1] = aten::amax(%1, [1], true)\n  %4: f32[700,700]{1,700} = aten::t(%1)\n"
                         "  %5: f32[700,700] = aten::sub.Tensor(%4, %3, 1)",
                         "%5", 1},
                        // still read
                        {"%3: f32[700,700] = aten::_softmax(%1, 1, false)\n  %4: f32[] = aten::amax(%3, []i, false)\n"
                         "  %5: f32[700,700] = aten::mul.Tensor(%1, %4)\n  %6: f32[700] = aten::sum.dim_IntList(%5, [0], false, none)",
                         "%3, %6", 1}};
  const Data x = random(700 * 700);
  Options apart;
  apart.fusion = "off";
  for (const Case& c : cases) {
    const std::string text = fmt::format(R"(graph @g(%0: f32[700,700] arg "x") {{
  %1: f32[700,700] = aten::sin(%0)
  %2: f32[700,700] = aten::cos(%0)
  {}
  return {}
}})",
                                         c.rest, c.results);
    auto together = run(text, {x}), r = run(text, {x}, apart);
    EXPECT_EQ(r.plan().arena_bytes / (700 * 700 * 4), c.others) << text;
    for (size_t o = 0; o < r.outputs.size(); ++o) expect_close(r.outputs[o], {together.outputs[o].begin(), together.outputs[o].end()}, 1e-5);
  }
}

TEST(Schedule, ExternOperandsHaveTheStridesOfTheGraph) {
  auto graph = std::make_shared<ir::Graph>(ir::parse(R"(graph @g(%0: f32[8]{2} arg "x") {
  %1: f32[8] = aten::clone(%0, contiguous)
  %2: (f32[8], i64[8]) = aten::sort(%1, 0, false)
  return %2
})"));
  auto s = schedule::schedule(graph, {});
  ASSERT_EQ(s.plan->externs.size(), 1u);
  EXPECT_EQ(number(s.plan->externs[0].operands[0].strides[0]), 1);
}

}  // namespace
}  // namespace vitrify
