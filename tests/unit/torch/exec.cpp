// PlanRun on hand-made plans: kernels are plain functions, so only the executor is under test.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "runtime/memory.h"
#include "torch/executor.h"

using namespace vitrify;
using runtime::Plan;
using runtime::SlotKind;
using runtime::Step;
using sym::Int;

namespace {

void add_one(void* const* b, const int64_t*, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) static_cast<float*>(b[1])[i] = static_cast<const float*>(b[0])[i] + 1;
}
void sum_rows(void* const* b, const int64_t* sizes, int64_t begin, int64_t end) {  // scratch: one row
  for (int64_t i = begin; i < end; ++i) {
    auto* row = static_cast<float*>(b[2]);
    std::memcpy(row, static_cast<const float*>(b[0]) + i * sizes[0], static_cast<size_t>(sizes[0]) * 4);
    float s = 0;
    for (int64_t k = 0; k < sizes[0]; ++k) s += row[k];
    static_cast<float*>(b[1])[i] = s;
  }
}
void fault_if_negative(void* const* b, const int64_t*, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float x = static_cast<const float*>(b[0])[i];
    if (x < 0) *static_cast<int32_t*>(b[2]) = x < -1 ? 2 : 1;
    static_cast<float*>(b[1])[i] = x;
  }
}

ir::TensorType type(std::vector<Int> sizes, DType t = DType::F32) {
  ir::TensorType out;
  out.dtype = t;
  out.sizes.assign(sizes.begin(), sizes.end());
  out.strides = ir::contiguous_strides(out.sizes);
  return out;
}

struct Builder {
  std::shared_ptr<Plan> plan = std::make_shared<Plan>();
  std::shared_ptr<ir::Graph> graph = std::make_shared<ir::Graph>();
  Builder() { plan->graph = graph; }

  uint32_t slot(SlotKind kind, const ir::TensorType& t, uint32_t index = 0, int64_t arena_offset = 0) {
    runtime::Slot s;
    s.kind = kind;
    s.index = index;
    s.dtype = t.dtype;
    s.sizes.assign(t.sizes.begin(), t.sizes.end());
    s.strides.assign(t.strides.begin(), t.strides.end());
    s.bytes = t.numel() * static_cast<int64_t>(size_of(t.dtype));
    s.arena_offset = arena_offset;
    plan->slots.push_back(s);
    for (auto d : t.sizes) plan->dynamic = plan->dynamic || !d.is_const();
    return static_cast<uint32_t>(plan->slots.size() - 1);
  }
  uint32_t input(ir::TensorType t, std::string name = "x") {
    auto n = static_cast<uint32_t>(graph->inputs.size());
    graph->add_input(ir::InputKind::Argument, std::move(name), t);
    return slot(SlotKind::Input, t, n);
  }
  void launch(runtime::KernelFn fn, std::vector<uint32_t> slots, Int iterations, std::vector<Int> sizes = {}, size_t scratch = 0,
              bool may_fault = false, int64_t grain = 1) {
    plan->kernels.push_back({fn, scratch, may_fault, "k"});
    std::vector<char> writes(slots.size(), 1);
    plan->launches.push_back({.kernel = static_cast<uint32_t>(plan->kernels.size() - 1),
                              .slots = std::move(slots),
                              .writes = std::move(writes),
                              .sizes = std::move(sizes),
                              .iterations = iterations,
                              .scratch_bytes = static_cast<int64_t>(scratch),
                              .grain = grain});
    plan->steps.push_back({Step::Kind::Launch, static_cast<uint32_t>(plan->launches.size() - 1)});
  }
  runtime::TensorRef ref(uint32_t s) { return {s, plan->slots[s].sizes, plan->slots[s].strides, 0}; }
  void call(ir::Node* n, std::vector<runtime::TensorRef> operands, std::vector<int32_t> results) {
    plan->externs.push_back({n, std::move(operands), std::move(results)});
    plan->steps.push_back({Step::Kind::Extern, static_cast<uint32_t>(plan->externs.size() - 1)});
  }
  void output(uint32_t s) { plan->outputs.push_back({.ref = ref(s)}); }
  void finish() {
    plan->known = sym::known(graph->ctx());
    for (auto& s : plan->slots) s.first_step = s.last_step = -1;
    auto lives = runtime::lifetimes(*plan);
    for (size_t i = 0; i < lives.size(); ++i) {
      plan->slots[i].first_step = lives[i].first;
      plan->slots[i].last_step = lives[i].last;
    }
  }
};

