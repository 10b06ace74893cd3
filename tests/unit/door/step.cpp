// compile_step: a whole step of training in one call, beside the loop that it stands for. Run under asan.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <vitrify/step.h>

#include <cstdio>
#include <sstream>
#include <thread>

#include "expects.h"
#include "net.h"

using namespace torch;
using testing::HasSubstr;

namespace {

Net make_net(ScalarType type = kFloat) {
  manual_seed(0);
  Net net;
  net->to(type);
  return net;
}

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(std::vector<Tensor>)>;
template <class O, class Options>
MakeOptimizer make(Options options) {
  return [=](std::vector<Tensor> p) { return std::make_unique<O>(std::move(p), options); };
}

Tensor loss_of(const Tensor& out, const Tensor& target) { return cross_entropy_loss(out, target); }

// Input and class of each row of step `i`.
std::pair<Tensor, Tensor> batch(int i, int64_t rows = 32) {
  manual_seed(100 + i);
  Tensor x = torch::randn({rows, 8});
  return {x, (x.sum(1) > 0).to(kLong) + (x.select(1, 0) > 0).to(kLong) * 2};
}

template <class Module>
Tensor eager_step(Module& net, optim::Optimizer& optimizer, const Tensor& x, const Tensor& y) {
  optimizer.zero_grad();
  Tensor l = loss_of(net->forward(x), y);
  l.backward();
  optimizer.step();
  return l.detach();
}

Tensor all_of(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> flat;
  for (const Tensor& t : tensors) flat.push_back(t.detach().to(kDouble).flatten());
  return cat(flat);
}

// No further from `exact` than twice what eager is.
void expect_as_accurate(const Tensor& ours, const Tensor& eager, const Tensor& exact) {
  const double mine = (ours.to(kDouble) - exact).norm().item<double>(), theirs = (eager.to(kDouble) - exact).norm().item<double>();
  EXPECT_LE(mine, 2 * theirs + 1e-7 * exact.norm().item<double>());
}

void expect_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    EXPECT_TRUE(!a[i].defined() || allclose(a[i], b[i], 1e-4, 1e-6)) << i << "\n" << a[i] << "\n" << b[i];
  }
}

std::vector<Tensor> grads_of(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> r;
  for (const Tensor& p : parameters) r.push_back(p.grad());
  return r;
}

// Native kernels run, and nothing eagerly.
struct StepTest : testing::Test {
  uint64_t launched = count("kernels_launched"), eager = count("eager_calls"), fallbacks = count("fallbacks");
  bool native = true;
  void TearDown() override {
    if (!native) return;
    EXPECT_GT(count("kernels_launched"), launched);
    EXPECT_EQ(count("eager_calls"), eager);
    EXPECT_EQ(count("fallbacks"), fallbacks);
  }
};

struct Case {
  const char* name;
  MakeOptimizer optimizer;
};
void PrintTo(const Case& c, std::ostream* o) { *o << c.name; }
struct StepRule : StepTest, testing::WithParamInterface<Case> {};

optim::SGDOptions sgd(double lr) { return optim::SGDOptions(lr); }
const Case kCases[] = {
    {"SGD", make<optim::SGD>(sgd(0.1))},
    {"SGD_decay", make<optim::SGD>(sgd(0.1).weight_decay(0.01))},
    {"SGD_momentum", make<optim::SGD>(sgd(0.1).momentum(0.9).dampening(0.3).weight_decay(0.01))},
    {"SGD_nesterov", make<optim::SGD>(sgd(0.1).momentum(0.9).nesterov(true))},
    {"Adam", make<optim::Adam>(optim::AdamOptions(1e-2))},
    {"Adam_amsgrad", make<optim::Adam>(optim::AdamOptions(1e-2).weight_decay(0.01).amsgrad(true).betas({0.8, 0.9}))},
    {"AdamW", make<optim::AdamW>(optim::AdamWOptions(1e-2).weight_decay(0.1))},
    {"AdamW_amsgrad", make<optim::AdamW>(optim::AdamWOptions(1e-2).weight_decay(0).amsgrad(true).eps(1e-6))},
    {"Adagrad", make<optim::Adagrad>(optim::AdagradOptions(1e-2))},
    {"Adagrad_decay", make<optim::Adagrad>(optim::AdagradOptions(1e-2).lr_decay(0.1).weight_decay(0.01).initial_accumulator_value(0.5))},
    {"RMSprop", make<optim::RMSprop>(optim::RMSpropOptions(1e-3))},
    {"RMSprop_centered", make<optim::RMSprop>(optim::RMSpropOptions(1e-3).centered(true).momentum(0.5).weight_decay(0.01))},
};

}  // namespace

