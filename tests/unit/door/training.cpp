// The C++ door under gradients: what a compiled call gives autograd, beside eager. Run under asan.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <vitrify/compile.h>

#include <cstdio>
#include <thread>

#include "expects.h"
#include "net.h"

using namespace torch;

namespace {

std::vector<Tensor> gradients(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> r;
  for (const Tensor& p : parameters) r.push_back(p.grad().defined() ? p.grad().clone() : Tensor());
  return r;
}

void expect_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    if (a[i].defined()) EXPECT_TRUE(allclose(a[i], b[i], 1e-4, 1e-6)) << i;
  }
}

// Native kernels run, and nothing eagerly; a test that means to run eagerly says so.
struct Training : testing::Test {
  uint64_t launched = count("kernels_launched"), eager = count("eager_calls"), fallbacks = count("fallbacks");
  bool native = true;
  void TearDown() override {
    if (!native) return;
    EXPECT_GT(count("kernels_launched"), launched);
    EXPECT_EQ(count("eager_calls"), eager);
    EXPECT_EQ(count("fallbacks"), fallbacks);
  }
};

}  // namespace

TEST_F(Training, GradientsOfAModule) {
  manual_seed(0);
  Net net;
  auto fast = vitrify::compile(net, {.fullgraph = true});
  Tensor x = torch::randn({5, 8}, torch::requires_grad());
  net->forward(x).square().mean().backward();
  auto eager = gradients(net->parameters());
  Tensor gx = x.grad().clone();
  for (int i = 0; i < 3; ++i) {
    net->zero_grad();
    x.mutable_grad() = Tensor();
    const uint64_t before = count("kernels_launched");
    Tensor y = fast(x);
    ASSERT_TRUE(y.requires_grad());
    y.square().mean().backward();
    EXPECT_GT(count("kernels_launched"), before);
    expect_same(gradients(net->parameters()), eager);
    EXPECT_TRUE(allclose(x.grad(), gx, 1e-4, 1e-6));
    EXPECT_FALSE(net->unused->weight.grad().defined());
  }
}

TEST_F(Training, OnlyWhatGradientsComeBackThrough) {
  auto f = vitrify::compile([](Tensor x) { return std::make_tuple(x * 2, x.log()); }, {.fullgraph = true});
  Tensor x = torch::zeros({3}, torch::requires_grad());
  auto [a, b] = f(x);
  a.sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::full({3}, 2.0)));  // a zero gradient of the logarithm would make it NaN
}

TEST_F(Training, TwiceWithoutKeepingIsEagersError) {
  auto f = vitrify::compile([](Tensor x) { return x.exp().sum(); }, {.fullgraph = true});
  Tensor x = torch::ones({4}, torch::requires_grad());
  Tensor y = f(x);
  y.backward({}, /*keep_graph=*/true);
  y.backward();
  EXPECT_TRUE(allclose(x.grad(), x.detach().exp() * 2));
  EXPECT_THAT([&] { y.backward(); }, testing::ThrowsMessage<c10::Error>(testing::HasSubstr("backward through the graph a second time")));
}

TEST_F(Training, LossesOfOneCallAreIndependent) {
  auto program = [](Tensor x, Tensor y) { return std::make_tuple((x * x.exp()).sum(), (y * y.sin()).sum(), (x + y).sum()); };
  auto f = vitrify::compile(program, {.fullgraph = true});
  auto run = [](auto&& g) {
    Tensor x = torch::ones({4}, torch::requires_grad()), y = torch::full({4}, 2.0, torch::requires_grad());
    auto [first, second, sum] = g(x, y);
    sum.backward();
    first.backward();
    second.backward();
    sum.backward();  // it has saved nothing
    EXPECT_THAT([&] { first.backward(); }, testing::ThrowsMessage<c10::Error>(testing::HasSubstr("backward through the graph a second time")));
    return std::vector<Tensor>{x.grad(), y.grad()};
  };
  expect_same(run(f), run(program));
}

TEST_F(Training, WhatIsReadAndThenWrittenIsKept) {
  auto program = [](Tensor x, Tensor b) {
    Tensor y = (x * b.exp()).sin();
    b.add_(1);
    return y;
  };
  auto f = vitrify::compile(program, {.fullgraph = true});
  auto run = [](auto&& g) {
    Tensor x = torch::linspace(0, 1, 4).set_requires_grad(true), b = torch::linspace(-1, 1, 4);
    Tensor first = autograd::grad({g(x, b).sum()}, {x}, {}, true, true)[0];
    return std::vector<Tensor>{first.detach(), autograd::grad({first.square().sum()}, {x})[0], b};
  };
  expect_same(run(f), run(program));
}

TEST_F(Training, NothingIsHeldByWhatItComesToHold) {
  auto f = vitrify::compile([](Tensor h, Tensor w) { return (h * w).sin(); }, {.fullgraph = true});
  Tensor w = torch::ones({4}, torch::requires_grad());
  for (int i = 0; i < 3; ++i) {
    Tensor h = torch::ones({4});
    c10::weak_intrusive_ptr<c10::StorageImpl> memory(h.storage().getWeakStorageImpl());
    h.add_(f(h, w));
    h = Tensor();
    EXPECT_TRUE(memory.expired()) << i;
  }
}

TEST_F(Training, ChangedBetweenForwardAndBackward) {
  auto f = vitrify::compile([](Tensor x) { return (x * x).sum(); }, {.fullgraph = true});
  Tensor x = torch::ones({4}, torch::requires_grad());
  Tensor y = f(x);
  {
    NoGradGuard no_grad;
    x.mul_(3);
  }
  EXPECT_THAT([&] { y.backward(); }, testing::ThrowsMessage<c10::Error>(testing::HasSubstr("modified by an inplace operation")));
}

