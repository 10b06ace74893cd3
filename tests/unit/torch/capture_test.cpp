// Capture without Python: programs written in C++ are recorded, and the recorded program run op by op gives what eager gives, memory effects
// included.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/torch.h>

#include <functional>

#include "torch/mode.h"
#include "torch/tracer.h"

namespace vitrify {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Fn = std::function<Tensors(Tensors)>;
using Kind = ResultSpec::Kind;

Program capture(const Fn& fn, const Tensors& args, bool unknown = true) {
  TracerOptions options;
  options.check_shapes = true;
  Tracer tracer(options);
  Tensors fakes;
  for (size_t i = 0; i < args.size(); ++i) fakes.push_back(tracer.add_input(args[i], ir::InputKind::Argument, "a" + std::to_string(i)));
  tracer.accept_unknown_tensors(unknown);
  tracer.start();
  Program p = tracer.finish(fn(std::move(fakes)));
  ir::verify(*p.graph);
  return p;
}

std::string why_not(const Fn& fn, const Tensors& args, bool unknown = true) {
  try {
    capture(fn, args, unknown);
  } catch (const CaptureError& e) {
    return e.what();
  }
  return "captured";
}

size_t count(const Program& p, const std::string& op) {
  size_t n = 0;
  for (const ir::Node* x : p.graph->nodes()) n += x->op->name == op;
  return n;
}

bool same(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  return !a.defined() || (a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() && at::equal(a, b));
}

// Runs fn eagerly and as captured on clones of args; results, arguments, versions and the aliasing between all of them must agree.
Program agrees(const Fn& fn, const Tensors& args, bool check_types = true) {
  at::NoGradGuard no_grad;
  auto copies = [&] {
    Tensors c;
    for (size_t i = 0; i < args.size(); ++i) {
      bool seen = false;
      for (size_t j = 0; j < i && !seen; ++j)
        if (args[i].is_same(args[j])) c.push_back(c[j]), seen = true;
      if (!seen) c.push_back(at::empty_strided(args[i].sizes(), args[i].strides(), args[i].options()).copy_(args[i]));
    }
    for (Tensor& t : c) t.unsafeGetTensorImpl()->bump_version();
    return c;
  };
  Tensors eager_args = copies(), our_args = copies();
  Tensors eager = fn(eager_args);
  auto before = our_args.empty() ? 0 : our_args[0]._version();
  Program p = capture(fn, our_args);
  if (!our_args.empty()) EXPECT_EQ(our_args[0]._version(), before) << "capture may not touch its inputs";
  Tensors ours = interpret(p, our_args, check_types);
  EXPECT_EQ(eager.size(), ours.size());
  Tensors all_eager = eager, all_ours = ours;
  all_eager.insert(all_eager.end(), eager_args.begin(), eager_args.end());
  all_ours.insert(all_ours.end(), our_args.begin(), our_args.end());
  for (size_t i = 0; i < all_eager.size(); ++i) {
    EXPECT_TRUE(same(all_eager[i], all_ours[i])) << "tensor " << i << "\n" << all_eager[i] << "\n" << all_ours[i] << "\n" << ir::print(*p.graph);
    if (!all_eager[i].defined()) continue;
    for (size_t j = 0; j < i; ++j) {
      if (!all_eager[j].defined()) continue;
      EXPECT_EQ(all_eager[i].is_same(all_eager[j]), all_ours[i].is_same(all_ours[j])) << i << " and " << j;
      EXPECT_EQ(all_eager[i].storage().is_alias_of(all_eager[j].storage()), all_ours[i].storage().is_alias_of(all_ours[j].storage()))
          << i << " and " << j;
    }
  }
  for (size_t i = 0; i < args.size(); ++i) EXPECT_EQ(eager_args[i]._version(), our_args[i]._version()) << "version of argument " << i;
  return p;
}

Tensor randn(at::IntArrayRef s) { return at::randn(s); }

TEST(Capture, Arithmetic) {
  Program p = agrees([](Tensors a) { return Tensors{(a[0] * 2 + a[1]).exp() / 3.5}; }, {randn({3, 4}), randn({4})});
  EXPECT_EQ(p.num_args, 2u);
  EXPECT_TRUE(p.captured.empty());
  EXPECT_TRUE(p.mutations.empty());
}

TEST(Capture, Mlp) {
  torch::manual_seed(0);
  torch::nn::Sequential m(torch::nn::Linear(8, 16), torch::nn::ReLU(), torch::nn::Linear(16, 4));
  Program p = agrees([&](Tensors a) { return Tensors{m->forward(a[0])}; }, {randn({5, 8})});
  EXPECT_EQ(p.captured.size(), 4u);
  EXPECT_TRUE(p.captured[0].is_same(m->parameters()[0]) || p.captured[1].is_same(m->parameters()[0]));
  // Captured tensors are read live.
  at::NoGradGuard no_grad;
  for (Tensor& t : m->parameters()) t.mul_(2);
  Tensor x = randn({5, 8});
  EXPECT_TRUE(at::equal(interpret(p, {x})[0], m->forward(x)));
}

TEST(Capture, ConvNetInEvalMode) {
  torch::manual_seed(0);
  torch::nn::Sequential m(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)), torch::nn::BatchNorm2d(8), torch::nn::ReLU());
  m->eval();
  agrees([&](Tensors a) { return Tensors{m->forward(a[0])}; }, {randn({2, 3, 8, 8})});
}