TEST_P(StepRule, AsEager) {
  Net net = make_net(), twin = make_net(), exact = make_net(kDouble);
  auto optimizer = GetParam().optimizer(net->parameters()), eager = GetParam().optimizer(twin->parameters()),
       in_double = GetParam().optimizer(exact->parameters());
  auto step = vitrify::compile_step(net, *optimizer, loss_of, {.fullgraph = true});
  const uint64_t captures = count("captures"), recompiles = count("recompiles");
  std::vector<Tensor> ours, theirs, double_losses;
  for (int i = 0; i < 20; ++i) {
    for (auto* o : {optimizer.get(), eager.get(), in_double.get()})
      o->param_groups()[0].options().set_lr(o->param_groups()[0].options().get_lr() * 0.9);  // as a scheduler does
    auto [x, y] = batch(i);
    ours.push_back(step(x, y));
    theirs.push_back(eager_step(twin, *eager, x, y));
    double_losses.push_back(eager_step(exact, *in_double, x.to(kDouble), y));
    EXPECT_FALSE(ours.back().requires_grad());
    expect_same(grads_of(net->parameters()), grads_of(twin->parameters()));
  }
  EXPECT_EQ(count("captures"), captures + 1);
  EXPECT_EQ(count("recompiles"), recompiles);
  expect_as_accurate(all_of(ours), all_of(theirs), all_of(double_losses));
  expect_as_accurate(all_of(net->parameters()), all_of(twin->parameters()), all_of(exact->parameters()));
  // The state is what step() keeps: one goes on where the other stopped.
  EXPECT_EQ(optimizer->state().size(), eager->state().size());
  for (int i = 20; i < 23; ++i) {
    auto [x, y] = batch(i);
    eager_step(net, *optimizer, x, y);
    eager_step(twin, *eager, x, y);
  }
  step(batch(23).first, batch(23).second);
  eager_step(twin, *eager, batch(23).first, batch(23).second);
  expect_same(net->parameters(), twin->parameters());
  EXPECT_EQ(count("captures"), captures + 1);
  for (size_t i = 0; i < net->parameters().size(); ++i) EXPECT_EQ(net->parameters()[i]._version(), twin->parameters()[i]._version()) << i;
}
INSTANTIATE_TEST_SUITE_P(Optimizers, StepRule, testing::ValuesIn(kCases), [](const auto& info) { return info.param.name; });

TEST_F(StepTest, GroupsAndFrozenParameters) {
  auto groups = [](Net& net) {
    net->a->bias.set_requires_grad(false);
    std::vector<optim::OptimizerParamGroup> g;
    g.emplace_back(net->a->parameters(), std::make_unique<optim::AdamWOptions>(1e-2));
    g.emplace_back(net->b->parameters(), std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(1e-3).weight_decay(0)));
    g.emplace_back(net->norm->parameters());
    g.emplace_back(net->unused->parameters());
    return std::make_unique<optim::AdamW>(g, optim::AdamWOptions(5e-3));
  };
  Net net = make_net(), twin = make_net();
  auto optimizer = groups(net), eager = groups(twin);
  auto step = vitrify::compile_step(net, *optimizer, loss_of, {.fullgraph = true});
  net->unused->weight.mutable_grad() = torch::ones({2, 2});  // left by somebody
  for (int i = 0; i < 6; ++i) {
    auto [x, y] = batch(i);
    EXPECT_TRUE(allclose(step(x, y), eager_step(twin, *eager, x, y), 1e-4, 1e-6));
    expect_same(grads_of(net->parameters()), grads_of(twin->parameters()));
    EXPECT_FALSE(net->unused->weight.grad().defined());
  }
  expect_same(net->parameters(), twin->parameters());
  EXPECT_EQ(optimizer->state().size(), eager->state().size());
  const uint64_t captures = count("captures");
  // A group that comes later is one more compile, and its state starts at its first step.
  for (auto* n : {&net, &twin}) (*n)->a->bias.set_requires_grad(true);
  for (int i = 6; i < 12; ++i) {
    auto [x, y] = batch(i);
    step(x, y), eager_step(twin, *eager, x, y);
  }
  EXPECT_EQ(count("captures"), captures + 1);
  expect_same(net->parameters(), twin->parameters());
}

