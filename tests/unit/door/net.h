// A module with a parameter that no gradient reaches.
#pragma once
#include <torch/torch.h>
#include <vitrify/compile.h>

namespace {

using namespace torch;

uint64_t count(const char* what) { return vitrify::counters_map()[what]; }

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