TEST(Capture, Attention) {
  agrees(
      [](Tensors a) {
        Tensor q = a[0].view({2, 6, 4, 8}).transpose(1, 2), k = a[1].view({2, 6, 4, 8}).transpose(1, 2);
        return Tensors{at::matmul(at::softmax(at::matmul(q, k.transpose(-1, -2)) * 0.35, -1), k).transpose(1, 2).reshape({2, 6, 32})};
      },
      {randn({2, 6, 32}), randn({2, 6, 32})});
}

TEST(Capture, InferenceMode) {
  Tensor w = randn({4, 4}), x = randn({4, 4});
  c10::InferenceMode mode;
  Program p = capture([&](Tensors a) { return Tensors{at::linear(a[0], w).reshape({-1}).contiguous()}; }, {x});
  EXPECT_EQ(count(p, "aten::linear"), 1u);
  EXPECT_TRUE(at::equal(interpret(p, {x})[0], at::linear(x, w).reshape({-1})));
}

TEST(Capture, Pieces) {
  agrees(
      [](Tensors a) {
        auto c = a[0].chunk(3, 1);
        auto s = a[0].split(2, 0);
        auto u = a[0].unbind(0);
        return Tensors{at::cat({c[0], c[2]}, 1), s[0] + s[1], u[0] * u[3], at::stack({u[1], u[2]}, 1)};
      },
      {randn({4, 6})});
}

TEST(Capture, Constants) {
  Program p = agrees([](Tensors a) { return Tensors{a[0] + at::arange(4, at::kFloat), a[0] * at::full({4}, 2.5), at::zeros({2})}; }, {randn({4})});
  EXPECT_TRUE(p.captured.empty());
}

TEST(Capture, ResultOfDefaultDtypeIsPinned) {
  Program p = capture([](Tensors) { return Tensors{at::ones({2})}; }, {});
  at::set_default_dtype(caffe2::TypeMeta::Make<double>());
  Tensor r = interpret(p, {})[0];
  at::set_default_dtype(caffe2::TypeMeta::Make<float>());
  EXPECT_EQ(r.scalar_type(), at::kFloat);
}

// ---- writes and views

TEST(CaptureWrites, ViewOfAnInputWrittenAndReturned) {
  Program p = agrees(
      [](Tensors a) {
        Tensor v = a[0][0];
        v.mul_(2);
        return Tensors{v};
      },
      {randn({3, 4})});
  ASSERT_EQ(p.mutations.size(), 1u);
  EXPECT_EQ(p.mutations[0].version_bumps, 1);
  ASSERT_EQ(p.results[0].kind, Kind::ViewOfInput);
  ASSERT_EQ(p.results[0].path.size(), 1u);
  EXPECT_EQ(p.results[0].path[0].op, "aten::select.int");
}

TEST(CaptureWrites, DetachedWrite) {
  agrees(
      [](Tensors a) {
        Tensor d = a[0].detach(), y = a[0] * 2;
        d.add_(5);
        return Tensors{y, d};
      },
      {randn({3})});
}

TEST(CaptureWrites, ThroughDataCountsNoVersion) {
  Program p = agrees(
      [](Tensors a) {
        a[0].variable_data().add_(1);
        return Tensors{};
      },
      {randn({3})});
  ASSERT_EQ(p.mutations.size(), 1u);
  EXPECT_EQ(p.mutations[0].version_bumps, 0);
}

