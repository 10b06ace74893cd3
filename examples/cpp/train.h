// Trains copies of a model from the same weights on the same data: eager, with compiled gradients, with the whole step compiled; and compares their
// loss curves and steps.
#pragma once
#include <torch/torch.h>
#include <vitrify/step.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

struct Curve {
  std::vector<double> loss, ms;
};

template <class Net>
Net same_start() {
  torch::manual_seed(0);
  return Net();
}

using Step = std::function<at::Tensor(at::Tensor x, at::Tensor y)>;  // trains on one batch, returns its loss

inline at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& y) { return torch::nn::functional::cross_entropy(logits, y); }

// The usual step, around `forward(x)`: logits [rows, classes].
inline Step step_of(torch::optim::Optimizer& optimizer, std::function<at::Tensor(at::Tensor)> forward) {
  return [&optimizer, forward](at::Tensor x, at::Tensor y) {
    optimizer.zero_grad();
    at::Tensor loss = loss_of(forward(x), y);
    loss.backward();
    optimizer.step();
    return loss;
  };
}

// `batch(step)`: input and class of each row.
inline Curve train(const Step& step, const std::function<std::pair<at::Tensor, at::Tensor>(int)>& batch, int steps) {
  using Clock = std::chrono::steady_clock;
  Curve c;
  for (int i = 0; i < steps; ++i) {
    auto [x, y] = batch(i);
    const auto start = Clock::now();
    at::Tensor loss = step(x, y);
    c.ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    c.loss.push_back(loss.item<double>());
  }
  return c;
}

// Returns 0 if the compiled curve lies on eager's, falls, and native kernels made it.
inline int report(const char* name, const Curve& eager, const Curve& compiled, double tolerance) {
  double worst = 0;
  for (size_t i = 0; i < eager.loss.size(); ++i) worst = std::max(worst, std::abs(eager.loss[i] - compiled.loss[i]) / eager.loss[i]);
  auto median = [](std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  };
  auto n = vitrify::counters_map();
  vitrify::reset_counters();
  std::printf(
      "%-8s loss %.4f -> %.4f (eager %.4f)   largest difference %.1e   first step %+.0f ms   eager %.1f ms   compiled %.1f ms   %.2fx   "
      "kernels %llu   fallbacks %llu\n",
      name, compiled.loss.front(), compiled.loss.back(), eager.loss.back(), worst, compiled.ms.front() - eager.ms.front(), median(eager.ms),
      median(compiled.ms), median(eager.ms) / median(compiled.ms), static_cast<unsigned long long>(n["kernels_built"]),
      static_cast<unsigned long long>(n["fallbacks"]));
  const bool good = worst <= tolerance && compiled.loss.back() < 0.7 * compiled.loss.front() && n["kernels_launched"] > 0 && n["fallbacks"] == 0 &&
                    n["eager_calls"] == 0;
  return good ? 0 : 1;
}
