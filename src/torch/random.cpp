#include "torch/random.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include "runtime/bits.h"
#include "runtime/mersenne.h"
#include "torch/bits.h"
#include "torch/executor.h"

namespace vitrify {

namespace {

// What `draw` takes from the generator's engine is gone from it afterwards.
template <class F>
void with_engine(at::Generator generator, F&& draw) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
  at::mt19937 engine = cpu->engine();
  at::mt19937_data_pod data = engine.data();
  static_assert(sizeof(data.state_) == sizeof(runtime::Mersenne::state));
  runtime::Mersenne m;
  std::copy(data.state_.begin(), data.state_.end(), m.state);
  m.left = data.left_;
  m.next = data.next_;
  draw(m);
  std::copy_n(m.state, data.state_.size(), data.state_.begin());
  data.left_ = m.left;
  data.next_ = m.next;
  engine.set_data(data);
  cpu->set_engine(engine);
}

// As bits.
at::Tensor bernoulli_of(at::IntArrayRef sizes, double p, const at::Generator& generator) {
  TORCH_CHECK(0 <= p && p <= 1, "bernoulli_ expects p to be in [0, 1], but got p=", p);
  const int64_t n = c10::multiply_integers(sizes);
  at::Tensor bits = new_bits(n);
  with_engine(generator, [&](runtime::Mersenne& m) { runtime::draw_bernoulli(m, bits.data_ptr<uint8_t>(), n, p); });
  return bits;
}
at::Tensor uniform_of(at::IntArrayRef sizes, const at::Generator& generator) {
  at::Tensor out = new_result(sizes, c10::contiguous_strides(sizes), at::kFloat, true);
  with_engine(generator, [&](runtime::Mersenne& m) { runtime::draw_uniform(m, out.data_ptr<float>(), out.numel()); });
  return out;
}

at::Tensor bernoulli(at::IntArrayRef sizes, double p) { return bernoulli_of(sizes, p, at::detail::getDefaultCPUGenerator()); }
at::Tensor uniform(at::IntArrayRef sizes) { return uniform_of(sizes, at::detail::getDefaultCPUGenerator()); }

at::Tensor random_state() {
  at::Generator g = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(g.mutex());
  return g.get_state();
}
thread_local std::vector<at::Tensor> left;  // states that a plan will go back to

// Gives what it was, and goes `back` to that the second time.
at::Tensor set_random_state(const at::Tensor& to, bool back) {
  at::Generator g = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(g.mutex());
  at::Tensor before = g.get_state();
  g.set_state(to);
  if (back && !left.empty())
    left.pop_back();
  else if (!back)
    left.push_back(before);
  return before;
}

bool compare_with_aten() {
  c10::InferenceMode ordinary(false);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::NoGradGuard no_grad;
  at::Generator theirs = at::detail::createCPUGenerator(2147483647), ours = theirs.clone();
  bool same = true;
  for (double p : {0.9, 0.1, 0.5, 0.0, 1.0})
    for (int64_t n : {1, 64, 700}) {
      const at::Tensor a = at::empty({n}, at::kFloat).bernoulli_(p, theirs), bits = bernoulli_of({n}, p, ours);
      at::Tensor b = at::empty({n}, at::kBool);
      runtime::unpack_bits(bits.const_data_ptr<uint8_t>(), b.data_ptr<bool>(), n);
      const at::Tensor c = at::empty({n}, at::kFloat).uniform_(0, 1, theirs), d = uniform_of({n}, ours);
      same = same && a.equal(b.to(at::kFloat)) && c.equal(d) && theirs.get_state().equal(ours.get_state());
    }
  return same;
}

}  // namespace

size_t random_states_left() { return left.size(); }

void go_back_to_random_state(size_t first) {
  if (left.size() <= first) return;
  at::Generator g = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(g.mutex());
  g.set_state(left[first]);
  left.resize(first);
}

bool draws_as_aten() {
  static const bool same = [] {
    try {
      return compare_with_aten();
    } catch (const std::exception&) {
      return false;
    }
  }();
  return same;
}

TORCH_LIBRARY_FRAGMENT(vitrify, m) {
  m.def("bernoulli(int[] size, float p) -> Tensor", bernoulli, {at::Tag::nondeterministic_seeded});
  m.def("uniform(int[] size) -> Tensor", uniform, {at::Tag::nondeterministic_seeded});
  m.def("random_state() -> Tensor", random_state, {at::Tag::nondeterministic_seeded});
  m.def("set_random_state(Tensor state, bool back) -> Tensor", set_random_state, {at::Tag::nondeterministic_seeded});
}

}  // namespace vitrify
