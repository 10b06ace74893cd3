// Capture with dynamic sizes: one recorded program serves every size its guards accept.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "torch/tracer.h"

namespace vitrify {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Fn = std::function<Tensors(Tensors)>;

Program capture(const Fn& fn, const Tensors& args, const std::vector<std::vector<DimMark>>& marks) {
  TracerOptions options;
  options.check_shapes = true;
  Tracer tracer(options);
  Tensors fakes;
  for (size_t i = 0; i < args.size(); ++i) fakes.push_back(tracer.add_input(args[i], ir::InputKind::Argument, "a" + std::to_string(i), marks[i]));
  tracer.accept_unknown_tensors(true);
  tracer.start();
  Program p = tracer.finish(fn(std::move(fakes)));
  ir::verify(*p.graph);
  return p;
}

const DimMark dynamic{true};

// Captured at one size, right at others, without a guard that pins the size.
Program agrees_at(const Fn& fn, const std::function<Tensors(int64_t)>& make, const std::vector<std::vector<DimMark>>& marks) {
  at::NoGradGuard no_grad;
  Program p = capture(fn, make(6), marks);
  for (const sym::Guard& g : p.graph->ctx().guards()) EXPECT_NE(g.kind, sym::Guard::Kind::EqZero) << sym::str(g.expr) << "\n" << ir::print(*p.graph);
  for (int64_t n : {6, 3, 10}) {
    Tensors a = make(n), b;
    for (Tensor& t : a) b.push_back(t.clone());
    Tensors want = fn(a), got = interpret(p, b, false);
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(want[i].sizes(), got[i].sizes()) << "size " << n;
      EXPECT_TRUE(at::equal(want[i], got[i])) << "size " << n;
    }
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "argument " << i << " at size " << n;
  }
  return p;
}

TEST(CaptureDynamic, Pointwise) {
  Program p = agrees_at([](Tensors a) { return Tensors{(a[0] * 2 + a[1]).relu()}; },
                        [](int64_t n) { return Tensors{at::randn({n, 4}), at::randn({4})}; }, {{dynamic}, {}});
  EXPECT_EQ(p.graph->ctx().num_symbols(), 1u);
  EXPECT_FALSE(p.graph->outputs[0].type().sizes[0].is_const());
  EXPECT_TRUE(p.graph->outputs[0].type().strides[0].is(4));
}

TEST(CaptureDynamic, Linear) {
  Tensor w = at::randn({5, 4}), b = at::randn({5});
  agrees_at([&](Tensors a) { return Tensors{at::softmax(at::addmm(b, a[0], w.t()), -1)}; }, [](int64_t n) { return Tensors{at::randn({n, 4})}; },
            {{dynamic}});
}

TEST(CaptureDynamic, Views) {
  agrees_at(
      [](Tensors a) {
        Tensor x = a[0].view_symint({a[0].sym_size(0), 2, 4}).transpose(0, 1);
        return Tensors{x.unsqueeze(0) + 1, a[0].slice(1, 2, 6) * 2, a[0].select(0, 1) + 0, a[0].t() * a[0].t()};
      },
      [](int64_t n) { return Tensors{at::randn({n, 8})}; }, {{dynamic}});
}

TEST(CaptureDynamic, SizesAsNumbers) {
  agrees_at(
      [](Tensors a) {
        c10::SymInt n = a[0].sym_size(0);
        return Tensors{a[0].new_zeros_symint({n * 2, n + 1}), a[0].expand_symint({3, n}) * 1};
      },
      [](int64_t n) { return Tensors{at::randn({n})}; }, {{dynamic}});
}

TEST(CaptureDynamic, Writes) {
  agrees_at(
      [](Tensors a) {
        a[0].select(1, 0).add_(1);
        a[0].mul_(2);
        return Tensors{a[0] + 1};
      },
      [](int64_t n) { return Tensors{at::randn({n, 3})}; }, {{dynamic}});
}

TEST(CaptureDynamic, BranchOnASizeIsAGuard) {
  Program p = capture([](Tensors a) { return Tensors{a[0].sym_size(0) > 4 ? a[0] + 1 : a[0] - 1}; }, {at::randn({6})}, {{dynamic}});
  EXPECT_EQ(p.graph->ctx().guards().size(), 1u);
}

TEST(CaptureDynamic, AskingForTheNumberPinsIt) {
  Program p = capture([](Tensors a) { return Tensors{a[0] * double(a[0].size(0))}; }, {at::randn({6, 2})}, {{dynamic, dynamic}});
  ASSERT_EQ(p.graph->ctx().guards().size(), 1u);
  EXPECT_EQ(p.graph->ctx().guards()[0].kind, sym::Guard::Kind::EqZero);
}

TEST(CaptureDynamic, TwoSizesMadeEqual) {
  Program p = capture([](Tensors a) { return Tensors{a[0] + a[1]}; }, {at::randn({6}), at::randn({6})}, {{dynamic}, {dynamic}});
  EXPECT_EQ(p.graph->ctx().num_symbols(), 2u);
  EXPECT_GE(p.graph->ctx().guards().size(), 1u);
}

TEST(CaptureDynamic, OneIsNeverASymbol) {
  Program p = capture([](Tensors a) { return Tensors{a[0] + 1}; }, {at::randn({1, 6})}, {{dynamic, dynamic}});
  EXPECT_EQ(p.graph->ctx().num_symbols(), 1u);
}

}  // namespace
}  // namespace vitrify
