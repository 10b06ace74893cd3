// Versions of tensors, as autograd counts writes.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace vitrify {

// Not of tensors made in inference mode, which stay so when they are given other data that is none.
inline bool counts_versions(const at::Tensor& t) { return t.unsafeGetTensorImpl()->version_counter().enabled(); }
inline int64_t version_of(const at::Tensor& t) { return counts_versions(t) ? static_cast<int64_t>(t._version()) : 0; }

// Calls an op's kernel, which has the ops that it calls count what they write. What the op counts itself has been counted where it was called.
void call_counting(const c10::OperatorHandle&, std::vector<c10::IValue>& stack);

}  // namespace vitrify
