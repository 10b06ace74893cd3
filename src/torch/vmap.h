// Tensors of torch.func.vmap, as the values that they stand for.
#pragma once
#include <ATen/ATen.h>

#include <vector>

namespace vitrify {

struct Vmap {
  int64_t level = 0, size = 0;  // the innermost transform that `tensors` are batches of; 0: none of them is one
};
Vmap vmap_of(const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor> one_of_vmap(std::vector<at::Tensor> tensors, const Vmap&, int64_t which);
at::Tensor as_batch_of_vmap(const std::vector<at::Tensor>& each, const Vmap&);  // copies

}  // namespace vitrify
