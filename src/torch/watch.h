// Has anybody written to a tensor's memory? Exact, and a few comparisons for a tensor.
//
// Versions do not count writes through .data, numpy, DLPack or an address. But whoever writes asks the storage for a mutable pointer first, and a
// storage tells when that happens (compat::watch_writes). A mutable pointer may be kept and written to at any later time, unseen. So memory is
// watched once only, and only while no tensor but those known here shares it (arrays of numpy hold one): from the first such request on, for ever,
// its content is compared. Memory that torch's own allocator has not made (of a file, shared with other processes, another library's) is compared
// from the start.
//
// What cannot be seen: a write through an address that was taken before the first call that read the tensor, by somebody who holds no tensor of that
// memory besides (data_ptr() kept as a number, DLPack of a tensor that needs no gradient), as long as nobody has asked for a pointer since.
#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <span>
#include <vector>

#include "support/hash.h"

namespace vitrify {

// Metadata and content of a tensor as they were.
class TensorKey {
 public:
  // To be made before the tensor is read. `known`: all tensors of the caller, those that share its memory among them.
  TensorKey(const at::Tensor&, std::span<const at::Tensor* const> known);
  bool matches(const at::Tensor&) const;

 private:
  bool same_metadata(const at::Tensor&) const;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;  // keeps the address from being used again
  int64_t offset_ = 0;
  const void* watch_ = nullptr;  // null: the content is compared
  uint32_t version_ = 0;
  size_t holders_ = 0;  // of memory that may be watched when it has no more than these; 0: never
  Hash128 content_;
  bool readable_ = true;  // by this processor
  at::ScalarType dtype_;
  bool conj_, neg_;
  std::vector<int64_t> sizes_, strides_;
};

// Ends a watch for somebody who may ask for a mutable pointer, on several threads at once.
void end_watch(const at::Tensor&);

// The same elements for ops that ask for a mutable pointer only to read. Holds no memory.
at::Tensor window_on(const at::Tensor&);

}  // namespace vitrify
