// The C++ door: what callables may look like, what is guarded, when a call runs eagerly, and that nobody can tell.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "expects.h"
#include "vitrify/compile.h"

namespace door {

using at::Tensor;
using testing::ElementsAre;
using testing::HasSubstr;
using vitrify::CaptureError;
using vitrify::compile;
using vitrify::CompileOptions;

struct Pair {
  Tensor first, second;
  int64_t scale = 1;
};
auto fields(Pair& p) { return std::tie(p.first, p.second, p.scale); }

struct Cache {
  std::vector<Pair> layers;
  std::optional<Tensor> mask;
};
auto fields(Cache& c) { return std::tie(c.layers, c.mask); }

struct Warnings final : c10::WarningHandler {
  std::vector<std::string> seen;
  void process(const c10::Warning& w) override { seen.push_back(w.msg()); }
  c10::WarningUtils::WarningHandlerGuard guard{this};
};

uint64_t count(const std::string& name) { return vitrify::counters_map().at(name); }

struct DoorTest : testing::Test {
  DoorTest() {
    torch::manual_seed(0);
    vitrify::reset_counters();
  }
  at::NoGradGuard no_grad;
};
#define EXPECT_SAME(a, b) EXPECT_TRUE(same((a), (b)))
testing::AssertionResult same(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return testing::AssertionFailure() << "one is undefined";
  if (!a.defined()) return testing::AssertionSuccess();
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes() || a.strides() != b.strides())
    return testing::AssertionFailure() << a.toString() << a.sizes() << " " << b.toString() << b.sizes();
  if (a.equal(b) || (a.is_floating_point() && at::allclose(a, b, 1e-5, 1e-6))) return testing::AssertionSuccess();
  return testing::AssertionFailure() << a << "\n" << b;
}

// --- kinds of arguments and results

TEST_F(DoorTest, TensorsAndNumbers) {
  auto fn = [](Tensor x, int64_t n, double f, bool flip, const std::string& how) {
    return how == "relu" ? (flip ? -x : x).relu() * f + n : x.tanh() * f;
  };
  auto fast = compile(fn);
  Tensor x = torch::randn({5, 7});
  for (int64_t n : {1, 2})
    for (bool flip : {false, true})
      for (const char* how : {"relu", "tanh"}) EXPECT_SAME(fast(x, n, 0.5, flip, how), fn(x, n, 0.5, flip, how));
  EXPECT_EQ(count("captures"), 8u);
  EXPECT_EQ(count("compiled_calls"), 8u);
  EXPECT_EQ(count("eager_calls"), 0u);
  const uint64_t launched = count("kernels_launched");
  const char* how = "relu";
  fast(x, int64_t(1), 0.5, false, how);  // an int would be another signature
  EXPECT_GT(count("kernels_launched"), launched);
  EXPECT_EQ(count("compiled_calls"), 9u);
}

TEST_F(DoorTest, GenericCallableByTypeOfNumber) {
  auto fast = compile([](Tensor x, auto s) { return x + s; });
  Tensor x = torch::arange(4);
  EXPECT_EQ(fast(x, 0).scalar_type(), at::kLong);
  EXPECT_EQ(fast(x, 0.0f).scalar_type(), at::kFloat);  // the same bytes
  EXPECT_EQ(fast(x, false).scalar_type(), at::kLong);
  EXPECT_EQ(count("captures"), 3u);
}

