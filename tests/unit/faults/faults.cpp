// Real faults in the C++ door: every allocation of a compile and of a run fails once, every stage throws. A call gives eager's result, or the error
// of the allocation with the writes of the program before or behind it; the next call works.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <vitrify/compile.h>
#include <vitrify/step.h>

#include <cstdlib>
#include <cstring>

#include "failing.h"
#include "support/eager.h"
#include "support/fault.h"

namespace {

using at::Tensor;
using failing::Often;
using failing::Which;

// Few enough for every run of the tests; VITRIFY_EVERY_FAULT=1: all of them.
constexpr int64_t kEvery = 40, kGrowth = 6;  // one by one at first, then at growing distances
int64_t next_fault(int64_t n) {
  static const bool all = std::getenv("VITRIFY_EVERY_FAULT") != nullptr;
  return all || n < kEvery ? n + 1 : n + 1 + n / kGrowth;
}

bool same(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  return !a.defined() ||
         (a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type() && at::allclose(a, b, 1e-4, 1e-5));
}
bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](auto& x, auto& y) { return same(x, y); });
}
std::vector<Tensor> copies(const std::vector<Tensor>& list) {
  std::vector<Tensor> r;
  for (auto& t : list) r.push_back(t.defined() ? t.detach().clone() : Tensor());
  return r;
}
Tensor random_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

uint64_t kernels_launched() {
  for (auto& [name, n] : vitrify::lifetime_counters())
    if (name == "kernels_launched") return n;
  return 0;
}

// What a user can see of a program: what it gives, and what it changes.
struct World {
  std::function<std::vector<Tensor>()> call;  // the program, compiled
  std::function<std::vector<Tensor>()> state;
};

// `make(compiled)` gives a fresh program, always the same one. `warm`: calls before the one that is disturbed.
void disturb(const std::function<World(bool)>& make, Which which, Often often, int warm) {
  auto eager = make(false);
  std::vector<Tensor> want, want_state;
  std::vector<std::vector<Tensor>> results, states;
  torch::manual_seed(5);
  const auto start = copies(eager.state());
  std::vector<Tensor> randoms{random_state()};
  states.push_back(start);
  for (int i = 0; i < warm + 2; ++i) {
    results.push_back(copies(eager.call()));
    states.push_back(copies(eager.state()));
    randoms.push_back(random_state());
  }
  int64_t total = 0, errors = 0, eagerly = 0;
  for (int64_t n = 1;; n = next_fault(n)) {
    SCOPED_TRACE("allocation " + std::to_string(n));
    const uint64_t kernels = kernels_launched();
    auto ours = make(true);
    torch::manual_seed(5);
    for (int i = 0; i < warm; ++i) ASSERT_TRUE(same(ours.call(), results[i]));
    bool failed = false;
    std::vector<Tensor> got;
    failing::arm(which, often, n);
    try {
      got = ours.call();
    } catch (const std::bad_alloc&) {
      failed = true;
    } catch (const c10::Error& e) {
      failed = true;
      if (!std::strstr(e.what(), "a planted failure") && !std::strstr(e.what(), "bad_alloc")) ADD_FAILURE() << e.what();
    } catch (const std::exception& e) {
      failed = true;
      ADD_FAILURE() << e.what();
    }
    const int64_t asked = failing::disarm();
    if (asked < n) {
      EXPECT_FALSE(failed);
      EXPECT_GT(kernels_launched(), kernels) << "all of it ran eagerly";
      total = asked;
      break;
    }
    int done = warm;
    if (failed) {
      ++errors;
      // An error that comes after the program's writes leaves them, as eager's does.
      if (!same(ours.state(), states[done])) ++done;
    } else {
      ++eagerly;
      ASSERT_TRUE(same(got, results[done++]));
    }
    ASSERT_TRUE(same(ours.state(), states[done])) << (failed ? "state after an error" : "state after a result");
    ASSERT_TRUE(at::equal(random_state(), randoms[done])) << "random numbers";
    ASSERT_TRUE(same(ours.call(), results[done])) << "the next call";
    ASSERT_TRUE(same(ours.state(), states[done + 1])) << "the state after the next call";
  }
  EXPECT_GT(total, 0);
  std::printf("%ld allocations; of those that failed %ld raised and %ld did not\n", long(total), long(errors), long(eagerly));
}

