#include "torch/vmap.h"

#include <ATen/functorch/BatchedTensorImpl.h>

namespace vitrify {

namespace {

const at::functorch::BatchedTensorImpl* batch_of(const at::Tensor& t) { return t.defined() ? at::functorch::maybeGetBatchedImpl(t) : nullptr; }

}  // namespace

Vmap vmap_of(const std::vector<at::Tensor>& tensors) {
  Vmap r;
  for (const at::Tensor& t : tensors)
    if (const auto* batch = batch_of(t); batch && batch->level() > r.level) r = {batch->level(), batch->value().size(batch->bdim())};
  return r;
}

std::vector<at::Tensor> one_of_vmap(std::vector<at::Tensor> tensors, const Vmap& v, int64_t which) {
  for (at::Tensor& t : tensors)
    if (const auto* batch = batch_of(t); batch && batch->level() == v.level) t = batch->value().select(batch->bdim(), which);
  return tensors;
}

at::Tensor as_batch_of_vmap(const std::vector<at::Tensor>& each, const Vmap& v) { return at::functorch::makeBatched(at::stack(each), 0, v.level); }

}  // namespace vitrify