TEST_F(DoorTest, Containers) {
  auto fn = [](std::vector<Tensor> v, std::optional<Tensor> bias, std::array<int64_t, 2> dims, std::pair<Tensor, double> p,
               std::map<std::string, Tensor> named) {
    Tensor s = v[0].transpose(dims[0], dims[1]).contiguous();
    for (size_t i = 1; i < v.size(); ++i) s = s * v[i];
    if (bias) s = s + *bias;
    return s + p.first * p.second + named.at("z");
  };
  auto fast = compile(fn);
  std::vector<Tensor> v{torch::randn({3, 4}), torch::randn({4, 3}), torch::randn({3})};
  std::pair<Tensor, double> p{torch::randn({4, 3}), 3.0};
  std::map<std::string, Tensor> named{{"z", torch::randn({3})}};
  EXPECT_SAME(fast(v, std::nullopt, std::array<int64_t, 2>{0, 1}, p, named), fn(v, std::nullopt, {0, 1}, p, named));
  v[0] = v[0].t().contiguous();
  EXPECT_SAME(fast(v, torch::ones({3}), std::array<int64_t, 2>{0, 0}, p, named), fn(v, torch::ones({3}), {0, 0}, p, named));
  v.pop_back();
  EXPECT_SAME(fast(v, torch::ones({3}), std::array<int64_t, 2>{0, 0}, p, named), fn(v, torch::ones({3}), {0, 0}, p, named));
  EXPECT_EQ(count("captures"), 3u);
  EXPECT_EQ(count("eager_calls"), 0u);
}

TEST_F(DoorTest, ScalarsDevicesStrings) {
  auto fast =
      compile([](Tensor x, at::Scalar s, c10::Device d, at::ScalarType t, const char* how, at::IntArrayRef dims, std::vector<bool> flags,
                 std::complex<double> z) { return (x * s).sum(dims).to(d, t) + (how[0] == 'a' ? 1 : 2) + (flags.at(0) ? 10 : 20) + z.imag(); });
  Tensor x = torch::arange(12.).view({3, 4});
  std::vector<int64_t> dims{1};
  EXPECT_SAME(fast(x, 2, at::kCPU, at::kDouble, "a", dims, std::vector<bool>{true}, std::complex<double>(0, 1)), (x * 2).sum(1).to(at::kDouble) + 12);
  EXPECT_SAME(fast(x, 2.5, at::kCPU, at::kDouble, "b", dims, std::vector<bool>{false}, std::complex<double>(0, 1)),
              (x * 2.5).sum(1).to(at::kDouble) + 23);
  EXPECT_EQ(count("eager_calls"), 0u);
}

TEST_F(DoorTest, StructsAndNestedResults) {
  auto fn = [](const Cache& c) {
    Cache r;
    for (const Pair& p : c.layers) r.layers.push_back({p.first * p.scale, p.second.exp(), p.scale + 1});
    if (c.mask) r.mask = c.mask->logical_not();
    return std::make_tuple(r, int64_t(c.layers.size()), std::string("done"), Tensor());
  };
  auto fast = compile(fn);
  Cache c;
  for (int i = 0; i < 3; ++i) c.layers.push_back({torch::randn({2, 3}), torch::randn({4}), i});
  for (int pass = 0; pass < 3; ++pass) {
    if (pass == 2) c.mask = torch::randn({3}) > 0;
    auto [got, n, text, none] = fast(c);
    auto [want, wn, wt, wnone] = fn(c);
    EXPECT_EQ(n, 3);
    EXPECT_EQ(text, "done");
    EXPECT_FALSE(none.defined());
    ASSERT_EQ(got.layers.size(), 3u);
    EXPECT_EQ(got.mask.has_value(), pass == 2);
    if (got.mask) EXPECT_SAME(*got.mask, *want.mask);
    for (int i = 0; i < 3; ++i) {
      EXPECT_SAME(got.layers[i].first, want.layers[i].first);
      EXPECT_SAME(got.layers[i].second, want.layers[i].second);
      EXPECT_EQ(got.layers[i].scale, i + 1);
    }
  }
  EXPECT_EQ(count("captures"), 2u);
  EXPECT_EQ(count("compiled_calls"), 3u);
}

TEST_F(DoorTest, UndefinedTensors) {
  auto fn = [](Tensor x, Tensor bias, Tensor y) { return (bias.defined() ? x + bias : x) * y; };
  auto fast = compile(fn);
  Tensor x = torch::randn({3}), y = torch::randn({3});
  EXPECT_SAME(fast(x, Tensor(), y), fn(x, Tensor(), y));
  EXPECT_SAME(fast(x, x, y), fn(x, x, y));
  EXPECT_SAME(fast(x, Tensor(), x), fn(x, Tensor(), x));
  EXPECT_EQ(count("eager_calls"), 0u);
}