TEST(CaptureWrites, TwiceIsTwoVersions) {
  Program p = agrees(
      [](Tensors a) {
        a[0].add_(1);
        Tensor y = a[0] * 1;
        a[0].sub_(1);
        return Tensors{y};
      },
      {randn({3})});
  EXPECT_EQ(p.mutations[0].version_bumps, 2);
}

TEST(CaptureWrites, CopyFillZero) {
  agrees(
      [](Tensors a) {
        a[0].copy_(a[1]);
        a[1].fill_(3);
        a[2].zero_();
        return Tensors{};
      },
      {randn({2, 3}), randn({3}), randn({2, 2}).t()});
}

TEST(CaptureWrites, Swap) {
  agrees(
      [](Tensors a) {
        Tensor t = a[0].clone();
        a[0].copy_(a[1]);
        a[1].copy_(t);
        return Tensors{};
      },
      {randn({3}), randn({3})});
}

TEST(CaptureWrites, CopyOfAnInputIsNotTheInput) {
  agrees(
      [](Tensors a) {
        Tensor b = at::empty_like(a[0]);
        b.copy_(a[0]);
        return Tensors{b};
      },
      {randn({3})});
}

TEST(CaptureWrites, ThroughEveryKindOfView) {
  std::vector<std::pair<const char*, std::function<Tensor(Tensor)>>> views = {
      {"select", [](Tensor x) { return x.select(1, 2); }},
      {"slice", [](Tensor x) { return x.slice(1, 1, 6, 2); }},
      {"negative slice", [](Tensor x) { return x.slice(0, -2); }},
      {"t", [](Tensor x) { return x.t(); }},
      {"transpose", [](Tensor x) { return x.view({2, 2, 6}).transpose(0, -1); }},
      {"permute", [](Tensor x) { return x.view({2, 2, 6}).permute({2, 0, 1}).select(0, 1); }},
      {"view", [](Tensor x) { return x.view({2, 12})[1]; }},
      {"unsqueeze", [](Tensor x) { return x.unsqueeze(1).select(0, 3); }},
      {"squeeze", [](Tensor x) { return x.view({1, 24}).squeeze(0).slice(0, 3, 9); }},
      {"diagonal", [](Tensor x) { return x.diagonal(1); }},
      {"split", [](Tensor x) { return x.split(4, 1)[1]; }},
      {"chunk of rows", [](Tensor x) { return x.chunk(2)[1].t(); }},
      {"unbind", [](Tensor x) { return x.unbind(1)[3]; }},
      {"as_strided", [](Tensor x) { return x.as_strided({2, 3}, {6, 2}, 1); }},
      {"expand of the same size", [](Tensor x) { return x.expand({4, 6}); }},
  };
  for (auto& [name, view] : views) {
    SCOPED_TRACE(name);
    agrees(
        [&](Tensors a) {
          Tensor y = a[0] + 1;
          Tensor v = view(y);
          v.mul_(3);
          Tensor w = view(a[0]);
          w.add_(v);
          return Tensors{y, w};
        },
        {randn({4, 6})});
  }
}

TEST(CaptureWrites, StaleViewsSeeTheWrite) {
  agrees(
      [](Tensors a) {
        Tensor y = a[0] * 1, row = y[1], flat = y.view(-1), both = y.t();
        y.select(1, 0).fill_(7);
        flat.slice(0, 2, 4).add_(row.slice(0, 0, 2));
        return Tensors{row * 1, flat + 0, both.clone()};
      },
      {randn({3, 4})});
}

TEST(CaptureWrites, OutArguments) {
  agrees(
      [](Tensors a) {
        Tensor o = at::empty({3});
        at::add_out(o, a[0], a[1]);
        at::mul_out(a[1], o, a[0]);
        return Tensors{o};
      },
      {randn({3}), randn({3})});
}

TEST(CaptureWrites, CastOnStore) {
  agrees(
      [](Tensors a) {
        a[0].add_(a[1]);
        return Tensors{};
      },
      {randn({3}).to(at::kHalf), randn({3})});
}

TEST(CaptureWrites, IndexPut) {
  agrees(
      [](Tensors a) {
        a[0].index_put_({a[1]}, a[2], true);
        return Tensors{a[0] * 2};
      },
      {randn({5, 2}), at::tensor({0, 3, 3}), randn({3, 2})});
}