TEST_F(Training, GradientsOfGradients) {
  auto program = [](Tensor x, Tensor w) { return (matmul(x, w).tanh() * x.detach()).pow(2).sum(); };
  auto f = vitrify::compile(program, {.fullgraph = true});
  manual_seed(1);
  Tensor x = torch::randn({4, 4}), w = torch::randn({4, 4});
  auto third = [&](auto&& g) {
    Tensor a = x.clone().requires_grad_(), b = w.clone().requires_grad_();
    auto one = autograd::grad({g(a, b)}, {a, b}, {}, true, true);
    auto two = autograd::grad({one[0].pow(2).sum() + one[1].pow(3).sum()}, {a, b}, {}, true, true);
    auto three = autograd::grad({two[0].pow(2).sum() + two[1].sum()}, {a, b});
    return std::vector<Tensor>{one[0], one[1], two[0], two[1], three[0], three[1]};
  };
  auto eager = third(program), ours = third(f);
  for (size_t i = 0; i < eager.size(); ++i) EXPECT_TRUE(allclose(eager[i], ours[i], 1e-3, 1e-3)) << i;
}

TEST_F(Training, WritesThatGradientsFollow) {
  auto program = [](Tensor x, Tensor w) { return x.mul_(w) + 1; };
  auto f = vitrify::compile(program, {.fullgraph = true});
  auto run = [](auto&& g) {
    Tensor b = torch::arange(6.0).reshape({2, 3}).set_requires_grad(true), w = torch::full({3}, 2.0, torch::requires_grad());
    Tensor y = b * 1, v = y[0];
    Tensor made = g(v, w).sum();
    (made + y.pow(2).sum() + v.sum()).backward();
    return std::vector<Tensor>{b.grad(), w.grad()};
  };
  expect_same(run(f), run(program));
}

// What is found and what is given of it are two inputs of the program: no gradient came to the second.
TEST_F(Training, GradientsByAnArgumentThatIsFoundToo) {
  native = false;
  expects::eager("may go back to an argument that it also reaches by itself");
  const auto run = [](bool compiles) {
    Tensor w = torch::arange(3.0).set_requires_grad(true), other = torch::ones({3}, torch::requires_grad());
    auto program = [w](Tensor x, Tensor b) {
      (x * w).sum().backward({}, std::nullopt, false, std::vector<Tensor>{b});
      return x * 2;
    };
    auto f = vitrify::compile(program);
    std::vector<Tensor> r;
    for (const Tensor& b : {other, w, other, w}) {
      w.mutable_grad() = Tensor();
      Tensor x = torch::full({3}, 2.0);
      r.push_back(compiles ? f(x, b) : program(x, b));
      r.push_back(w.grad().defined() ? w.grad().clone() : Tensor());
    }
    return r;
  };
  expect_same(run(true), run(false));
}

TEST_F(Training, MemoryStaysFlat) {
  manual_seed(0);
  Net net;
  auto fast = vitrify::compile(net, {.fullgraph = true});
  optim::SGD optimizer(net->parameters(), 0.01);
  Tensor x = torch::randn({64, 8});
  long early = 0;
  for (int i = 0; i < 1000; ++i) {
    optimizer.zero_grad();
    fast(x).square().mean().backward();
    optimizer.step();
    if (i == 200) early = resident_pages();
  }
  EXPECT_LT(resident_pages() - early, kFlatPages);
}

// Its derivative is not linear: gradients of two levels meet in front of it.
struct Clip : torch::autograd::Function<Clip> {
  static Tensor forward(torch::autograd::AutogradContext*, Tensor x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list grads) {
    return {torch::minimum(grads[0].clamp_min(-1), torch::ones({}, grads[0].options()))};
  }
};

TEST_F(Training, DerivativesOfUsersTakeAllOfAGradient) {
  const auto program = [](Tensor x) {
    Tensor h = Clip::apply(x);
    return std::make_tuple(h * h, h.sin());
  };
  auto f = vitrify::compile(program, {.fullgraph = true});
  const auto of = [](Tensor t, Tensor x) { return torch::autograd::grad({t.sum()}, {x}, {}, true, true)[0]; };
  const auto run = [&](auto&& f, bool two) {
    Tensor x = torch::tensor({0.4f, 0.1f, 2.0f}).requires_grad_();
    auto [a, b] = f(x);
    Tensor loss = of(a, x).square().sum() + (two ? of(b, x).square().sum() : a.sum() + b.sum());
    loss.backward();
    return x.grad();
  };
  for (bool two : {false, true})
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(allclose(run(f, two), run(program, two))) << run(f, two) << run(program, two);
}

TEST(DoorThreads, Training) {
  std::vector<std::thread> threads;
  std::vector<char> good(8);
  for (size_t k = 0; k < good.size(); ++k)
    threads.emplace_back([&, k] {
      Net net;
      auto fast = vitrify::compile(net, {.fullgraph = true});
      Tensor x = torch::randn({5, 8});
      net->forward(x).square().mean().backward();
      auto eager = gradients(net->parameters());
      bool same = true;
      for (int i = 0; i < 3; ++i) {
        net->zero_grad();
        fast(x).square().mean().backward();
        auto ours = gradients(net->parameters());
        for (size_t p = 0; p < ours.size(); ++p)
          same = same && ours[p].defined() == eager[p].defined() && (!ours[p].defined() || allclose(ours[p], eager[p], 1e-4, 1e-6));
      }
      good[k] = same;
    });
  for (auto& t : threads) t.join();
  EXPECT_THAT(good, testing::Each(1));
}