TEST_F(DoorTest, NoResult) {
  auto fast = compile([](Tensor x) { x.mul_(2).add_(1); });
  Tensor x = torch::ones({4});
  fast(x), fast(x);
  EXPECT_SAME(x, torch::full({4}, 7.));
  EXPECT_EQ(count("compiled_calls"), 2u);
}

TEST_F(DoorTest, FunctionPointerAndStdFunction) {
  auto fast = compile(static_cast<Tensor (*)(const Tensor&)>(&at::relu));
  std::function<Tensor(Tensor)> f = [](Tensor x) { return x.cos(); };
  Tensor x = torch::randn({9});
  EXPECT_SAME(fast(x), x.relu());
  EXPECT_SAME(compile(f)(x), x.cos());
  EXPECT_EQ(count("compiled_calls"), 2u);
}

// --- modules

struct NetImpl : torch::nn::Module {
  torch::nn::Linear a, b;
  torch::nn::Dropout drop{0.5};
  NetImpl() : a(8, 16), b(16, 4) { register_module("a", a), register_module("b", b), register_module("drop", drop); }
  Tensor forward(const Tensor& x) { return b(drop(a(x).relu())); }
};
TORCH_MODULE(Net);

TEST_F(DoorTest, ModuleHolderAndPointer) {
  Net net;
  net->eval();
  Tensor x = torch::randn({3, 8});
  EXPECT_SAME(compile(net)(x), net->forward(x));
  EXPECT_SAME(compile(net.ptr())(x), net->forward(x));
  EXPECT_EQ(count("captures"), 2u);
}

TEST_F(DoorTest, TrainingFlagAndMetadataGuards) {
  Net net;
  net->eval();
  auto fast = compile(net);
  Tensor x = torch::randn({3, 8});
  EXPECT_SAME(fast(x), net->forward(x));
  net->train();
  torch::manual_seed(7);
  Tensor got = fast(x);
  torch::manual_seed(7);
  EXPECT_SAME(got, net->forward(x));
  net->eval();
  EXPECT_SAME(fast(x), net->forward(x));
  EXPECT_EQ(count("captures"), 2u);
  net->to(at::kDouble);
  EXPECT_SAME(fast(x.to(at::kDouble)), net->forward(x.to(at::kDouble)));
  EXPECT_EQ(count("captures"), 3u);
}

TEST_F(DoorTest, WeightsWrittenInPlace) {
  Net net;
  net->eval();
  auto fast = compile(net);
  Tensor x = torch::randn({64, 8});
  for (int i = 0; i < 4; ++i) {
    EXPECT_SAME(fast(x), net->forward(x));
    if (i == 1)
      net->a->weight.data().mul_(-1.5);  // no version is counted
    else
      net->b->weight.add_(0.25), net->b->bias.zero_();
  }
  net->b->weight.set_data(torch::randn({4, 16}));
  EXPECT_SAME(fast(x), net->forward(x));
  EXPECT_EQ(count("captures"), 1u);
}

TEST_F(DoorTest, ReplacedModuleAfterReset) {
  Net net;
  net->eval();
  auto fast = compile(net);
  Tensor x = torch::randn({3, 8});
  fast(x);
  net->b = net->replace_module("b", torch::nn::Linear(16, 4));
  fast.reset();
  EXPECT_SAME(fast(x), net->forward(x));
  EXPECT_EQ(count("captures"), 2u);
}

// --- signatures

TEST_F(DoorTest, SeveralSignatures) {
  auto fn = [](Tensor x) { return (x + 1).sum(-1); };
  auto fast = compile(fn);
  for (Tensor x :
       {torch::randn({3, 4}), torch::randn({3, 4, 5}), torch::randn({3, 4}).to(at::kDouble), torch::ones({3, 4}, at::kInt), torch::randn({4, 3}).t()})
    for (int i = 0; i < 2; ++i) EXPECT_SAME(fast(x), fn(x));
  EXPECT_EQ(count("captures"), 5u);
  EXPECT_EQ(count("recompiles"), 4u);
  fast.reset();
  fast(torch::randn({3, 4}));
  EXPECT_EQ(count("captures"), 6u);
  EXPECT_EQ(count("recompiles"), 4u);
}