std::vector<at::Tensor> run(PlanRun& r, const std::vector<at::Tensor>& in) {
  std::vector<const at::Tensor*> p;
  for (auto& t : in) p.push_back(&t);
  std::vector<at::Tensor> out;
  PlanGuard guard;
  r.run(p.data(), out);
  return out;
}

TEST(Exec, KernelThenOutCall) {
  Builder b;
  auto x = b.input(type({300, 40})), w = b.input(type({40, 8}), "w");
  auto h = b.slot(SlotKind::Arena, type({300, 40}), 0, 0);
  auto y = b.slot(SlotKind::Output, type({300, 8}));
  b.plan->arena_bytes = 300 * 40 * 4;
  b.launch(add_one, {x, h}, 300 * 40, {}, 0, false, 1000);
  auto* mm = b.graph->append(b.graph->op("aten::mm"), {b.graph->inputs[0].value, b.graph->inputs[1].value}, {type({300, 8})});
  b.call(mm, {b.ref(h), b.ref(w)}, {static_cast<int32_t>(y)});
  b.output(y);
  b.finish();
  PlanRun r(b.plan);
  at::Tensor xs = at::randn({300, 40}), ws = at::randn({40, 8});
  auto first = run(r, {xs, ws})[0];
  EXPECT_TRUE(at::equal(first, (xs + 1).mm(ws)));
  auto kept = first.clone();
  at::Tensor x2 = at::randn({300, 40});
  auto second = run(r, {x2, ws})[0];
  EXPECT_TRUE(at::equal(second, (x2 + 1).mm(ws)));
  EXPECT_TRUE(at::equal(first, kept));  // results are the caller's
}

TEST(Exec, ExternSlotsViewsAndPromisedStrides) {
  Builder b;
  auto x = b.input(type({6, 4}));
  // A window of the input: rows 2..4, every second column.
  auto n = b.graph->append(b.graph->op("aten::exp"), {b.graph->inputs[0].value}, {type({2, 2})});
  ir::TensorType t = type({2, 2});
  std::swap(t.strides[0], t.strides[1]);  // promised column-major, ATen gives row-major
  auto e = b.slot(SlotKind::Extern, t);
  runtime::TensorRef window{x, {2, 2}, {4, 2}, 8};
  b.call(n, {window}, {static_cast<int32_t>(e)});
  auto y = b.slot(SlotKind::Output, type({4}));
  b.launch(add_one, {e, y}, 4);  // reads the extern's memory in its promised order
  b.output(y);
  b.plan->outputs.push_back({.ref = {e, {2}, {1}, 2}});
  b.finish();
  PlanRun r(b.plan);
  for (int i = 0; i < 2; ++i) {
    at::Tensor xs = at::randn({6, 4});
    auto out = run(r, {xs});
    auto want = xs.slice(0, 2, 4).slice(1, 0, 4, 2).exp();
    EXPECT_TRUE(at::allclose(out[0], want.t().reshape({4}) + 1));
    EXPECT_TRUE(at::equal(out[1], want.t().reshape({4}).slice(0, 2)));
  }
}

TEST(Exec, ResultsDoNotAliasOperands) {
  Builder b;
  auto x = b.input(type({16}));
  auto n = b.graph->append(b.graph->op("aten::contiguous"), {b.graph->inputs[0].value, ir::MemoryFormat::Contiguous}, {type({16})});
  auto e = b.slot(SlotKind::Extern, type({16}));
  b.call(n, {b.ref(x)}, {static_cast<int32_t>(e)});
  b.output(e);
  b.finish();
  PlanRun r(b.plan);
  at::Tensor xs = at::randn({16});
  auto out = run(r, {xs});
  EXPECT_TRUE(at::equal(out[0], xs));
  EXPECT_NE(out[0].data_ptr(), xs.data_ptr());
}

TEST(Exec, SymbolicSizesFollowTheInputs) {
  Builder b;
  Int s = b.graph->ctx().symbol(sym::SymbolKind::Size, 4, {2, 1 << 20});
  auto x = b.input(type({s, 8}));
  auto h1 = b.slot(SlotKind::Arena, type({s, 8})), h2 = b.slot(SlotKind::Arena, type({s, 8}));
  auto y = b.slot(SlotKind::Output, type({s}));
  b.launch(add_one, {x, h1}, s * 8);
  b.launch(add_one, {h1, h2}, s * 8);
  b.launch(sum_rows, {h2, y}, s, {Int(8)}, 8 * 4);
  b.output(y);
  b.finish();
  PlanRun r(b.plan);
  for (int64_t n : {4, 4, 1000, 7, 1000, 2, 30, 40, 50, 60, 70, 80, 90, 4}) {
    at::Tensor xs = at::randn({n, 8});
    EXPECT_TRUE(at::allclose(run(r, {xs})[0], (xs + 2).sum(1), 1e-5, 1e-5)) << n;
  }
}