TEST_F(StepTest, SavedAndLoaded) {
  Net net = make_net(), twin = make_net();
  optim::Adam optimizer(net->parameters(), optim::AdamOptions(1e-2)), eager(twin->parameters(), optim::AdamOptions(1e-2));
  auto step = vitrify::compile_step(net, optimizer, loss_of, {.fullgraph = true});
  auto both = [&](int from, int to) {
    for (int i = from; i < to; ++i) {
      auto [x, y] = batch(i);
      step(x, y), eager_step(twin, eager, x, y);
    }
  };
  both(0, 3);
  std::stringstream ours, theirs;
  torch::save(optimizer, ours), torch::save(eager, theirs);
  both(3, 5);
  torch::load(optimizer, theirs), torch::load(eager, ours);  // each other's
  both(5, 8);
  expect_same(net->parameters(), twin->parameters());
  optimizer.state().clear(), eager.state().clear();
  both(8, 10);
  expect_same(net->parameters(), twin->parameters());
}

TEST_F(StepTest, OptionsThatChangeTheProgram) {
  Net net = make_net(), twin = make_net();
  optim::SGD optimizer(net->parameters(), 0.1), eager(twin->parameters(), 0.1);
  auto step = vitrify::compile_step(net, optimizer, loss_of, {.fullgraph = true});
  for (int i = 0; i < 8; ++i) {
    for (auto* o : {&optimizer, &eager}) {
      auto& options = static_cast<optim::SGDOptions&>(o->param_groups()[0].options());
      if (i == 3) options.momentum(0.9);
      if (i == 5) options.weight_decay(0.1);
    }
    auto [x, y] = batch(i);
    step(x, y), eager_step(twin, eager, x, y);
  }
  expect_same(net->parameters(), twin->parameters());
}

TEST_F(StepTest, BatchesOfAnySize) {
  Net net = make_net(), twin = make_net();
  optim::AdamW optimizer(net->parameters()), eager(twin->parameters());
  auto step = vitrify::compile_step(net, optimizer, loss_of, {.fullgraph = true});
  const uint64_t captures = count("captures");
  int i = 0;
  for (int64_t rows : {32, 20, 7, 32, 51, 9, 20}) {
    auto [x, y] = batch(i++, rows);
    EXPECT_TRUE(allclose(step(x, y), eager_step(twin, eager, x, y), 1e-4, 1e-6)) << rows;
  }
  expect_same(net->parameters(), twin->parameters());
  EXPECT_EQ(count("captures"), captures + 2);
}