TEST_F(DoorTest, RecompileLimit) {
  expects::eager("recompile_limit is reached");
  auto fast = compile([](Tensor x, int n) { return x * n; }, {.name = "scaled", .options = {{"recompile_limit", int64_t(2)}}});
  Tensor x = torch::randn({3});
  Warnings warnings;
  for (int n = 0; n < 5; ++n) EXPECT_SAME(fast(x, n), x * n);
  EXPECT_THAT(warnings.seen, ElementsAre(HasSubstr("scaled has 2 compiled signatures")));
  EXPECT_EQ(count("captures"), 2u);
  EXPECT_EQ(count("eager_calls"), 3u);
  EXPECT_SAME(fast(x, 1), x);
  EXPECT_EQ(count("eager_calls"), 3u);
}

TEST_F(DoorTest, ErrorOnRecompile) {
  auto fast = compile([](Tensor x, int n) { return x * n; }, {.options = {{"error_on_recompile", true}}});
  Tensor x = torch::randn({3});
  fast(x, 1), fast(x, 1);
  EXPECT_THROW(fast(x, 2), vitrify::RecompileError);
  EXPECT_SAME(fast(x, 1), x);
}

Tensor normalise(Tensor x, Tensor w) { return at::softmax(x.matmul(w) * 2, -1) + x.mean(); }

TEST_F(DoorTest, DynamicAlways) {
  auto fast = compile(normalise, {.dynamic = vitrify::Dynamic::Always});
  for (int64_t n : {6, 3, 40, 2, 129}) {
    Tensor x = torch::randn({n, 8}), w = torch::randn({8, 5});
    EXPECT_SAME(fast(x, w), normalise(x, w));
  }
  EXPECT_EQ(count("captures"), 1u);
  Tensor x = torch::randn({1, 8}), w = torch::randn({8, 5});
  EXPECT_SAME(fast(x, w), normalise(x, w));
  EXPECT_EQ(count("eager_calls"), 0u);
}

TEST_F(DoorTest, DynamicAutoAndNever) {
  expects::eager("recompile_limit is reached");
  auto fast = compile(normalise);
  auto never = compile(normalise, {.dynamic = vitrify::Dynamic::Never});
  Tensor w = torch::randn({8, 5});
  Warnings warnings;
  for (int64_t n = 2; n < 14; ++n) {
    Tensor x = torch::randn({n, 8});
    EXPECT_SAME(fast(x, w), normalise(x, w));
  }
  EXPECT_EQ(count("captures"), 2u);
  EXPECT_EQ(count("eager_calls"), 0u);
  EXPECT_TRUE(warnings.seen.empty());
  vitrify::reset_counters();
  for (int64_t n = 2; n < 14; ++n) {
    Tensor x = torch::randn({n, 8});
    EXPECT_SAME(never(x, w), normalise(x, w));
  }
  EXPECT_EQ(count("captures"), 8u);
  EXPECT_EQ(count("eager_calls"), 4u);
}

TEST_F(DoorTest, DynamicSizesReadByTheProgram) {
  auto fn = [](Tensor x) { return std::make_pair(x * x.size(0), x.size(0)); };
  auto fast = compile(fn);
  for (int64_t n : {5, 6, 7, 8, 6}) {
    Tensor x = torch::randn({n, 3});
    auto [y, size] = fast(x);
    EXPECT_SAME(y, x * n);
    EXPECT_EQ(size, n);
  }
  EXPECT_EQ(count("eager_calls"), 0u);
}

// --- calls that run eagerly

TEST_F(DoorTest, DataDependentRead) {
  expects::eager("reads a tensor's value: aten::item");
  auto fn = [](Tensor x) { return x.sum().item<double>() > 0 ? x * 2 : x - 1; };
  auto fast = compile(fn);
  Warnings warnings;
  Tensor x = torch::ones({3});
  for (int i = 0; i < 2; ++i) {
    EXPECT_SAME(fast(x), x * 2);
    EXPECT_SAME(fast(-x), -x - 1);
  }
  EXPECT_EQ(warnings.seen.size(), 1u);
  EXPECT_EQ(count("eager_calls"), 4u);
  auto full = compile(fn, {.fullgraph = true});
  EXPECT_THROW(full(x), CaptureError);
  EXPECT_THROW(full(x), CaptureError);
}

