#include "torch/followed.h"

#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace vitrify {

namespace ag = torch::autograd;

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// How a tensor lay in memory, and what it was in its end if it did not any more.
struct Followed::End {
  explicit End(const at::Tensor& t)
      : tensor(t.getIntrusivePtr()),
        storage(t.storage().getWeakStorageImpl()),
        offset(t.storage_offset()),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        dtype(t.dtype()) {}
  bool lies_as(const c10::TensorImpl& t) const {
    return t.storage().unsafeGetStorageImpl() == storage._unsafe_get_target() && t.storage_offset() == offset && t.sizes() == sizes &&
           t.strides() == strides && t.dtype() == dtype;
  }
  Weak tensor;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t offset;
  std::vector<int64_t> sizes, strides;
  caffe2::TypeMeta dtype;
  std::mutex mutex;
  at::Tensor last;
};

namespace {

bool has_memory(const c10::TensorImpl& t) { return t.layout() == at::kStrided && t.has_storage() && !t.has_symbolic_sizes_strides(); }

// Another tensor of the same elements and versions.
at::Tensor same(const c10::TensorImpl& t) {
  at::Tensor r = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(t.storage()), t.key_set(), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  r.unsafeGetTensorImpl()->set_version_counter(t.version_counter());
  return r;
}

// What autograd knows of a tensor goes first when nobody has it any more, while it still has its memory: this goes with it.
struct AtEnd {
  std::shared_ptr<ag::ForwardGrad> own;
  const c10::TensorImpl* of;  // to which it belongs
  std::vector<std::weak_ptr<Followed::End>> ends = {};
  void operator()(ag::ForwardGrad*) const {
    for (const auto& weak : ends)
      if (const auto end = weak.lock(); end && has_memory(*of) && !end->lies_as(*of)) {
        std::lock_guard lock(end->mutex);
        end->last = same(*of);
      }
  }
};

}  // namespace

Followed::Followed(const at::Tensor& t) {
  if (!has_memory(*t.unsafeGetTensorImpl())) return;
  end_ = std::make_shared<End>(t);
  if (t.is_inference()) return;
  static std::mutex making;
  ag::AutogradMeta* meta = nullptr;
  {
    std::lock_guard lock(making);
    meta = ag::impl::materialize_autograd_meta(t);
  }
  std::lock_guard lock(meta->mutex_);
  auto* at_end = std::get_deleter<AtEnd>(meta->fw_grad_);
  if (!at_end) {
    auto own = meta->fw_grad_ ? meta->fw_grad_ : std::make_shared<ag::ForwardGrad>();
    ag::ForwardGrad* const grad = own.get();
    meta->fw_grad_ = std::shared_ptr<ag::ForwardGrad>(grad, AtEnd{std::move(own), t.unsafeGetTensorImpl()});
    at_end = std::get_deleter<AtEnd>(meta->fw_grad_);
  }
  for (const auto& weak : at_end->ends)
    if (const auto end = weak.lock(); end && end->lies_as(*t.unsafeGetTensorImpl())) {
      end_ = end;
      return;
    }
  std::erase_if(at_end->ends, [](const auto& weak) { return weak.expired(); });
  at_end->ends.push_back(end_);
}

at::Tensor Followed::now() const {
  if (!end_) return {};
  if (at::Tensor t(end_->tensor.lock()); t.defined()) return t;
  std::lock_guard lock(end_->mutex);
  return end_->last;
}

at::Tensor Followed::elsewhere() const {
  at::Tensor t = now();
  return t.defined() && has_memory(*t.unsafeGetTensorImpl()) && end_->lies_as(*t.unsafeGetTensorImpl()) ? at::Tensor() : t;
}

}  // namespace vitrify