TEST_F(StepTest, NormsStatisticsAndDropout) {
  auto make = [] {
    manual_seed(0);
    return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).bias(false)), nn::BatchNorm2d(8), nn::ReLU(), nn::Flatten(), nn::Dropout(0.5),
                          nn::Linear(8 * 36, 4));
  };
  nn::Sequential net = make(), twin = make();
  optim::RMSprop optimizer(net->parameters()), eager(twin->parameters());
  struct WrapImpl : nn::Module {
    nn::Sequential inner;
    explicit WrapImpl(nn::Sequential s) : inner(register_module("inner", std::move(s))) {}
    Tensor forward(Tensor x) { return inner->forward(x); }
  };
  auto wrapped = std::make_shared<WrapImpl>(net), other = std::make_shared<WrapImpl>(twin);
  auto step = vitrify::compile_step(wrapped, optimizer, loss_of, {.fullgraph = true});
  for (int i = 0; i < 5; ++i) {
    manual_seed(i);
    Tensor x = torch::randn({16, 3, 8, 8}), y = torch::randint(4, {16});
    manual_seed(50 + i);
    Tensor ours = step(x, y), after = torch::rand({1});
    manual_seed(50 + i);
    Tensor theirs = eager_step(other, eager, x, y);
    EXPECT_TRUE(allclose(ours, theirs, 1e-4, 1e-5)) << i;
    EXPECT_TRUE(after.equal(torch::rand({1})));
  }
  expect_same(wrapped->buffers(), other->buffers());
}

// Which branch runs is an argument: parameters get their first gradient at different times.
struct BranchesImpl : nn::Module {
  nn::Linear stem{nullptr}, left{nullptr}, right{nullptr};
  BranchesImpl()
      : stem(register_module("stem", nn::Linear(8, 8))),
        left(register_module("left", nn::Linear(8, 4))),
        right(register_module("right", nn::Linear(8, 4))) {}
  Tensor forward(Tensor x, bool go_left) { return (go_left ? left : right)(stem(x).tanh()); }
};
TORCH_MODULE(Branches);

TEST_F(StepTest, ParametersUpdatedAtDifferentTimes) {
  manual_seed(0);
  Branches net;
  manual_seed(0);
  Branches twin;
  optim::Adam optimizer(net->parameters(), optim::AdamOptions(1e-2)), eager(twin->parameters(), optim::AdamOptions(1e-2));
  auto step = vitrify::compile_step(net, optimizer, loss_of, {.fullgraph = true});
  const uint64_t captures = count("captures");
  for (int i = 0; i < 24; ++i) {
    auto [x, y] = batch(i);
    const bool left = i < 3 || i % 3 == 0;
    Tensor l = step(x, left, y);
    eager.zero_grad();
    Tensor e = loss_of(twin->forward(x, left), y);
    e.backward();
    eager.step();
    EXPECT_TRUE(allclose(l, e, 1e-4, 1e-6)) << i;
    expect_same(grads_of(net->parameters()), grads_of(twin->parameters()));
  }
  expect_same(net->parameters(), twin->parameters());
  EXPECT_LE(count("captures"), captures + 5);
}

TEST_F(StepTest, GradientsThatOthersSee) {
  // Hooks, an argument that needs gradients, parameters that the optimizer does not hold: two programs.
  Net net = make_net(), twin = make_net();
  auto held = [](Net& n) {
    auto p = n->a->parameters();
    for (const Tensor& t : n->b->parameters()) p.push_back(t);
    return p;
  };
  optim::AdamW optimizer(held(net)), eager(held(twin));
  auto step = vitrify::compile_step(net, optimizer, loss_of, {.fullgraph = true});
  int calls = 0;
  for (auto* n : {&net, &twin})
    (*n)->b->weight.register_hook([&calls](const Tensor& g) {
      ++calls;
      return g * 2;
    });
  Tensor ours = torch::zeros({32, 8}, torch::requires_grad()), theirs = torch::zeros({32, 8}, torch::requires_grad());
  for (int i = 0; i < 4; ++i) {
    auto [x, y] = batch(i);
    step(ours + x, y), eager_step(twin, eager, theirs + x, y);
    expect_same(grads_of(net->parameters()), grads_of(twin->parameters()));  // the norm's add up
  }
  EXPECT_EQ(calls, 8);
  EXPECT_TRUE(allclose(ours.grad(), theirs.grad(), 1e-4, 1e-6));
  expect_same(net->parameters(), twin->parameters());
}