TEST_F(DoorTest, AssignedArgument) {
  expects::eager("it assigns to an argument that it takes by reference");
  auto fn = [](Tensor& x, int& calls) {
    x = x + 1;
    ++calls;
    return x * 2;
  };
  auto fast = compile(fn);
  Warnings warnings;
  Tensor x = torch::zeros({2});
  int calls = 0;
  for (int i = 1; i < 4; ++i) {
    EXPECT_SAME(fast(x, calls), torch::full({2}, 2. * i));
    EXPECT_SAME(x, torch::full({2}, 1. * i));
    EXPECT_EQ(calls, i);
  }
  EXPECT_THAT(warnings.seen, testing::Each(HasSubstr("assigns to an argument")));
  EXPECT_THROW(compile(fn, {.fullgraph = true})(x, calls), CaptureError);
}

TEST_F(DoorTest, EagerExceptionsUnchanged) {
  expects::eager("it throws while it is captured");
  struct Mine {
    int code;
  };
  auto fast = compile([](Tensor x, int how) -> Tensor {
    x.add_(1);
    if (how == 0) throw Mine{3};
    if (how == 1) return x.matmul(torch::ones({9, 9}));
    if (how == 2) return torch::embedding(torch::ones({4, 2}), x.to(at::kLong));
    return x;
  });
  Tensor x = torch::full({3}, 10.);
  for (int i = 0; i < 5; ++i) {
    try {
      fast(x, 0);
      ADD_FAILURE();
    } catch (const Mine& m) {
      EXPECT_EQ(m.code, 3);
    }
  }
  EXPECT_SAME(x, torch::full({3}, 15.));
  std::string want;
  try {
    x.matmul(torch::ones({9, 9}));
  } catch (const c10::Error& e) {
    want = e.what_without_backtrace();
  }
  try {
    fast(x, 1);
    ADD_FAILURE();
  } catch (const c10::Error& e) {
    EXPECT_EQ(want, e.what_without_backtrace());
  }
  EXPECT_SAME(x, torch::full({3}, 16.));
  EXPECT_THROW(fast(x, 2), c10::IndexError);  // found only when the plan runs
  EXPECT_SAME(x, torch::full({3}, 17.));
  EXPECT_SAME(fast(x, 3), torch::full({3}, 18.));
}

TEST_F(DoorTest, ExceptionThenSuccess) {
  bool fail = true;
  auto fast = compile([&](Tensor x) {
    if (fail) throw std::logic_error("not now");
    return x + 1;
  });
  Tensor x = torch::ones({2});
  EXPECT_THROW(fast(x), std::logic_error);
  fail = false;
  EXPECT_SAME(fast(x), x + 1);
  EXPECT_EQ(count("compiled_calls"), 1u);
}

TEST_F(DoorTest, Options) {
  expects::no_kernels("nothing is called");
  auto f = [](Tensor x) { return x; };
  try {
    compile(f, {.options = {{"recompile_limt", int64_t(2)}}});
    ADD_FAILURE();
  } catch (const vitrify::OptionError& e) {
    EXPECT_THAT(e.what(), HasSubstr("recompile_limit"));
  }
  EXPECT_THROW(compile(f, {.options = {{"recompile_limit", std::string("two")}}}), vitrify::OptionError);
}

TEST_F(DoorTest, Disable) {
  expects::no_kernels("compilation is off");
  int runs = 0;
  auto fast = compile([&](Tensor x) { return ++runs, x + 1; }, {.disable = true});
  fast(torch::ones({2})), fast(torch::ones({2}));
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(count("captures"), 0u);
}

TEST_F(DoorTest, Modes) {
  Tensor x = torch::randn({17});
  for (auto mode : {vitrify::Mode::Default, vitrify::Mode::ReduceOverhead, vitrify::Mode::MaxAutotune, vitrify::Mode::MaxAutotuneNoCudagraphs})
    EXPECT_SAME(compile([](Tensor x) { return x.sigmoid() * x; }, {.mode = mode})(x), x.sigmoid() * x);
  EXPECT_EQ(count("compiled_calls"), 4u);
}