TEST(CaptureWrites, Foreach) {
  agrees(
      [](Tensors a) {
        at::_foreach_add_({a[0], a[1]}, 1.5);
        return Tensors{};
      },
      {randn({3}), randn({2})});
}

TEST(CaptureWrites, MetadataInPlace) {
  Program p = agrees(
      [](Tensors a) {
        a[0].t_();
        a[0].unsqueeze_(0);
        return Tensors{a[0] * 2, a[0]};
      },
      {randn({3, 4})});
  ASSERT_EQ(p.mutations.size(), 1u);
  EXPECT_TRUE(p.mutations[0].metadata_only);
  EXPECT_EQ(p.results[1].kind, Kind::Input);
}

TEST(CaptureWrites, WriteThenMetadata) {
  agrees(
      [](Tensors a) {
        a[0].add_(1);
        a[0].t_();
        a[0].mul_(2);
        return Tensors{};
      },
      {randn({3, 4})});
}

TEST(CaptureWrites, RunningStatistics) {
  Tensor mean = at::zeros({3}), var = at::ones({3});
  Tensor x = randn({4, 3});
  auto f = [](Tensors a) { return Tensors{at::batch_norm(a[0], {}, {}, a[1], a[2], true, 0.1, 1e-5, false)}; };
  Program p = agrees(f, {x, mean, var});
  EXPECT_EQ(p.mutations.size(), 2u);
}

TEST(CaptureWrites, CapturedBuffer) {
  Tensor counter = at::zeros({1});
  Program p = capture(
      [&](Tensors a) {
        counter.add_(1);
        return Tensors{a[0] + counter};
      },
      {at::zeros({1})});
  EXPECT_EQ(counter.item<float>(), 0);
  auto version = counter._version();
  EXPECT_EQ(interpret(p, {at::zeros({1})})[0].item<float>(), 1);
  EXPECT_EQ(interpret(p, {at::zeros({1})})[0].item<float>(), 2);
  EXPECT_EQ(counter.item<float>(), 2);
  EXPECT_EQ(counter._version(), version + 2);
}

// ---- results

TEST(CaptureResults, ViewsOfAResult) {
  Program p = agrees(
      [](Tensors a) {
        Tensor y = a[0] * 2;
        return Tensors{y, y[0], y.t(), y};
      },
      {randn({3, 4})});
  EXPECT_EQ(p.results[1].kind, Kind::ViewOfValue);
  EXPECT_EQ(p.graph->outputs.size(), 1u);
  agrees(
      [](Tensors a) {
        Tensor y = a[0] * 2;
        return Tensors{y[0], y};
      },
      {randn({3, 4})});
}

TEST(CaptureResults, SameObjects) {
  agrees([](Tensors a) { return Tensors{a[0], a[0].slice(0), a[0].detach(), a[0].contiguous(), a[0].to(at::kFloat), a[0].view({12})}; },
         {randn({3, 4})});
}

TEST(CaptureResults, UnbindOfAnInput) {
  agrees([](Tensors a) { return Tensors(a[0].unbind(0)); }, {randn({3, 4})});
}

TEST(CaptureResults, ViewsWithoutTheirBase) {
  Program p = agrees(
      [](Tensors a) {
        Tensor y = a[0] * 2;
        return Tensors{y.slice(1, 0, 2), y.slice(1, 2, 4)};
      },
      {randn({3, 4})});
  EXPECT_EQ(p.results[0].kind, Kind::ViewOfOutput);
  EXPECT_EQ(p.graph->outputs.size(), 1u);
  agrees(
      [](Tensors a) {
        Tensor y = a[0] * 2;
        return Tensors{y.slice(0, 0, 2), y.slice(0, 1, 3)};
      },
      {randn({3, 4})});
}

TEST(CaptureResults, UndefinedAndUnused) {
  Program p = agrees(
      [](Tensors a) {
        Tensor unused = a[0].exp();
        return Tensors{Tensor(), a[1] + 1};
      },
      {randn({2}), randn({2})});
  EXPECT_EQ(count(p, "aten::exp"), 0u);
}

TEST(CaptureResults, RealTensorPassedThrough) {
  Tensor w = randn({2});
  Program p = capture([&](Tensors a) { return Tensors{w, a[0] + w}; }, {randn({2})});
  EXPECT_TRUE(interpret(p, {randn({2})})[0].is_same(w));
}

TEST(CaptureResults, SameTensorTwice) {
  Tensor x = randn({3});
  agrees(
      [](Tensors a) {
        a[0].add_(1);
        return Tensors{a[0] + a[1]};
      },
      {x, x});
}