TEST(Exec, SizesKnownOnlyWhileRunning) {
  Builder b;
  auto x = b.input(type({32}));
  Int u = b.graph->ctx().symbol(sym::SymbolKind::Unbacked, {}, {0, 32});
  auto n = b.graph->append(b.graph->op("aten::masked_select", ir::kDataDependent), {b.graph->inputs[0].value, b.graph->inputs[0].value}, {type({u})});
  // mask: a second input
  b.input(type({32}, DType::Bool), "mask");
  n->args[1] = b.graph->inputs[1].value;
  auto e = b.slot(SlotKind::Extern, type({u}));
  b.call(n, {b.ref(x), b.ref(1)}, {static_cast<int32_t>(e)});
  auto h = b.slot(SlotKind::Arena, type({u}));
  auto y = b.slot(SlotKind::Output, type({u}));
  b.launch(add_one, {e, h}, u);
  b.launch(add_one, {h, y}, u);
  b.output(y);
  b.finish();
  PlanRun r(b.plan);
  for (double p : {0.5, 0.0, 0.9, 0.1}) {
    at::Tensor xs = at::randn({32}), mask = at::rand({32}) < p;
    EXPECT_TRUE(at::equal(run(r, {xs, mask})[0], xs.masked_select(mask) + 1 + 1)) << p;
  }
}

TEST(Exec, FaultsRaiseWhatEagerRaises) {
  Builder b;
  auto x = b.input(type({64}));
  auto y = b.slot(SlotKind::Output, type({64}));
  b.launch(fault_if_negative, {x, y}, 64, {}, 0, true);
  b.output(y);
  b.finish();
  PlanRun r(b.plan);
  at::Tensor xs = at::ones({64});
  EXPECT_NO_THROW(run(r, {xs}));
  xs[63] = -0.5;
  EXPECT_THROW(run(r, {xs}), c10::IndexError);
  xs[63] = -2;
  try {
    run(r, {xs});
    FAIL();
  } catch (const c10::Error& e) {
    EXPECT_STREQ(e.what_without_backtrace(), "ZeroDivisionError");
  }
  xs[63] = 1;
  EXPECT_NO_THROW(run(r, {xs}));
}

TEST(Exec, KernelsUseEveryThreadTheyMay) {
  Builder b;
  auto x = b.input(type({1000}));
  auto y = b.slot(SlotKind::Output, type({1000}));
  static std::atomic<int> calls;
  b.launch(
      [](void* const* p, const int64_t* s, int64_t begin, int64_t end) {
        ++calls;
        add_one(p, s, begin, end);
      },
      {x, y}, 1000, {}, 0, false, 10);
  b.output(y);
  b.finish();
  PlanRun r(b.plan);
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  calls = 0;
  run(r, {at::randn({1000})});
  EXPECT_EQ(calls, 2);
  calls = 0;
  at::parallel_for(0, 2, 1, [&](int64_t, int64_t) {
    PlanRun mine(b.plan);
    run(mine, {at::randn({1000})});
  });
  EXPECT_EQ(calls, 2);  // one chunk each: no nested region
  at::set_num_threads(1);
  calls = 0;
  run(r, {at::randn({1000})});
  EXPECT_EQ(calls, 1);
  at::set_num_threads(before);
}

TEST(Exec, AutocastAndGradModeDoNotReachThePlan) {
  Builder b;
  auto x = b.input(type({8, 8}));
  auto n = b.graph->append(b.graph->op("aten::mm"), {b.graph->inputs[0].value, b.graph->inputs[0].value}, {type({8, 8})});
  auto y = b.slot(SlotKind::Extern, type({8, 8}));
  b.call(n, {b.ref(x), b.ref(x)}, {static_cast<int32_t>(y)});
  b.output(y);
  b.finish();
  PlanRun r(b.plan);
  at::Tensor xs = at::randn({8, 8}).requires_grad_();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  auto out = run(r, {xs})[0];
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(out.scalar_type(), at::kFloat);
  EXPECT_FALSE(out.requires_grad());
  EXPECT_TRUE(at::equal(out, xs.detach().mm(xs.detach())));
}