TEST_F(DoorTest, GradientsOfHeldTensors) {
  at::AutoGradMode grad(true);
  Tensor w = torch::randn({3}, at::requires_grad());
  auto fast = compile([w](Tensor x) { return x * w; });
  Tensor x = torch::ones({3});
  Warnings warnings;
  for (int i = 0; i < 2; ++i) {
    w.mutable_grad() = Tensor();
    fast(x).sum().backward();
    EXPECT_SAME(w.grad(), x);
  }
  EXPECT_TRUE(warnings.seen.empty());
  {
    at::NoGradGuard off;
    EXPECT_FALSE(fast(x).requires_grad());
  }
  EXPECT_EQ(count("eager_calls"), 0u);
  auto made = compile([](Tensor x) { return (x * torch::ones({3}, at::requires_grad())).sum(); });
  EXPECT_TRUE(made(x).requires_grad());
}

TEST_F(DoorTest, HeldTensorsAreReadLive) {
  Tensor w = torch::ones({3});
  auto fast = compile([&w](Tensor x) { return x * w; });
  Tensor x = torch::full({3}, 2.);
  EXPECT_SAME(fast(x), x);
  w.mul_(5);
  EXPECT_SAME(fast(x), x * 5);
  EXPECT_EQ(count("captures"), 1u);
  w.set_data(torch::full({3}, 4, at::kDouble));
  EXPECT_SAME(fast(x), x * w);
  w.set_data(torch::full({1}, 6.));
  EXPECT_SAME(fast(x), x * 6);
  EXPECT_EQ(count("eager_calls"), 0u);
}

