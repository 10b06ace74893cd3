// Torch-level passes: same results before and after, against the interpreter through ATen; and every change of a weight is seen.
#include "torch/passes/passes.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "runtime/gemm.h"
#include "runtime/winograd.h"
#include "torch/compiled.h"
#include "torch/extern_call.h"
#include "torch/tracer.h"

using namespace vitrify;

namespace {

using Fn = std::function<at::Tensor(const std::vector<at::Tensor>& args, const std::vector<at::Tensor>& params)>;

struct Captured {
  Program program;
  std::shared_ptr<PassState> state = std::make_shared<PassState>();
  std::vector<at::Tensor> args, params;
  Fn fn;

  Captured(std::vector<at::Tensor> a, std::vector<at::Tensor> p, Fn f) : args(std::move(a)), params(std::move(p)), fn(std::move(f)) {
    at::NoGradGuard no_grad;
    Tracer t;
    std::vector<at::Tensor> fakes;
    for (size_t i = 0; i < args.size(); ++i) fakes.push_back(t.add_input(args[i], ir::InputKind::Argument, "x" + std::to_string(i)));
    for (size_t i = 0; i < params.size(); ++i) t.declare_source(params[i], ir::InputKind::Parameter, "p" + std::to_string(i));
    t.start();
    at::Tensor out = fn(fakes, params);
    program = t.finish({out});
    state->num_args = program.num_args;
    state->captured = &program.captured;
    state->written.resize(program.graph->inputs.size());
  }
  at::Tensor eager() const {
    at::NoGradGuard no_grad;
    return fn(args, params);
  }
  bool has(const std::string& op) const {
    for (auto* n : program.graph->nodes())
      if (n->op->name == op) return true;
    return false;
  }
  // Runs the frozen parts, then the graph, op by op.
  at::Tensor interpreted() {
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> in = args;
    in.insert(in.end(), program.captured.begin(), program.captured.end());
    in.resize(program.graph->inputs.size());
    for (auto& g : state->groups) {
      std::vector<at::Tensor> sources;
      for (uint32_t s : g.sources) sources.push_back(in[s]);
      auto out = interpret(*g.graph, sources);
      for (size_t i = 0; i < g.results.size(); ++i) in[g.results[i]] = out[i];
    }
    return interpret(*program.graph, in)[0];
  }
};

void expect_close(const at::Tensor& got, const at::Tensor& want, double tolerance = 2e-6) {
  ASSERT_EQ(got.sizes(), want.sizes());
  const double scale = want.abs().max().item<double>();
  EXPECT_LE((got.to(at::kDouble) - want.to(at::kDouble)).abs().max().item<double>(), tolerance * std::max(scale, 1e-3));
}

at::Tensor norm(const at::Tensor& x, const std::vector<at::Tensor>& p, size_t i) {
  return at::batch_norm(x, p[i], p[i + 1], p[i + 2], p[i + 3], false, 0.1, 1e-5, false);
}
std::vector<at::Tensor> norm_params(int64_t c) { return {at::rand({c}) + 0.5, at::randn({c}), at::randn({c}), at::rand({c}) + 0.5}; }

TEST(Passes, BatchNormFoldsIntoTheConvolutionBefore) {
  std::vector<at::Tensor> p{at::randn({8, 3, 3, 3})};
  for (auto& t : norm_params(8)) p.push_back(t);
  Captured c({at::randn({2, 3, 10, 10})}, p, [](auto& a, auto& q) { return norm(at::conv2d(a[0], q[0], {}, {1, 1}, {1, 1}), q, 1); });
  EXPECT_TRUE(fold_batch_norm(*c.program.graph, {}, *c.state));
  ir::verify(*c.program.graph);
  EXPECT_FALSE(c.has("aten::_native_batch_norm_legit_no_training"));
  EXPECT_FALSE(c.has("aten::native_batch_norm"));
  expect_close(c.interpreted(), c.eager());
}

TEST(Passes, BatchNormStaysWhenItsStatisticsAreWritten) {
  std::vector<at::Tensor> p{at::randn({8, 3, 3, 3})};
  for (auto& t : norm_params(8)) p.push_back(t);
  Captured c({at::randn({2, 3, 10, 10})}, p, [](auto& a, auto& q) { return norm(at::conv2d(a[0], q[0]), q, 1); });
  for (auto& w : c.state->written) w = 1;
  EXPECT_FALSE(fold_batch_norm(*c.program.graph, {}, *c.state));
}

TEST(Passes, ResidualBlockBecomesTwoFusedConvolutions) {
  std::vector<at::Tensor> p{at::randn({16, 16, 3, 3}) / 12, at::randn({16, 16, 3, 3}) / 12};
  for (int i = 0; i < 2; ++i)
    for (auto& t : norm_params(16)) p.push_back(t);
  Captured c({at::randn({2, 16, 12, 12})}, p, [](auto& a, auto& q) {
    at::Tensor h = at::relu(norm(at::conv2d(a[0], q[0], {}, {1, 1}, {1, 1}), q, 2));
    return at::relu(norm(at::conv2d(h, q[1], {}, {1, 1}, {1, 1}), q, 6) + a[0]);
  });
  Options options;
  options.winograd = false;
  const at::Tensor before = c.interpreted();
  for (auto pass : {fold_batch_norm, fuse_conv, hoist_frozen}) EXPECT_TRUE(pass(*c.program.graph, options, *c.state));
  ir::verify(*c.program.graph);
  EXPECT_EQ(c.program.graph->nodes().size(), c.program.graph->inputs.size() + 2);
  EXPECT_TRUE(c.has("mkldnn::_convolution_pointwise"));
  EXPECT_TRUE(c.has("mkldnn::_convolution_pointwise.binary"));
  EXPECT_EQ(c.state->groups.size(), 2u);  // one per convolution: they change apart
  expect_close(c.interpreted(), before);
}

TEST(Passes, ConvolutionsByFewerProducts) {
  if (!runtime::can_convolve()) GTEST_SKIP() << "this processor has no AVX-512";
  std::vector<at::Tensor> p{at::randn({32, 16, 3, 3}) / 12, at::randn({32}), at::randn({32, 32, 3, 3}) / 17, at::randn({32, 32, 3, 3}) / 17};
  Captured c({at::randn({2, 16, 13, 12})}, p, [](auto& a, auto& q) {
    at::Tensor h = at::relu(at::conv2d(a[0], q[0], q[1], {1, 1}, {1, 1}));
    h = at::relu(at::conv2d(h, q[2], {}, {1, 1}, {1, 1}) + h);
    return at::silu(at::conv2d(h, q[3], {}, {1, 1}, {1, 1}));  // a post-op of oneDNN's
  });
  const at::Tensor before = c.interpreted();
  for (auto pass : {fuse_conv, hoist_frozen}) EXPECT_TRUE(pass(*c.program.graph, {}, *c.state));
  ir::verify(*c.program.graph);
  EXPECT_EQ(c.program.graph->nodes().size(), c.program.graph->inputs.size() + 3);
  EXPECT_TRUE(c.has("vitrify::winograd_convolution"));
  EXPECT_TRUE(c.has("mkldnn::_convolution_pointwise"));
  EXPECT_EQ(c.state->groups.size(), 3u);
  expect_close(c.interpreted(), before, 1e-5);
}

TEST(Passes, EveryPostOpOfAConvolution) {
  using Post = at::Tensor (*)(const at::Tensor&);
  const std::pair<const char*, Post> posts[] = {
      {"relu", [](const at::Tensor& x) { return at::relu(x); }},
      {"silu", [](const at::Tensor& x) { return at::silu(x); }},
      {"gelu", [](const at::Tensor& x) { return at::gelu(x); }},
      {"tanh gelu", [](const at::Tensor& x) { return at::gelu(x, "tanh"); }},
      {"hardswish", [](const at::Tensor& x) { return at::hardswish(x); }},
      {"hardsigmoid", [](const at::Tensor& x) { return at::hardsigmoid(x); }},
      {"sigmoid", [](const at::Tensor& x) { return at::sigmoid(x); }},
      {"tanh", [](const at::Tensor& x) { return at::tanh(x); }},
      {"leaky_relu", [](const at::Tensor& x) { return at::leaky_relu(x, 0.2); }},
      {"relu6", [](const at::Tensor& x) { return at::hardtanh(x, 0, 6); }},
  };
  for (auto [name, post] : posts) {
    Captured c({at::randn({2, 8, 9, 9})}, {at::randn({8, 4, 3, 3}), at::randn({8})},
               [post = post](auto& a, auto& q) { return at::avg_pool2d(post(at::conv2d(a[0], q[0], q[1], {2, 2}, {1, 1}, {1, 1}, 2)), {2, 2}); });
    EXPECT_TRUE(fuse_conv(*c.program.graph, {}, *c.state));
    ir::verify(*c.program.graph);
    size_t convs = 0;
    for (auto* n : c.program.graph->nodes()) convs += n->op->name.starts_with("mkldnn::_convolution_pointwise");
    EXPECT_EQ(convs, 1u);
    EXPECT_EQ(c.program.graph->nodes().size(), c.program.graph->inputs.size() + 3) << name << "\n" << ir::print(*c.program.graph);
    SCOPED_TRACE(name);
    expect_close(c.interpreted(), c.eager(), 1e-5);
  }
}

TEST(Passes, OutputsKeepTheStridesOfEager) {
  Captured c({at::randn({2, 8, 9, 9})}, {at::randn({8, 8, 3, 3})}, [](auto& a, auto& q) { return at::relu(at::conv2d(a[0], q[0])); });
  const auto strides = c.program.graph->outputs[0].type().strides;
  EXPECT_TRUE(fuse_conv(*c.program.graph, {}, *c.state));
  EXPECT_EQ(c.program.graph->outputs[0].type().strides, strides);
}

Options with_gemm(const char* library) {
  Options o;
  o.gemm = library;
  return o;
}

TEST(Passes, LinearWithPostOp) {
  for (bool plain : {false, true}) {
    Options o = with_gemm("onednn");
    if (plain) o.packed_weight_mb = 0;
    Captured c({at::randn({4, 64, 256})}, {at::randn({512, 256}) / 16, at::randn({512})},
               [](auto& a, auto& q) { return at::gelu(at::linear(a[0], q[0], q[1])); });
    EXPECT_TRUE(fuse_linear(*c.program.graph, o, *c.state));
    ir::verify(*c.program.graph);
    EXPECT_TRUE(c.has("mkldnn::_linear_pointwise"));
    EXPECT_FALSE(c.has("aten::gelu"));
    EXPECT_EQ(c.has("mkldnn::_reorder_linear_weight"), !plain);
    EXPECT_EQ(hoist_frozen(*c.program.graph, o, *c.state), !plain);
    expect_close(c.interpreted(), c.eager(), 1e-5);
  }
}

TEST(Passes, LinearOnPackedMklWeights) {
  if (!at::hasMKL()) GTEST_SKIP() << "this torch has no MKL";
  for (bool bias : {false, true}) {
    Captured c({at::randn({4, 64, 256})}, {at::randn({512, 256}) / 16, at::randn({512})},
               [=](auto& a, auto& q) { return at::gelu(at::linear(a[0], q[0], bias ? q[1] : at::Tensor())); });
    EXPECT_TRUE(fuse_linear(*c.program.graph, with_gemm("mkl"), *c.state));
    ir::verify(*c.program.graph);
    EXPECT_TRUE(c.has("mkl::_mkl_linear"));
    EXPECT_TRUE(hoist_frozen(*c.program.graph, {}, *c.state));
    EXPECT_FALSE(c.has("mkl::_mkl_reorder_linear_weight"));
    expect_close(c.interpreted(), c.eager(), 1e-5);
  }
}

TEST(Passes, ProductsOfChangingOperands) {
  Captured c({at::randn({192, 256}), at::randn({192, 128})}, {}, [](auto& a, auto&) { return at::mm(a[0].t(), a[1]); });
  EXPECT_FALSE(fuse_linear(*c.program.graph, with_gemm("aten"), *c.state));
  EXPECT_TRUE(fuse_linear(*c.program.graph, with_gemm("onednn"), *c.state));
  EXPECT_TRUE(c.has("mkldnn::_linear_pointwise"));
  expect_close(c.interpreted(), c.eager(), 1e-5);
}

TEST(Passes, ProductsOfOurOwn) {
  if (!runtime::can_multiply()) GTEST_SKIP() << "this processor has no AVX-512";
  for (bool bias : {false, true})
    for (bool transposed : {false, true}) {
      Captured c({at::randn({100, 256})}, {transposed ? at::randn({512, 256}) / 16 : at::randn({256, 512}) / 16, at::randn({512})},
                 [=](auto& a, auto& q) {
                   const at::Tensor w = transposed ? q[0].t() : q[0];
                   return bias ? at::addmm(q[1], a[0], w) : at::mm(a[0], w);
                 });
      EXPECT_TRUE(fuse_linear(*c.program.graph, with_gemm("vitrify"), *c.state));
      ir::verify(*c.program.graph);
      EXPECT_TRUE(c.has("vitrify::product"));
      expect_close(c.interpreted(), c.eager(), 1e-5);
    }
  // Few rows, or columns where rows are wanted, are as they were.
  for (const at::Tensor& a : {at::randn({8, 2048}), at::randn({256, 100}).t()}) {
    Captured c({a}, {at::randn({a.size(1), 512})}, [](auto& x, auto& q) { return at::mm(x[0], q[0]); });
    EXPECT_FALSE(fuse_linear(*c.program.graph, with_gemm("vitrify"), *c.state));
  }
}

// Of a large model more is packed, and nothing where nothing may be.
TEST(Passes, MemoryForPackedProducts) {
  const std::vector<at::Tensor> captured{at::empty({1 << 20}), at::Tensor(), at::empty({25 << 18})};  // 29 MiB, and a gradient that is not there yet
  PassState state;
  state.captured = &captured;
  Options o;
  const int64_t all = o.packed_weight_mb << 20, weights = 29 << 20;
  EXPECT_EQ(most_packed(o, state, PackedFor::Convolution), all);
  EXPECT_EQ(most_packed(o, state, PackedFor::Any), all + weights / 10);
  EXPECT_EQ(most_packed(o, state, PackedFor::Product), all * 5 / 8 + weights / 10);
  o.packed_weight_mb = 0;
  for (PackedFor use : {PackedFor::Convolution, PackedFor::Product, PackedFor::Any}) EXPECT_EQ(most_packed(o, state, use), 0);
}

TEST(Passes, SmallProductsStay) {
  Captured c({at::randn({8, 16})}, {at::randn({16, 16})}, [](auto& a, auto& q) { return at::mm(a[0], q[0]); });
  EXPECT_FALSE(fuse_linear(*c.program.graph, {}, *c.state));
}

TEST(Passes, SmallProductsByWeightsThatChange) {
  if (!runtime::can_multiply()) GTEST_SKIP() << "this processor has no AVX-512";
  const auto linear = [](auto& a, auto&) { return at::addmm(a[2], a[0], a[1].t()); };
  Captured c({at::randn({64, 48}), at::randn({32, 48}), at::randn({32})}, {}, linear);
  EXPECT_TRUE(fuse_linear(*c.program.graph, {}, *c.state));
  ir::verify(*c.program.graph);
  EXPECT_TRUE(c.has("vitrify::product"));
  expect_close(c.interpreted(), c.eager(), 1e-5);
  // Few columns become a loop nest, and few rows are a library's.
  for (auto [rows, columns] : {std::pair{64, 6}, std::pair{8, 32}}) {
    Captured d({at::randn({rows, 48}), at::randn({columns, 48}), at::randn({columns})}, {}, linear);
    EXPECT_FALSE(fuse_linear(*d.program.graph, {}, *d.state));
  }
}

TEST(Passes, HoistsWhatDependsOnWeightsOnly) {
  Captured c({at::randn({4, 64})}, {at::randn({64, 64}), at::randn({64, 64})},
             [](auto& a, auto& q) { return at::mm(a[0], at::cat({q[0].exp(), q[1].t() * 2}, 1)) + a[0].sum(); });
  EXPECT_TRUE(hoist_frozen(*c.program.graph, {}, *c.state));
  EXPECT_FALSE(c.has("aten::cat"));
  ASSERT_EQ(c.state->groups.size(), 1u);
  EXPECT_EQ(c.state->groups[0].sources.size(), 2u);
  expect_close(c.interpreted(), c.eager());
}

TEST(Passes, RandomNumbersAreNotHoisted) {
  Captured c({at::randn({64, 64})}, {at::randn({64, 64})}, [](auto& a, auto& q) { return a[0] + at::bernoulli(q[0].sigmoid()); });
  hoist_frozen(*c.program.graph, {}, *c.state);
  EXPECT_TRUE(c.has("aten::bernoulli"));
}

at::Tensor sage_layer(const at::Tensor& x, const at::Tensor& edges) {
  const int64_t n = x.size(0), e = edges.size(1), d = x.size(1);
  at::Tensor to = edges.select(0, 1), m = at::index_select(x, -2, edges.select(0, 0));
  at::Tensor count = at::scatter_add(m.new_zeros({n}), 0, to, m.new_ones({e})).clamp_min(1);
  return at::scatter_add(m.new_zeros({n, d}), 0, to.view({-1, 1}).expand({e, d}), m) / count.view({-1, 1});
}

TEST(Passes, MessagesBecomeSumsOverNeighbours) {
  at::Tensor edges = at::randint(0, 50, {2, 700}, at::kLong);
  Captured c({at::randn({60, 70}), edges}, {}, [](auto& a, auto&) { return sage_layer(a[0], a[1]); });
  EXPECT_TRUE(fuse_segments(*c.program.graph, {}, *c.state));
  EXPECT_FALSE(c.has("aten::scatter_add"));
  EXPECT_FALSE(c.has("aten::index_select"));
  expect_close(c.interpreted(), c.eager());
  EXPECT_TRUE(hoist_frozen(*c.program.graph, {}, *c.state));
  EXPECT_FALSE(c.has("vitrify::edge_csr"));
  EXPECT_FALSE(c.has("vitrify::edge_degree"));
  expect_close(c.interpreted(), c.eager());
}

TEST(Passes, EdgesThatChangeAreGroupedAgain) {
  at::Tensor edges = at::randint(0, 50, {2, 700}, at::kLong), x = at::randn({60, 70});
  Captured c({x, edges}, {}, [](auto& a, auto&) { return sage_layer(a[0], a[1]); });
  auto compiled = CompiledGraph::compile(std::move(c.program), {});
  auto check = [&](const at::Tensor& e) { expect_close(compiled->run({x, e})[0], sage_layer(x, e)); };
  check(edges);
  edges.select(1, 5).fill_(7);
  check(edges);
  edges.data_ptr<int64_t>()[3] = 49;  // as numpy writes: no version is counted
  check(edges);
  check(at::randint(0, 50, {2, 700}, at::kLong));
  check(edges);
  edges[0][0] = 60;
  EXPECT_THROW(compiled->run({x, edges}), c10::IndexError);
  edges[0][0] = 0;
  edges[1][0] = 60;
  EXPECT_THROW(compiled->run({x, edges}), c10::Error);
  edges[1][0] = 0;
  check(edges);
}

// --- changes of weights, through the whole compiler
struct Twice : testing::Test {
  at::Tensor w = at::randn({64, 64}), x = at::randn({4, 64});
  std::shared_ptr<CompiledGraph> compiled;
  void SetUp() override {
    Captured c({x}, {w}, [](auto& a, auto& q) { return at::mm(a[0], q[0].exp()); });
    compiled = CompiledGraph::compile(std::move(c.program), {});
    check();
  }
  void check() {
    at::NoGradGuard no_grad;
    expect_close(compiled->run({x})[0], at::mm(x, w.exp()));
  }
};
TEST_F(Twice, SeesInPlaceWrites) {
  w.mul_(0.5);
  check();
  w.select(0, 3).zero_();
  check();
}
TEST_F(Twice, SeesDataBeingReplaced) {
  w.set_data(at::randn({64, 64}));
  check();
  for (int i = 0; i < 8; ++i) {  // the allocator gives the same address again
    w.set_data(at::randn({64, 64}));
    check();
  }
}
TEST_F(Twice, SeesWritesThroughData) {
  w.tensor_data().mul_(0.5);  // counts no version of w
  check();
  w.tensor_data().normal_();
  check();
}
TEST_F(Twice, SeesCopies) {
  w.copy_(at::randn({64, 64}));
  check();
}
TEST_F(Twice, ManyThreads) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  x = at::rand({4, 64});  // positive: element by element, sums that cancel would show the order of their terms
  const at::Tensor want = at::mm(x, w.exp());
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i)
        if (!at::allclose(compiled->run({x})[0], want)) ++wrong;
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
