// Trains two copies of a model from the same weights on the same data, one eager and one compiled, and compares their loss curves and steps.
#pragma once
#include <torch/torch.h>
#include <vitrify/compile.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

struct Curve {
  std::vector<double> loss, ms;
};

// `forward(x)`: logits [rows, classes]; `batch(step)`: input and class of each row.
inline Curve train(torch::nn::Module& net, const std::function<at::Tensor(at::Tensor)>& forward,
                   const std::function<std::pair<at::Tensor, at::Tensor>(int)>& batch, int steps) {
  using Clock = std::chrono::steady_clock;
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(1e-3));
  Curve c;
  for (int i = 0; i < steps; ++i) {
    auto [x, y] = batch(i);
    const auto start = Clock::now();
    optimizer.zero_grad();
    at::Tensor loss = torch::nn::functional::cross_entropy(forward(x), y);
    loss.backward();
    optimizer.step();
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
  std::printf(
      "%-8s loss %.4f -> %.4f (eager %.4f)   largest difference %.1e   first step +%.0f ms   eager %.1f ms   compiled %.1f ms   %.2fx   "
      "kernels %llu   fallbacks %llu\n",
      name, compiled.loss.front(), compiled.loss.back(), eager.loss.back(), worst, compiled.ms.front() - eager.ms.front(), median(eager.ms),
      median(compiled.ms), median(eager.ms) / median(compiled.ms), static_cast<unsigned long long>(n["kernels_built"]),
      static_cast<unsigned long long>(n["fallbacks"]));
  const bool good = worst <= tolerance && compiled.loss.back() < 0.7 * compiled.loss.front() && n["kernels_launched"] > 0 && n["fallbacks"] == 0 &&
                    n["eager_calls"] == 0;
  return good ? 0 : 1;
}
