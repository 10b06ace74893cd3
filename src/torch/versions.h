// Versions of tensors, as autograd counts writes.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>

namespace vitrify {

// Not of tensors made in inference mode, which stay so when they are given other data that is none.
inline bool counts_versions(const at::Tensor& t) { return t.unsafeGetTensorImpl()->version_counter().enabled(); }
inline int64_t version_of(const at::Tensor& t) { return counts_versions(t) ? static_cast<int64_t>(t._version()) : 0; }

// What counts its writes, which is all that a VariableVersion consists of; null: nothing does.
inline const void* counter_of(const at::Tensor& t) {
  const c10::VariableVersion& of = t.unsafeGetTensorImpl()->version_counter();
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  const void* r = nullptr;
  std::memcpy(&r, &of, sizeof r);
  return r;
}
// One counter counts the writes to both: they are views of one tensor, or one is the other detached.
inline bool share_versions(const at::Tensor& a, const at::Tensor& b) {
  return counts_versions(a) && counts_versions(b) && counter_of(a) == counter_of(b);
}

// Null: it is none, as autograd has it.
inline torch::autograd::DifferentiableViewMeta* view_meta(const c10::TensorImpl* t) {
  auto* meta = static_cast<torch::autograd::AutogradMeta*>(t->autograd_meta());
  auto* view = meta && meta->is_view_ ? static_cast<torch::autograd::DifferentiableViewMeta*>(meta) : nullptr;
  return view && view->has_bw_view() && t->version_counter().enabled() ? view : nullptr;
}

// A view whose count has changed since autograd last looked: where it needs gradients, its history is made anew.
inline void make_outdated(const at::Tensor& t) {
  if (auto* view = view_meta(t.unsafeGetTensorImpl())) view->set_attr_version(t.unsafeGetTensorImpl()->version_counter().current_version() - 1);
}

// One for whose history autograd raises, in grad mode: how it was made, that cannot be made anew.
inline bool is_spoiled(const c10::TensorImpl* t) {
  const auto* view = view_meta(t);
  return view && view->get_creation_meta() != torch::autograd::CreationMeta::DEFAULT && view->requires_grad() &&
         view->get_attr_version() != t->version_counter().current_version();
}

}  // namespace vitrify
