// Where the gradient of a leaf goes, and in which dtype: the usual, or as a program has set it (Tensor.grad_dtype).
#pragma once
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace vitrify {

constexpr int kUsualGradient = -1, kAnyDtype = -2, kNoGradient = -3;  // else a dtype

// Of a tensor that needs gradients. A view that was made without them needs them by way of its base, and gets none.
inline int gradient_of_leaf(const c10::TensorImpl* t) {
  const auto* m = static_cast<const torch::autograd::AutogradMeta*>(t->autograd_meta());
  if (!m || m->grad_fn_) return kUsualGradient;
  if (!m->requires_grad_) return kNoGradient;
  if (m->allow_grad_dtype_mismatch_) return kAnyDtype;
  return m->grad_dtype_ && *m->grad_dtype_ != t->dtype().toScalarType() ? static_cast<int>(*m->grad_dtype_) : kUsualGradient;
}

// Hooks that run where a backward comes to a leaf: its own, and those of the node that adds to its .grad.
inline bool has_leaf_hooks(const at::Tensor& t) {
  namespace impl = torch::autograd::impl;
  if (!impl::get_autograd_meta(t)) return false;
  if (!impl::hooks(t).empty() || impl::post_acc_grad_hooks(t)) return true;
  const auto node = impl::try_get_grad_accumulator(t);
  return node && (!node->pre_hooks().empty() || !node->post_hooks().empty());
}

// Hooks run with the gradient of a tensor that needs one, where a program asks for that.
inline bool hooks_see_gradient(const at::Tensor& t) {
  if (t.is_leaf()) return has_leaf_hooks(t);
  torch::autograd::Node& n = *torch::autograd::impl::gradient_edge(t).function;
  return !n.tensor_pre_hooks().empty() || !n.retains_grad_hooks().empty();
}

}  // namespace vitrify
