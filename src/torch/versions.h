// Versions of tensors, as autograd counts writes.
#pragma once
#include <ATen/ATen.h>

#include <cstring>

namespace vitrify {

// Not of tensors made in inference mode, which stay so when they are given other data that is none.
inline bool counts_versions(const at::Tensor& t) { return t.unsafeGetTensorImpl()->version_counter().enabled(); }
inline int64_t version_of(const at::Tensor& t) { return counts_versions(t) ? static_cast<int64_t>(t._version()) : 0; }

// One counter counts the writes to both: they are views of one tensor, or one is the other detached. It is all that a VariableVersion consists of.
inline bool share_versions(const at::Tensor& a, const at::Tensor& b) {
  if (!counts_versions(a) || !counts_versions(b)) return false;
  const c10::VariableVersion &of_a = a.unsafeGetTensorImpl()->version_counter(), &of_b = b.unsafeGetTensorImpl()->version_counter();
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(&of_a, &of_b, sizeof(void*)) == 0;
}

}  // namespace vitrify
