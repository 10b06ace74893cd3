// Custom ops run once for each call, also where the call ends up running eagerly.
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "expects.h"
#include "vitrify/compile.h"

namespace door {

using at::Tensor;

int calls = 0;

Tensor doubled(const Tensor& x) {
  ++calls;
  if (x.sum().item<double>() < 0) throw std::invalid_argument("negative");
  return x * 2;
}
Tensor twice(const Tensor& x) {
  ++calls;
  return at::cat({x, x}) * 2;
}
Tensor described(const Tensor& x) { return at::empty_like(x); }
void filled(Tensor x) {
  ++calls;
  x.fill_(calls);
}

TORCH_LIBRARY(door_effects, m) {
  m.def("doubled(Tensor x) -> Tensor");
  m.def("twice(Tensor x) -> Tensor");
  m.def("filled(Tensor(a!) x) -> ()");
  m.impl("doubled", c10::DispatchKey::CPU, TORCH_FN(doubled));
  m.impl("doubled", c10::DispatchKey::Meta, TORCH_FN(described));
  m.impl("twice", c10::DispatchKey::CPU, TORCH_FN(twice));
  m.impl("twice", c10::DispatchKey::Meta, TORCH_FN(described));
  m.impl("filled", c10::DispatchKey::CPU, TORCH_FN(filled));
  m.impl("filled", c10::DispatchKey::Meta, [](Tensor) {});
}

Tensor call_doubled(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("door_effects::doubled", "").typed<Tensor(const Tensor&)>();
  return op.call(x);
}
Tensor call_twice(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("door_effects::twice", "").typed<Tensor(const Tensor&)>();
  return op.call(x);
}
void call_filled(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("door_effects::filled", "").typed<void(Tensor)>();
  op.call(x);
}

struct DoorEffects : testing::Test {
  DoorEffects() { calls = 0; }
  at::NoGradGuard no_grad;
};

TEST_F(DoorEffects, OfAnotherSizeThanDescribed) {
  expects::eager("twice");
  auto fn = [](Tensor x) {
    call_filled(x);
    return call_twice(x.sin() + 2) * 3;
  };
  auto fast = vitrify::compile(fn);
  for (int i = 0; i < 4; ++i) {
    Tensor x = torch::rand({5}), y = x.clone();
    calls = 0;
    const Tensor a = fast(x);
    EXPECT_EQ(calls, 2);
    calls = 0;
    const Tensor b = fn(y);
    EXPECT_TRUE(a.sizes() == b.sizes() && at::allclose(a, b));
    EXPECT_TRUE(x.equal(y));
    EXPECT_EQ(x._version(), y._version());
  }
}

TEST_F(DoorEffects, ContentDecides) {
  expects::eager("a value that the program reads is another");
  auto fn = [](Tensor x) {
    const Tensor y = call_doubled(x);
    return (x > 1).all().item<bool>() ? y.sin() : y.cos() + 1;
  };
  auto fast = vitrify::compile(fn);
  for (double v : {3., 4., 0.1, 3., 0.2, 0.3}) {
    const Tensor x = torch::full({5}, v);
    calls = 0;
    const Tensor a = fast(x);
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(at::allclose(a, fn(x)));
  }
}

TEST_F(DoorEffects, WritesBeforeAnError) {
  auto fn = [](Tensor x, Tensor i) {
    x.add_(1);
    const Tensor y = call_doubled(x);
    x.mul_(2);
    return (y + 1).index({i});
  };
  auto fast = vitrify::compile(fn);
  for (int64_t i : {0, 9, 1, 9}) {
    Tensor x = torch::ones({3}), y = x.clone();
    const Tensor index = torch::tensor({i});
    calls = 0;
    std::string says, eager;
    try {
      fast(x, index);
    } catch (const std::exception& e) {
      says = e.what();
    }
    EXPECT_EQ(calls, 1);
    try {
      fn(y, index);
    } catch (const std::exception& e) {
      eager = e.what();
    }
    EXPECT_EQ(says.empty(), eager.empty());
    EXPECT_EQ(says.substr(0, 40), eager.substr(0, 40));
    EXPECT_TRUE(x.equal(y)) << x << y;
    EXPECT_EQ(x._version(), y._version());
  }
  Tensor negative = torch::full({3}, -4.);
  calls = 0;
  EXPECT_THROW(fast(negative, torch::tensor({0})), std::invalid_argument);
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(negative.equal(torch::full({3}, -3.)));
}

}  // namespace door
