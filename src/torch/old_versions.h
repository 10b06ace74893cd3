// Versions and histories that tensors had, for a while.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <ranges>
#include <utility>
#include <vector>

#include "torch/compat.h"

namespace vitrify {

// What autograd saved of real tensors was of the versions they had then; they are put back when this is over.
class OldVersions {
 public:
  void set(const at::Tensor& t, int64_t version) {
    now_.emplace_back(t, static_cast<int64_t>(t._version()));
    c10::VariableVersion counter = t.unsafeGetTensorImpl()->version_counter();
    counter.set_version(version);
  }
  OldVersions() = default;
  OldVersions(const OldVersions&) = delete;
  ~OldVersions() {  // the last first: several may have one counter, and the first of them knows what it was
    for (auto& [t, v] : std::views::reverse(now_)) {
      c10::VariableVersion counter = t.unsafeGetTensorImpl()->version_counter();
      counter.set_version(v);
    }
  }

 private:
  std::vector<std::pair<at::Tensor, int64_t>> now_;
};

// What runs while this lives may give real tensors another history; theirs is put back when this is over. Views have that of their base.
class OldHistories {
 public:
  void keep(const at::Tensor& t) {
    auto* meta = torch::autograd::impl::get_autograd_meta(t);
    if (meta && !t.is_view()) kept_.push_back({t, meta->grad_fn_, meta->output_nr_, meta->requires_grad_});
  }
  OldHistories() = default;
  OldHistories(const OldHistories&) = delete;
  ~OldHistories() {
    for (auto& [t, function, output, requires_grad] : kept_) {
      auto* meta = torch::autograd::impl::get_autograd_meta(t);
      meta->grad_fn_ = std::move(function);
      meta->output_nr_ = output;
      meta->requires_grad_ = requires_grad;
    }
  }

 private:
  struct One {
    at::Tensor tensor;
    compat::NodePtr function;
    uint32_t output;
    bool requires_grad;
  };
  std::vector<One> kept_;
};

}  // namespace vitrify
