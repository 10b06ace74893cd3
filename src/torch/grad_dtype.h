// The dtype that the gradient of a leaf has, where a program has set another than the leaf's (Tensor.grad_dtype).
#pragma once
#include <torch/csrc/autograd/variable.h>

namespace vitrify {

constexpr int kOwnDtype = -1, kAnyDtype = -2;

inline int grad_dtype_of(const c10::TensorImpl* t) {
  const auto* m = static_cast<const torch::autograd::AutogradMeta*>(t->autograd_meta());
  if (!m || m->grad_fn_) return kOwnDtype;
  if (m->allow_grad_dtype_mismatch_) return kAnyDtype;
  return m->grad_dtype_ && *m->grad_dtype_ != t->dtype().toScalarType() ? static_cast<int>(*m->grad_dtype_) : kOwnDtype;
}

}  // namespace vitrify
