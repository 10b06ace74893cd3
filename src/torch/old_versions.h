// Versions that tensors had, for a while.
#pragma once
#include <ATen/ATen.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace vitrify {

// What autograd saved of real tensors was of the versions they had then; they are put back when this is over.
class OldVersions {
 public:
  void set(const at::Tensor& t, int64_t version) {
    now_.emplace_back(t, static_cast<int64_t>(t._version()));
    c10::VariableVersion counter = t.unsafeGetTensorImpl()->version_counter();
    counter.set_version(version);
  }
  ~OldVersions() {
    for (auto& [t, v] : now_) {
      c10::VariableVersion counter = t.unsafeGetTensorImpl()->version_counter();
      counter.set_version(v);
    }
  }

 private:
  std::vector<std::pair<at::Tensor, int64_t>> now_;
};

}  // namespace vitrify