TEST_F(DoorTest, InferenceModeAndAutocast) {
  Net net;
  net->eval();
  auto fast = compile(net);
  Tensor x = torch::randn({3, 8});
  {
    c10::InferenceMode inference;
    Tensor y = fast(x);
    EXPECT_TRUE(y.is_inference());
    EXPECT_SAME(y, net->forward(x));
  }
  EXPECT_FALSE(fast(x).is_inference());
  at::autocast::set_autocast_enabled(at::kCPU, true);
  Tensor got = fast(x), want = net->forward(x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(got.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::allclose(got, want, 2e-2, 2e-2));
  EXPECT_EQ(count("captures"), 3u);
}

// --- aliases and writes

TEST_F(DoorTest, InputsThatAlias) {
  expects::eager("which shares memory with input");
  auto fn = [](Tensor a, Tensor b) {
    a.add_(1);
    return b * 2;
  };
  auto fast = compile(fn);
  auto pairs = [](int how) -> std::pair<Tensor, Tensor> {
    Tensor x = torch::arange(8.);
    if (how == 0) return {x, x};
    if (how == 1) return {x.slice(0, 0, 4), x.slice(0, 4, 8)};
    if (how == 2) return {x.slice(0, 0, 4), x.slice(0, 2, 6)};
    return {x, torch::arange(8.)};
  };
  for (int repeat = 0; repeat < 2; ++repeat)
    for (int how = 0; how < 4; ++how) {
      auto [a, b] = pairs(how);
      auto [c, d] = pairs(how);
      EXPECT_SAME(fast(a, b), fn(c, d));
      EXPECT_SAME(a, c);
      EXPECT_SAME(b, d);
    }
}

TEST_F(DoorTest, ResultsThatAliasArguments) {
  auto fast = compile([](Tensor x) {
    Tensor fresh = x + 1;
    return std::make_tuple(x, x.t(), x.select(0, 1).view({2, 2}), fresh, x.mul_(2));
  });
  Tensor x = torch::randn({3, 4});
  for (int i = 0; i < 2; ++i) {
    auto before = x.clone();
    auto [same_object, t, part, fresh, written] = fast(x);
    EXPECT_TRUE(same_object.is_same(x));
    EXPECT_TRUE(written.is_same(x));
    EXPECT_TRUE(t.is_alias_of(x) && part.is_alias_of(x));
    EXPECT_FALSE(fresh.is_alias_of(x));
    EXPECT_SAME(x, before * 2);
    EXPECT_SAME(fresh, before + 1);
    EXPECT_SAME(t, x.t());
    EXPECT_SAME(part, x.select(0, 1).view({2, 2}));
  }
  EXPECT_EQ(count("captures"), 1u);
}

TEST_F(DoorTest, ResultsThatAliasEachOther) {
  auto fast = compile([](Tensor x) {
    Tensor y = x * 3;
    return std::make_tuple(y, y.view({-1}), y.slice(0, 1));
  });
  Tensor x = torch::randn({2, 3});
  auto [y, flat, tail] = fast(x);
  y.zero_();
  EXPECT_SAME(flat, torch::zeros({6}));
  EXPECT_SAME(tail, torch::zeros({1, 3}));
  auto [y2, flat2, tail2] = fast(x);
  EXPECT_SAME(y2, x * 3);
  EXPECT_FALSE(y2.is_alias_of(y));
}

TEST_F(DoorTest, VersionsOfWrittenArguments) {
  auto fast = compile([](Tensor x) { return x.slice(0, 1).add_(1).mul_(2); });
  Tensor x = torch::ones({4});
  const auto before = x._version();
  fast(x);
  EXPECT_EQ(x._version(), before + 2);
  EXPECT_SAME(x, torch::tensor({1.f, 4.f, 4.f, 4.f}));
}

TEST_F(DoorTest, StorageOffsets) {
  expects::eager("lies elsewhere in its memory");
  auto fn = [](Tensor x) { return x.as_strided({2}, {1}, 0) + x.slice(0, 1, 3); };
  auto fast = compile(fn);
  Tensor base = torch::arange(10.);
  for (int64_t o : {0, 3, 5}) EXPECT_SAME(fast(base.slice(0, o, o + 4)), fn(base.slice(0, o, o + 4)));
}

TEST_F(DoorTest, Nested) {
  auto inner = compile([](Tensor x) { return x.relu() + 1; });
  auto outer = compile([&](Tensor x) { return inner(x) * inner(x * 2); });
  Tensor x = torch::randn({6});
  EXPECT_SAME(outer(x), (x.relu() + 1) * ((x * 2).relu() + 1));
  EXPECT_EQ(count("captures"), 1u);
  EXPECT_SAME(inner(x), x.relu() + 1);
  EXPECT_EQ(count("captures"), 2u);
}

TEST_F(DoorTest, RandomState) {
  expects::eager("sets the state of a random number generator");
  auto fast = compile([](Tensor x) { return x + torch::rand({5}); });
  Tensor x = torch::zeros({5});
  torch::manual_seed(3);
  Tensor a = fast(x), b = fast(x), after = torch::rand({2});
  torch::manual_seed(3);
  EXPECT_SAME(a, torch::rand({5}));
  EXPECT_SAME(b, torch::rand({5}));
  EXPECT_SAME(after, torch::rand({2}));
  // A program that seeds cannot be captured, also when the seed is the one that is set already.
  auto seeds = [](Tensor x) {
    torch::manual_seed(3);
    return x + torch::rand({5});
  };
  Warnings warnings;
  auto seeded = compile(seeds);
  torch::manual_seed(3);
  for (int i = 0; i < 2; ++i) EXPECT_SAME(seeded(x), seeds(x));
  EXPECT_THAT(warnings.seen, ElementsAre(HasSubstr("random number generator")));
}

TEST_F(DoorTest, ExplainAndCounters) {
  auto fast = compile([](Tensor x) { return x.sin() + 1; });
  EXPECT_EQ(fast.explain(), "");
  fast(torch::randn({4}));
  EXPECT_THAT(fast.explain(), HasSubstr("aten::sin"));
  auto counters = vitrify::counters_map();
  EXPECT_EQ(counters.at("captures"), 1u);
  EXPECT_EQ(counters.at("kernels_launched"), 1u);
  EXPECT_EQ(counters.at("fallbacks"), 0u);
}

}  // namespace door