TEST_F(StepTest, OtherOptimizers) {
  struct Halving : optim::SGD {  // a user's own, which an inherited rule must not replace
    using SGD::SGD;
    Tensor step(LossClosure closure = nullptr) override {
      NoGradGuard no_grad;
      for (Tensor& p : param_groups()[0].params())
        if (p.grad().defined()) p.sub_(p.grad().sign() * 1e-3);
      return {};
    }
  };
  auto check = [](const MakeOptimizer& make, const std::function<void(Net&, optim::Optimizer&, const Tensor&, const Tensor&)>& eager_step) {
    Net net = make_net(), twin = make_net();
    auto optimizer = make(net->parameters()), eager = make(twin->parameters());
    auto step = vitrify::compile_step(net, *optimizer, loss_of, {.fullgraph = true});
    for (int i = 0; i < 4; ++i) {
      auto [x, y] = batch(i);
      Tensor l = step(x, y);
      EXPECT_FALSE(l.requires_grad());
      eager_step(twin, *eager, x, y);
    }
    for (size_t i = 0; i < net->parameters().size(); ++i) EXPECT_TRUE(allclose(net->parameters()[i], twin->parameters()[i], 1e-3, 1e-4)) << i;
  };
  check(make<Halving>(sgd(0.1)), [](Net& n, optim::Optimizer& o, const Tensor& x, const Tensor& y) { eager_step(n, o, x, y); });
  check(make<optim::LBFGS>(optim::LBFGSOptions(0.1).max_iter(3)), [](Net& n, optim::Optimizer& o, const Tensor& x, const Tensor& y) {
    o.step([&] {
      o.zero_grad();
      Tensor l = loss_of(n->forward(x), y);
      l.backward();
      return l;
    });
  });
}

TEST_F(StepTest, WhatCannotBeCaptured) {
  expects::eager("reads a tensor's value: aten::item");
  native = false;  // runs eagerly, and says so
  auto reads = [](const Tensor& out, const Tensor& y) { return loss_of(out, y) * (out.sum().item<float>() > 1e9 ? 2 : 1); };
  Net net = make_net(), twin = make_net();
  optim::AdamW optimizer(net->parameters()), eager(twin->parameters());
  auto step = vitrify::compile_step(net, optimizer, reads);
  for (int i = 0; i < 3; ++i) {
    auto [x, y] = batch(i);
    step(x, y), eager_step(twin, eager, x, y);
  }
  expect_same(net->parameters(), twin->parameters());
  EXPECT_EQ(optimizer.state().size(), eager.state().size());
  EXPECT_GT(count("eager_calls"), this->eager);
  auto strict = vitrify::compile_step(net, optimizer, reads, {.fullgraph = true});
  EXPECT_THROW(strict(batch(0).first, batch(0).second), vitrify::CaptureError);
}

TEST_F(StepTest, ErrorsAreEagers) {
  native = false;
  Net net = make_net();
  optim::Adam optimizer(net->parameters());
  auto step = vitrify::compile_step(net, optimizer, loss_of);
  auto [x, y] = batch(0);
  step(x, y);
  const Tensor before = all_of(net->parameters());
  Tensor wrong = y.clone();
  wrong[3] = 77;
  EXPECT_THAT([&] { step(x, wrong); }, testing::ThrowsMessage<c10::Error>(HasSubstr("out of bounds")));
  EXPECT_TRUE(before.equal(all_of(net->parameters())));
  for (auto& [p, state] : optimizer.state()) EXPECT_EQ(static_cast<optim::AdamParamState&>(*state).step(), 1);
  auto rows = vitrify::compile_step(net, optimizer, [](Tensor out, Tensor) { return out.sum(1); });
  EXPECT_THAT([&] { rows(x, y); }, testing::ThrowsMessage<c10::Error>(HasSubstr("grad can be implicitly created only for scalar outputs")));
  NoGradGuard no_grad;
  EXPECT_THAT([&] { step(x, y); }, testing::ThrowsMessage<c10::Error>(HasSubstr("does not require grad")));
}