template <class F>
std::function<World(bool)> program(F fn) {
  return [fn](bool compiled) {
    torch::manual_seed(1);
    auto x = std::make_shared<Tensor>(torch::rand({24, 40})), w = std::make_shared<Tensor>(torch::rand({40, 40}));
    World world;
    auto fast = std::make_shared<vitrify::Compiled<F>>(vitrify::compile(fn));
    world.call = [=]() -> std::vector<Tensor> {
      at::NoGradGuard no_grad;
      return {compiled ? (*fast)(*x, *w) : fn(*x, *w)};
    };
    world.state = [=]() -> std::vector<Tensor> { return {*x, *w}; };
    return world;
  };
}

auto pure = program([](Tensor x, Tensor w) { return (x.matmul(w).softmax(-1) * 2 + x.sum(0)).tanh(); });
auto writes = program([](Tensor x, Tensor w) {
  Tensor y = x.mul_(0.5).add_(w.sum(0) / 40).sin();
  w.select(0, 1).copy_(y.select(0, 0));
  return y.matmul(w) + 1;
});
auto draws = program([](Tensor x, Tensor w) { return at::dropout(x.exp(), 0.5, true) + w.bernoulli_(0.5).sum(); });

struct NetImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  NetImpl()
      : a(register_module("a", torch::nn::Linear(8, 16))),
        b(register_module("b", torch::nn::Linear(16, 4))),
        norm(register_module("norm", torch::nn::BatchNorm1d(16))) {}
  Tensor forward(Tensor x) { return b(torch::relu(norm(a(x)))); }
};
TORCH_MODULE(Net);

std::vector<Tensor> all_of(Net& net) {
  auto r = net->parameters();
  for (auto& b : net->buffers()) r.push_back(b);
  return r;
}

std::function<World(bool)> training = [](bool compiled) {
  torch::manual_seed(1);
  Net net;
  auto x = torch::rand({6, 8});
  auto fast = std::make_shared<decltype(vitrify::compile(net))>(vitrify::compile(net));
  World world;
  world.call = [=]() mutable -> std::vector<Tensor> {
    net->zero_grad();
    Tensor loss = (compiled ? (*fast)(x) : net->forward(x)).square().mean();
    loss.backward();
    std::vector<Tensor> r{loss.detach()};
    for (auto& p : net->parameters()) r.push_back(p.grad().clone());
    return r;
  };
  world.state = [=]() mutable { return all_of(net); };
  return world;
};

TEST(Faults, MemoryOfACompile) { disturb(pure, Which::Memory, Often::Once, 0); }
TEST(Faults, MemoryOfACompileThatWrites) { disturb(writes, Which::Memory, Often::Once, 0); }
TEST(Faults, MemoryOfACompileThatDraws) { disturb(draws, Which::Memory, Often::Once, 0); }
TEST(Faults, MemoryOfARun) { disturb(pure, Which::Memory, Often::Once, 2); }
TEST(Faults, MemoryOfARunThatWrites) { disturb(writes, Which::Memory, Often::Once, 2); }
TEST(Faults, TensorsOfACompile) { disturb(pure, Which::Tensors, Often::Once, 0); }
TEST(Faults, TensorsOfACompileThatWrites) { disturb(writes, Which::Tensors, Often::Once, 0); }
TEST(Faults, TensorsOfARun) { disturb(pure, Which::Tensors, Often::Once, 2); }
TEST(Faults, TensorsOfARunThatWrites) { disturb(writes, Which::Tensors, Often::Once, 2); }
TEST(Faults, TensorsOfARunThatDraws) { disturb(draws, Which::Tensors, Often::Once, 2); }
TEST(Faults, MemoryOfATrainingCompile) { disturb(training, Which::Memory, Often::Once, 0); }
TEST(Faults, MemoryOfATrainingRun) { disturb(training, Which::Memory, Often::Once, 2); }

// A pass, the schedule, the code generator or a run that throws.
TEST(Faults, AStageThatThrows) {
  for (auto& [make, name] : {std::pair(writes, "writes"), std::pair(draws, "draws")})
    for (const char* point : {"canonicalize", "cse", "dce", "schedule", "codegen", "run"}) {
      SCOPED_TRACE(std::string(name) + ", " + point);
      auto eager = make(false), ours = make(true);
      for (int call = 0; call < 3; ++call) {
        torch::manual_seed(5);
        const auto want = copies(eager.call());
        const Tensor randoms = random_state();
        torch::manual_seed(5);
        if (call == 0) vitrify::plant_fault(point);
        EXPECT_TRUE(same(ours.call(), want));
        EXPECT_TRUE(same(ours.state(), eager.state()));
        EXPECT_TRUE(at::equal(randoms, random_state()));
      }
      EXPECT_FALSE(vitrify::fault_is_planted) << "nothing came there";
      vitrify::plant_fault("");
    }
}

}  // namespace
