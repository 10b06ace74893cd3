// One compiled model called by many threads, and many models compiled at once.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <fstream>
#include <latch>
#include <thread>

#include "vitrify/compile.h"

namespace door {
namespace {

using at::Tensor;

torch::nn::Sequential make_net(int64_t width) {
  torch::nn::Sequential net(torch::nn::Linear(16, width), torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})), torch::nn::GELU(),
                            torch::nn::Linear(width, 8), torch::nn::Softmax(-1));
  net->eval();
  return net;
}
// Sequential's forward is a template: a callable of one signature around it.
auto callable(torch::nn::Sequential net) {
  return [net](Tensor x) mutable { return net->forward(x); };
}

template <class F>
void in_threads(int n, F&& body) {
  std::latch start(n);
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i)
    threads.emplace_back([&, i] {
      at::NoGradGuard no_grad;
      start.arrive_and_wait();
      body(i);
    });
  for (auto& t : threads) t.join();
}

size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  size_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * 4096;
}

TEST(DoorThreads, OneModelManyCallers) {
  at::NoGradGuard no_grad;
  vitrify::reset_counters();
  auto net = make_net(32);
  auto fast = vitrify::compile(callable(net));
  std::atomic<int> wrong{0};
  auto round = [&](int calls) {
    in_threads(100, [&](int i) {
      Tensor x = torch::full({4, 16}, 0.01 * i), want = net->forward(x);
      for (int k = 0; k < calls; ++k)
        if (!at::allclose(fast(x), want, 1e-5, 1e-6)) ++wrong;
    });
  };
  round(3);
  EXPECT_EQ(vitrify::counters_map().at("captures"), 1u);  // all of them asked at once
  EXPECT_EQ(vitrify::counters_map().at("eager_calls"), 0u);
  [[maybe_unused]] const size_t before = resident_bytes();
  for (int r = 0; r < 4; ++r) round(5);
  EXPECT_EQ(wrong, 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they keep freed memory
  EXPECT_LT(resident_bytes(), before + (64u << 20));
#endif
}

TEST(DoorThreads, ManySignaturesManyCallers) {
  at::NoGradGuard no_grad;
  auto net = make_net(32);
  auto fast = vitrify::compile(callable(net));
  std::atomic<int> wrong{0};
  in_threads(24, [&](int i) {
    for (int k = 0; k < 6; ++k) {
      Tensor x = torch::full({1 + (i + k) % 12, 16}, 0.1 * i);
      if (!at::allclose(fast(x), net->forward(x), 1e-5, 1e-6)) ++wrong;
      if (i == 0 && k == 3) fast.reset();
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(DoorThreads, ManyModelsCompiledAtOnce) {
  std::atomic<int> wrong{0};
  vitrify::reset_counters();
  in_threads(16, [&](int i) {
    auto net = make_net(16 + i);
    auto fast = vitrify::compile(callable(net));
    Tensor x = torch::full({3, 16}, 0.1);
    for (int k = 0; k < 3; ++k)
      if (!at::allclose(fast(x), net->forward(x), 1e-5, 1e-6)) ++wrong;
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(vitrify::counters_map().at("captures"), 16u);
  EXPECT_EQ(vitrify::counters_map().at("eager_calls"), 0u);
}

TEST(DoorThreads, WritersAndReaders) {
  at::NoGradGuard no_grad;
  auto fast = vitrify::compile([](Tensor x, Tensor out) { out.copy_(x * 2 + 1); });
  std::atomic<int> wrong{0};
  in_threads(16, [&](int i) {
    Tensor x = torch::full({64}, double(i)), out = torch::zeros({64});
    for (int k = 0; k < 20; ++k) {
      fast(x, out.zero_());
      if (!out.equal(x * 2 + 1)) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
}

// Its launches are cut for several threads, alone and with barriers between them, as are the ops of our own: what the sanitizers are to see.
TEST(DoorThreads, RegionsOfOneCall) {
  at::NoGradGuard no_grad;
#ifndef __SANITIZE_THREAD__  // whose builds have teams of four, and torch's regions one thread
  struct Threads {
    int before = at::get_num_threads();
    Threads() { at::set_num_threads(4); }
    ~Threads() { at::set_num_threads(before); }
  } threads;
#endif
  auto chain = [](Tensor x, Tensor w) {
    Tensor y = (x - x.mean(0)).div_(x.std(0) + 1), z = at::softmax(y.tanh(), -1);
    Tensor q = at::mm(z, w).view({2, 4, -1, 32});
    Tensor a = at::scaled_dot_product_attention(q, q, q);
    return std::vector<Tensor>{z.cumsum(0), a, y.t().contiguous().amax(-1) + z.sum(), at::index_select(x, 0, at::arange(511, -1, -1)).exp()};
  };
  auto fast = vitrify::compile(chain);
  auto alone = [](Tensor x) { return x.sin() + 1; };  // one launch, a region of its own
  auto fast_alone = vitrify::compile(alone);
  vitrify::reset_counters();
  Tensor x = at::sin(at::arange(512. * 256)).to(at::kFloat).view({512, 256}), w = at::cos(at::arange(256. * 128)).to(at::kFloat).view({256, 128});
  for (int k = 0; k < 3; ++k) {
    const std::vector<Tensor> got = fast(x + k, w), want = chain(x + k, w);
    for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::allclose(got[i], want[i], 1e-4, 1e-4)) << i;
    EXPECT_TRUE(at::allclose(fast_alone(x + k), alone(x + k), 1e-5, 1e-6));
  }
  EXPECT_EQ(vitrify::counters_map().at("eager_calls"), 0u);
  EXPECT_GE(vitrify::counters_map().at("kernels_launched"), 12u);
}

}  // namespace
}  // namespace door