TEST(Memory, LargeResultsAreRecycled) {
  auto& cache = runtime::BlockCache::instance();
  cache.trim();
  void* p = cache.take(3 << 20);
  std::memset(p, 1, 3 << 20);
  cache.give_back(p);
  EXPECT_EQ(cache.idle_bytes(), size_t{3} << 20);  // no more than it needs: not two huge pages
  EXPECT_EQ(cache.take(3 << 20), p);
  cache.give_back(p);
  cache.trim();
  EXPECT_EQ(cache.idle_bytes(), 0u);
  at::Tensor t = new_result({8192, 1024}, {1024, 1}, at::kFloat, true);
  t.fill_(2);
  t.resize_({16384, 1024});  // an ordinary tensor in every respect
  EXPECT_EQ(t.select(0, 0).sum().item<float>(), 2048);
}

// y = x + 1 + 1, by way of the arena.
std::shared_ptr<Plan> through_arena(int64_t n) {
  Builder b;
  auto x = b.input(type({n}));
  auto h = b.slot(SlotKind::Arena, type({n}), 0, 0);
  auto y = b.slot(SlotKind::Output, type({n}));
  b.plan->arena_bytes = n * 4;
  b.launch(add_one, {x, h}, n, {}, 0, false, 1000);
  b.launch(add_one, {h, y}, n, {}, 0, false, 1000);
  b.output(y);
  b.finish();
  return b.plan;
}

TEST(Memory, PlansThatTakeTurnsShareAnArena) {
  auto& pool = runtime::ArenaPool::instance();
  const size_t before = pool.idle_bytes();
  constexpr int64_t kSmall = 1 << 19, kLarge = 1 << 20;
  {
    PlanRun small(through_arena(kSmall));
    at::Tensor x = at::randn({kSmall}), z = at::randn({kLarge});
    EXPECT_TRUE(at::equal(run(small, {x})[0], x + 1 + 1));
    EXPECT_EQ(pool.idle_bytes() - before, size_t{kSmall} * 4);
    {
      PlanRun large(through_arena(kLarge));
      EXPECT_TRUE(at::equal(run(large, {z})[0], z + 1 + 1));
      EXPECT_EQ(pool.idle_bytes() - before, size_t{kLarge} * 4);
      for (int i = 0; i < 2; ++i) {
        EXPECT_TRUE(at::equal(run(small, {x})[0], x + 1 + 1));
        EXPECT_TRUE(at::equal(run(large, {z})[0], z + 1 + 1));
      }
      EXPECT_EQ(pool.idle_bytes() - before, size_t{kLarge} * 4);
      // Two that run at once have one each.
      runtime::Arena first = pool.take(kLarge * 4), second = pool.take(kLarge * 4);
      EXPECT_NE(first.data(), second.data());
      pool.give_back(std::move(first));
      pool.give_back(std::move(second));
    }
    EXPECT_EQ(pool.idle_bytes(), before);  // nobody left wants as much
    EXPECT_TRUE(at::equal(run(small, {x})[0], x + 1 + 1));
    EXPECT_EQ(pool.idle_bytes() - before, size_t{kSmall} * 4);
  }
  EXPECT_EQ(pool.idle_bytes(), before);
}

TEST(Memory, PlansOnThreadsHaveAnArenaEach) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const int64_t n = (1 << 18) * (t + 1);
      PlanRun r(through_arena(n));
      at::Tensor x = at::full({n}, static_cast<float>(t));
      for (int i = 0; i < 20; ++i) wrong += !at::equal(run(r, {x})[0], x + 2);
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Memory, ArenaSlotsAliveTogetherDoNotOverlap) {
  Builder b;
  Int s = b.graph->ctx().symbol(sym::SymbolKind::Size, 4, {2, 1 << 20});
  auto x = b.input(type({s}));
  std::vector<uint32_t> h;
  for (int i = 0; i < 4; ++i) h.push_back(b.slot(SlotKind::Arena, type({s})));
  b.launch(add_one, {x, h[0]}, s);
  b.launch(add_one, {h[0], h[1]}, s);
  b.launch(add_one, {h[1], h[2]}, s);
  b.launch(add_one, {h[0], h[3]}, s);
  b.finish();
  runtime::SymbolValues v(b.graph->ctx().num_symbols());
  v.set(sym::view(s).symbol->id, 100);
  auto l = runtime::lay_out_arena(*b.plan, v);
  EXPECT_NE(l.offsets[h[0]], l.offsets[h[1]]);
  EXPECT_NE(l.offsets[h[0]], l.offsets[h[2]]);
  EXPECT_NE(l.offsets[h[0]], l.offsets[h[3]]);
  EXPECT_EQ(l.bytes, 3 * 448);
}

}  // namespace
