// What the door's tests share: a module with a parameter that no gradient reaches, and what memory the process has.
#pragma once
#include <torch/torch.h>
#include <vitrify/compile.h>

#include <cstdio>

namespace {

using namespace torch;

uint64_t count(const char* what) { return vitrify::counters_map()[what]; }

[[maybe_unused]] long resident_pages() {
  long total = 0, resident = 0;
  if (FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%ld %ld", &total, &resident) != 2) resident = 0;
    std::fclose(f);
  }
  return resident;
}
constexpr long kFlatPages = 2048;  // 8 MiB: how much more of them is flat memory

struct NetImpl : nn::Module {
  nn::Linear a{nullptr}, b{nullptr}, unused{nullptr};
  nn::LayerNorm norm{nullptr};
  NetImpl()
      : a(register_module("a", nn::Linear(8, 16))),
        b(register_module("b", nn::Linear(16, 4))),
        unused(register_module("unused", nn::Linear(2, 2))),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({16})))) {}
  Tensor forward(Tensor x) { return b(gelu(norm(a(x)))); }
};
TORCH_MODULE(Net);

}  // namespace
