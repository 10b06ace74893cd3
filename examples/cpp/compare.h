// Eager and compiled side by side: error against float64, and interleaved medians.
#pragma once
#include <torch/torch.h>
#include <vitrify/compile.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

inline double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// `exact` is the same model in float64. Returns 0 if the compiled result is as accurate as eager's and native kernels ran.
inline int compare(const char* name, const std::function<at::Tensor()>& eager, const std::function<at::Tensor()>& compiled,
                   const std::function<at::Tensor()>& exact) {
  using Clock = std::chrono::steady_clock;
  auto ms = [](Clock::time_point a, Clock::time_point b) { return std::chrono::duration<double, std::milli>(b - a).count(); };
  eager();
  auto t0 = Clock::now();
  eager();
  auto t1 = Clock::now();
  at::Tensor y = compiled();
  auto t2 = Clock::now();
  const double first = ms(t1, t2) - ms(t0, t1);
  at::Tensor reference = exact();
  auto error = [&](const at::Tensor& t) { return ((t.to(at::kDouble) - reference).norm() / reference.norm()).item<double>(); };
  const double ec = error(y), ee = error(eager());
  std::vector<double> e, c;
  for (int i = 0; i < 15; ++i) {
    auto a = Clock::now();
    eager();
    auto b = Clock::now();
    compiled();
    auto d = Clock::now();
    e.push_back(ms(a, b));
    c.push_back(ms(b, d));
  }
  auto n = vitrify::counters_map();
  std::printf(
      "%-12s first call %+.0f ms   eager %.2f ms   compiled %.2f ms   %.2fx   error %.1e (eager %.1e)   kernels %llu   externs called %llu   "
      "fallbacks %llu\n",
      name, first, median(e), median(c), median(e) / median(c), ec, ee, static_cast<unsigned long long>(n["kernels_built"]),
      static_cast<unsigned long long>(n["externs_called"]), static_cast<unsigned long long>(n["fallbacks"]));
  return ec <= 2 * ee + 1e-7 && n["kernels_launched"] > 0 && n["fallbacks"] == 0 ? 0 : 1;
}
