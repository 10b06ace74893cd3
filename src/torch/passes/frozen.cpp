// Keys of captured tensors, and the values kept for them.
#include "support/hash.h"
#include "support/resident.h"
#include "torch/extern_call.h"
#include "torch/passes/passes.h"
#include "torch/tracer.h"

namespace vitrify {

namespace {

constexpr size_t kHashWhole = 4096;  // bytes hashed in full
constexpr size_t kHashWholeIndex =
    64 << 20;  // the same for integers: edge lists, where one changed entry matters and arrays of other libraries write unseen
constexpr size_t kSamples = 16;

uint64_t sample(const at::Tensor& t) {
  if (!t.has_storage() || t.numel() == 0) return 0;
  const auto* p = static_cast<const char*>(t.const_data_ptr());
  const size_t item = t.element_size();
  size_t span = item;  // bytes from the first to the last element
  for (int64_t d = 0; d < t.dim(); ++d) span += static_cast<size_t>((t.size(d) - 1) * t.stride(d)) * item;
  if (span <= (at::isIntegralType(t.scalar_type(), true) ? kHashWholeIndex : kHashWhole)) return hash_bytes(p, span);
  uint64_t h = span;
  const size_t words = span / 8;
  for (size_t i = 0; i < kSamples; ++i) {
    uint64_t w;
    std::memcpy(&w, p + (words - 1) * i / (kSamples - 1) * 8, 8);
    h = (h ^ w) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
  }
  return h;
}

c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.has_storage() ? t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}
const void* data_of(const at::Tensor& t) { return t.has_storage() ? t.const_data_ptr() : nullptr; }
uint32_t version_of(const at::Tensor& t) { return t.is_inference() ? 0 : t.unsafeGetTensorImpl()->version_counter().current_version(); }

c10::weak_intrusive_ptr<c10::StorageImpl> weak(const at::Tensor& t) {
  if (!t.has_storage()) return c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>());
  return c10::weak_intrusive_ptr<c10::StorageImpl>(t.storage().getWeakStorageImpl());
}

}  // namespace

TensorKey::TensorKey(const at::Tensor& t)
    : storage_(weak(t)), data_(data_of(t)), version_(version_of(t)), sample_(sample(t)), sizes_(t.sizes().vec()), strides_(t.strides().vec()) {}

bool TensorKey::matches(const at::Tensor& t) const {
  return storage_._unsafe_get_target() == storage_of(t) && data_ == data_of(t) && version_ == version_of(t) && t.sizes() == at::IntArrayRef(sizes_) &&
         t.strides() == at::IntArrayRef(strides_) && sample_ == sample(t);
}

std::shared_ptr<const FrozenValues> FrozenCache::get(const at::Tensor* const* inputs) {
  std::lock_guard lock(mutex_);
  if (latest_ && latest_->valid(inputs)) return latest_;
  auto fresh = std::make_shared<FrozenValues>();
  fresh->sources = group_.sources;
  std::vector<at::Tensor> args;
  for (uint32_t s : group_.sources) {
    fresh->keys.emplace_back(*inputs[s]);
    args.push_back(*inputs[s]);
  }
  PlanGuard guard;
  c10::InferenceMode ordinary(false);
  fresh->values = interpret(*group_.graph, args);
  // What is merely a window on a weight would change with it; and nothing kept may share memory with the caller's tensors.
  for (at::Tensor& v : fresh->values)
    for (const at::Tensor& a : args)
      if (v.defined() && v.has_storage() && a.has_storage() && v.is_alias_of(a)) v = v.clone();
  if (!latest_) return_free_memory();  // the steps of a long chain over every weight
  return latest_ = std::move(fresh);
}

}  // namespace vitrify