// ---- refusals

TEST(CaptureErrors, ReadsOfValues) {
  EXPECT_EQ(why_not(
                [](Tensors a) {
                  a[0].sum().item();
                  return a;
                },
                {randn({2})}),
            "reads a tensor's value: aten::item");
  EXPECT_EQ(why_not([](Tensors a) { return Tensors{a[0].index({a[0].to(at::kByte)})}; }, {randn({2})}),
            "reads a tensor's value: indexing with a mask of bytes, or of no dims");
}

TEST(CaptureErrors, MemoryTricks) {
  Tensor x = randn({6});
  EXPECT_NE(why_not(
                [](Tensors a) {
                  a[0].slice(0, 1).copy_(a[0].slice(0, 0, -1));
                  return a;
                },
                {x}),
            "captured");
  EXPECT_NE(why_not(
                [](Tensors a) {
                  a[0][0].expand({3}).add_(1);
                  return a;
                },
                {x}),
            "captured");
  EXPECT_NE(why_not(
                [](Tensors a) {
                  a[0].view({2, 3}).t().resize_({2});
                  return a;
                },
                {x}),
            "captured");
  EXPECT_EQ(why_not(
                [](Tensors a) {
                  a[0].resize_({2});
                  return a;
                },
                {randn({6})}),
            "captured");
  EXPECT_NE(why_not(
                [](Tensors a) {
                  a[0].set_(a[1]);
                  return a;
                },
                {x, randn({2})}),
            "captured");
  EXPECT_EQ(why_not(
                [](Tensors a) {
                  a[0].add_(1);
                  return a;
                },
                {x, x.slice(0, 2)}),
            "aten::add_.Scalar writes to input 'a0', which shares memory with input 'a1'");
  EXPECT_EQ(why_not([](Tensors a) { return Tensors{a[0].sum() + a[1].sum()}; }, {x, x.slice(0, 2)}), "captured");
}

TEST(CaptureErrors, UnknownRealTensors) {
  Tensor w = randn({2});
  EXPECT_EQ(why_not([&](Tensors a) { return Tensors{a[0] + w}; }, {randn({2})}, false),
            "meets a tensor that is neither an argument nor reachable from the program's variables");
}

TEST(CaptureErrors, InputsOutOfScope) {
  EXPECT_NE(why_not([](Tensors a) { return a; }, {randn({2, 2}).to_sparse()}), "captured");
  EXPECT_NE(why_not([](Tensors a) { return a; }, {at::empty({2}, at::kMeta)}), "captured");
}

TEST(CaptureErrors, DataOfAPlaceholder) {
  Tensor leaked;
  capture(
      [&](Tensors a) {
        leaked = a[0] + 1;
        return a;
      },
      {randn({2})});
  EXPECT_THROW(leaked.data_ptr<float>(), c10::Error);
  EXPECT_THROW(leaked + 1, c10::Error);
  EXPECT_EQ(why_not([&](Tensors a) { return Tensors{a[0] + leaked}; }, {randn({2})}), "a placeholder of an earlier capture is used");
}

TEST(CaptureErrors, StateIsRestored) {
  Tensor x = randn({4});
  at::Generator g = at::detail::getDefaultCPUGenerator();
  Tensor before = g.get_state();
  ASSERT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_THROW(capture(
                   [](Tensors a) -> Tensors {
                     at::manual_seed(3);
                     throw std::logic_error("user");
                   },
                   {x}),
               std::logic_error);
  EXPECT_TRUE(at::equal(before, g.get_state()));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_EQ(Tracer::current(), nullptr);
  EXPECT_EQ(compat::ModeStack::stack_len(), 0);
  EXPECT_TRUE((x + 1).defined());
  EXPECT_FALSE(Tracer::is_fake(x + 1));
}

TEST(CaptureErrors, SwallowedFailureStillFails) {
  EXPECT_NE(why_not(
                [](Tensors a) {
                  try {
                    a[0].sum().item();
                  } catch (...) {
                  }
                  return a;
                },
                {randn({2})}),
            "captured");
}

TEST(CaptureErrors, OneAtATime) {
  EXPECT_EQ(why_not(
                [](Tensors a) {
                  Tracer inner;
                  inner.start();
                  return a;
                },
                {randn({2})}),
            "a capture is already running on this thread");
}

}  // namespace
}  // namespace vitrify