TEST_F(StepTest, BadArguments) {
  expects::no_kernels("nothing is called");
  native = false;
  Net net = make_net(), other = make_net(), none{nullptr};
  optim::SGD optimizer(net->parameters(), 0.1);
  auto message = [](const char* text) { return testing::ThrowsMessage<vitrify::OptionError>(HasSubstr(text)); };
  EXPECT_THAT([&] { vitrify::compile_step(net, optimizer, std::function<Tensor(Tensor, Tensor)>()); }, message("`loss` is null"));
  EXPECT_THAT([&] { vitrify::compile_step(net, optimizer, nullptr); }, message("`loss` is null"));
  EXPECT_THAT([&] { vitrify::compile_step(none, optimizer, loss_of); }, message("`net` is null"));
  EXPECT_THAT([&] { vitrify::compile_step(std::shared_ptr<NetImpl>(), optimizer, loss_of); }, message("`net` is null"));
  EXPECT_THAT([&] { vitrify::compile_step(other, optimizer, loss_of); }, message("`optimizer` holds none of the parameters of `net`"));
  EXPECT_THAT([&] { vitrify::compile_step(net, optimizer, loss_of, {.options = {{"recompile_limits", int64_t{2}}}}); }, message("recompile_limit"));
}

TEST_F(StepTest, LossOfTheOutputAlone) {
  Net net = make_net(), twin = make_net();
  optim::SGD optimizer(net->parameters(), 0.1), eager(twin->parameters(), 0.1);
  auto step = vitrify::compile_step(net, optimizer, [](Tensor out) { return out.square().mean(); }, {.fullgraph = true});
  for (int i = 0; i < 3; ++i) {
    auto [x, y] = batch(i);
    Tensor l = step(x);
    eager.zero_grad();
    Tensor e = twin->forward(x).square().mean();
    e.backward();
    eager.step();
    EXPECT_TRUE(allclose(l, e, 1e-4, 1e-6));
  }
  expect_same(net->parameters(), twin->parameters());
  nn::CrossEntropyLoss module;  // a module is a loss too
  auto other = vitrify::compile_step(net, optimizer, module, {.fullgraph = true});
  auto [x, y] = batch(9);
  EXPECT_TRUE(allclose(other(x, y), eager_step(twin, eager, x, y), 1e-4, 1e-6));
}

TEST_F(StepTest, MemoryStaysFlat) {
  Net net = make_net();
  optim::AdamW optimizer(net->parameters());
  auto step = vitrify::compile_step(net, optimizer, loss_of, {.fullgraph = true});
  auto [x, y] = batch(0, 64);
  long early = 0;
  for (int i = 0; i < 1000; ++i) {
    step(x, y);
    if (i == 200) early = resident_pages();
  }
  EXPECT_LT(resident_pages() - early, kFlatPages);
}

TEST(DoorThreads, Step) {
  torch::manual_seed(0);  // torch makes its generator once: before the threads, whose first draw the sanitizer would take for a race
  std::vector<std::thread> threads;
  std::vector<char> good(6);
  for (size_t k = 0; k < good.size(); ++k)
    threads.emplace_back([&, k] {
      Net net, twin;
      for (size_t p = 0; p < net->parameters().size(); ++p) twin->parameters()[p].set_data(net->parameters()[p].detach().clone());
      optim::AdamW optimizer(net->parameters()), eager(twin->parameters());
      auto step = vitrify::compile_step(net, optimizer, loss_of, {.fullgraph = true});
      bool same = true;
      for (int i = 0; i < 3; ++i) {
        Tensor x = torch::full({32, 8}, 0.1 * (i + 1)), y = torch::arange(32) % 4;
        same = same && allclose(step(x, y), eager_step(twin, eager, x, y), 1e-4, 1e-6);
      }
      for (size_t p = 0; p < net->parameters().size(); ++p) same = same && allclose(net->parameters()[p], twin->parameters()[p], 1e-3, 1e-5);
      good[k] = same;
    });
  for (auto& t : threads) t.join();
  EXPECT_THAT(good, testing::Each(1));
}
