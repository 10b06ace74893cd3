// An allocation that fails, whichever it is: a call either writes to what it was given once, or not at all.
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <vitrify/compile.h>

#include "net.h"

using namespace torch;

namespace {

// The allocation after `left` others fails, and no other.
class Failing final : public c10::Allocator {
 public:
  explicit Failing(int64_t left) : left_(left) { c10::SetCPUAllocator(this, 1); }
  ~Failing() override { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 1); }
  c10::DataPtr allocate(size_t n) override {
    if (n > 0 && left_.fetch_sub(1) == 0) throw std::bad_alloc();
    return c10::GetDefaultCPUAllocator()->allocate(n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetDefaultCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool failed() const { return left_ < 0; }

 private:
  std::atomic<int64_t> left_;
};

// `call` with a fresh `state` of ones while the n-th allocation fails, for every n: it must leave it as it was, or as `after`.
template <class F>
void for_each_failure(const std::vector<Tensor>& before, const std::vector<Tensor>& after, F&& call) {
  int failures = 0, thrown = 0;
  for (int64_t n = 0;; ++n) {
    ASSERT_LT(n, 1000);
    std::vector<Tensor> state;
    for (const Tensor& t : before) state.push_back(t.clone());
    bool failed = false, threw = false;
    {
      Failing allocator(n);
      try {
        call(state);
      } catch (const std::exception&) {
        threw = true;
      }
      failed = allocator.failed();
    }
    for (size_t i = 0; i < state.size(); ++i) {
      const bool untouched = threw && state[i].equal(before[i]);
      EXPECT_TRUE(untouched || allclose(state[i], after[i], 1e-5, 1e-6)) << "allocation " << n << " failed: state " << i << " is " << state[i];
    }
    if (!failed) break;
    ++failures;
    thrown += threw;
  }
  EXPECT_GT(failures, 0);
}

}  // namespace

struct Allocation : testing::TestWithParam<int> {
  int threads = at::get_num_threads();
  uint64_t launched = count("kernels_launched");
  void SetUp() override { at::set_num_threads(GetParam()); }
  void TearDown() override {
    at::set_num_threads(threads);
    EXPECT_GT(count("kernels_launched"), launched);
  }
};
INSTANTIATE_TEST_SUITE_P(Threads, Allocation, testing::Values(1, 2));

TEST_P(Allocation, AfterAWriteToAnArgument) {
  NoGradGuard no_grad;
  auto program = [](Tensor w, Tensor x) {
    w.add_(1);
    Tensor a = x.sum(0), b = (x * 2).cumsum(1);
    return std::make_tuple(a.exp(), b.sin(), x.t().contiguous() * 3, (x * x).sum(1).sqrt(), x.amax());
  };
  auto fast = vitrify::compile(program, {.fullgraph = true});
  const Tensor x = torch::rand({40, 30});
  for (int i = 0; i < 3; ++i) fast(torch::ones({40, 30}), x);
  for_each_failure({torch::ones({40, 30})}, {torch::full({40, 30}, 2.0)}, [&](auto& s) { fast(s[0], x); });
}

TEST_P(Allocation, SeveralArgumentsAreWritten) {
  NoGradGuard no_grad;
  auto program = [](Tensor a, Tensor b, Tensor c, Tensor x) {
    a.add_(x.sum());
    b.mul_(2).sub_(x.mean(0));
    c.copy_(x.t().matmul(x));
    return std::vector<Tensor>{x.exp(), x.t().exp(), x.sum(1), a + 1, b.t().contiguous()};
  };
  auto fast = vitrify::compile(program, {.fullgraph = true});
  const Tensor x = torch::rand({20, 30});
  const std::vector<Tensor> before{torch::ones({64}), torch::ones({5, 30}), torch::ones({30, 30})};
  std::vector<Tensor> after;
  for (const Tensor& t : before) after.push_back(t.clone());
  program(after[0], after[1], after[2], x);
  for (int i = 0; i < 3; ++i) fast(before[0].clone(), before[1].clone(), before[2].clone(), x);
  for_each_failure(before, after, [&](auto& s) { fast(s[0], s[1], s[2], x); });
}

TEST_P(Allocation, InATrainingStep) {
  auto program = [](Tensor mean, Tensor x, Tensor w) {
    Tensor h = x.matmul(w);
    mean.mul_(0.9).add_(h.detach().mean(0), 0.1);
    return std::make_tuple((h - mean).tanh(), h.sum(0).sin(), h.t().exp());
  };
  auto fast = vitrify::compile(program, {.fullgraph = true});
  const Tensor x = torch::rand({20, 30}), w = torch::rand({30, 10}, torch::requires_grad());
  Tensor after = torch::ones({10});
  program(after, x, w);
  for (int i = 0; i < 3; ++i) fast(torch::ones({10}), x, w);
  for_each_failure({torch::ones({10})}, {after}, [&](auto& s) { fast(s[0], x, w); });
}

TEST_P(Allocation, AnIndexOutOfRangeBesideAWrite) {
  NoGradGuard no_grad;
  auto program = [](Tensor w, Tensor rows, Tensor i) {
    Tensor r = torch::embedding(rows, i) * 2;
    w.add_(1);
    return std::make_tuple(r, rows.exp());
  };
  auto fast = vitrify::compile(program, {.fullgraph = true});
  const Tensor rows = torch::rand({100, 1000}), good = torch::arange(100), bad = torch::full({100}, 100);
  for (int i = 0; i < 3; ++i) fast(torch::ones({300, 1000}), rows, good);
  Tensor w = torch::ones({300, 1000});
  EXPECT_ANY_THROW(fast(w, rows, bad));
  EXPECT_TRUE(w.equal(torch::ones({300, 1000})));  // eager raises before it writes
  fast(w, rows, good);
  EXPECT_TRUE(w.equal(torch::full({300, 1000}, 2.0)));
}
