#include "torch/watch.h"

#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <random>
#include <unordered_map>
#include <unordered_set>

#include "support/counters.h"
#include "torch/compat.h"
#include "torch/team.h"
#include "torch/versions.h"

namespace vitrify {

namespace {

using c10::StorageImpl;

StorageImpl* storage_of(const at::Tensor& t) { return t.has_storage() ? t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr; }
c10::weak_intrusive_ptr<StorageImpl> weak(const at::Tensor& t) {
  if (!t.has_storage()) return c10::weak_intrusive_ptr<StorageImpl>(c10::intrusive_ptr<StorageImpl>());
  return c10::weak_intrusive_ptr<StorageImpl>(t.storage().getWeakStorageImpl());
}

// Every storage that has been watched, while it lives.
struct Watches {
  struct Entry {
    c10::weak_intrusive_ptr<StorageImpl> storage;  // keeps the address from being used again
    const void* watch;
  };
  std::mutex mutex;
  std::unordered_map<const StorageImpl*, Entry> all;
  size_t sweep_at = 256;
};
Watches& watches() {
  static Watches* w = new Watches;  // never destroyed: tensors may outlive it
  return *w;
}

// Tensors and others that hold the storage, but for its own Python object: whatever is written through that asks for a pointer.
size_t holders_of(const at::Tensor& t) {
  const c10::Storage& s = t.unsafeGetTensorImpl()->unsafe_storage();
  return s.use_count() - (s.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj() ? 1 : 0);
}

// How many tensors of `known` lie in this storage, with what views among them are views of.
size_t holders_among(std::span<const at::Tensor* const> known, const StorageImpl* storage) {
  std::unordered_set<const c10::TensorImpl*> holders;
  for (const at::Tensor* t : known) {
    if (!t || !t->defined() || storage_of(*t) != storage) continue;
    holders.insert(t->unsafeGetTensorImpl());
    if (t->is_view()) holders.insert(t->_base().unsafeGetTensorImpl());
  }
  return holders.size();
}

// The watch on this storage, begun if need be; null where the content must be compared. holders: set where more than these are all that stands
// against a watch.
const void* watch(const at::Tensor& t, std::span<const at::Tensor* const> known, size_t& holders) {
  StorageImpl& storage = *storage_of(t);
  Watches& w = watches();
  std::lock_guard lock(w.mutex);
  if (auto it = w.all.find(&storage); it != w.all.end()) {
    const void* now = compat::watch_of(storage);
    if (it->second.watch && it->second.watch != now) it->second.watch = nullptr;  // somebody has a pointer, for ever
    return it->second.watch;
  }
  const c10::DataPtr& own = storage._mutable_data_ptr_no_checks();
  const bool plain =
      own.get() && own.get() == own.get_context() && own.device().is_cpu() && own.get_deleter() == c10::GetCPUAllocator()->raw_deleter();
  if (!plain) return nullptr;
  const size_t few = holders_among(known, &storage);
  if (holders_of(t) > few) {
    holders = few;
    return nullptr;
  }
  if (w.all.size() >= w.sweep_at) {
    std::erase_if(w.all, [](const auto& e) { return e.second.storage.expired(); });
    w.sweep_at = 2 * w.all.size() + 256;
  }
  if (!compat::watch_writes(storage)) return nullptr;
  const void* made = compat::watch_of(storage);
  w.all.emplace(&storage, Watches::Entry{weak(t), made});
  return made;
}

// Of all bytes between the first and the last element. The seed is of this process: nobody can make two contents alike on purpose.
Hash128 content_of(const at::Tensor& t) {
  static const uint64_t seed = [] {
    std::random_device r;
    return static_cast<uint64_t>(r()) << 32 | r();
  }();
  if (!t.has_storage() || t.numel() == 0) return {};
  const auto* p = static_cast<const char*>(t.const_data_ptr());
  size_t bytes = t.element_size();
  for (int64_t d = 0; d < t.dim(); ++d) bytes += static_cast<size_t>((t.size(d) - 1) * t.stride(d)) * t.element_size();
  constexpr size_t kChunk = 1 << 20;
  if (bytes <= kChunk) return hash128(p, bytes, seed);
  std::vector<Hash128> chunks((bytes + kChunk - 1) / kChunk);
  for_parts(static_cast<int64_t>(chunks.size()), [&](int64_t part) {
    const auto i = static_cast<size_t>(part);
    chunks[i] = hash128(p + i * kChunk, std::min(kChunk, bytes - i * kChunk), seed);
  });
  return hash128(chunks.data(), chunks.size() * sizeof chunks[0], seed);
}

}  // namespace

TensorKey::TensorKey(const at::Tensor& t, std::span<const at::Tensor* const> known)
    : storage_(weak(t)),
      offset_(t.storage_offset()),
      version_(static_cast<uint32_t>(version_of(t))),
      readable_(t.device().is_cpu()),
      dtype_(t.scalar_type()),
      conj_(t.is_conj()),
      neg_(t.is_neg()),
      sizes_(t.sizes().vec()),
      strides_(t.strides().vec()) {
  if (t.has_storage() && readable_) watch_ = watch(t, known, holders_);
  if (!watch_ && readable_) content_ = content_of(t);
}

bool TensorKey::same_metadata(const at::Tensor& t) const {
  return t.sizes() == at::IntArrayRef(sizes_) && t.strides() == at::IntArrayRef(strides_) && t.scalar_type() == dtype_ && t.is_conj() == conj_ &&
         t.is_neg() == neg_;
}

bool TensorKey::matches(const at::Tensor& t) const {
  if (!same_metadata(t)) return false;
  if (watch_) {
    StorageImpl* storage = storage_of(t);
    return storage && storage_._unsafe_get_target() == storage && compat::watch_of(*storage) == watch_ && t.storage_offset() == offset_ &&
           version_of(t) == version_;
  }
  if (!readable_ || !t.device().is_cpu()) return false;
  if (holders_ && holders_of(t) <= holders_) return false;  // to be watched from now on
  counters().weights_compared.fetch_add(1, std::memory_order_relaxed);
  return content_ == content_of(t);
}

void end_watch(const at::Tensor& t) {
  StorageImpl* storage = storage_of(t);
  if (!storage || !compat::watch_of(*storage)) return;
  Watches& w = watches();
  std::lock_guard lock(w.mutex);
  if (auto it = w.all.find(storage); it != w.all.end() && it->second.watch && compat::watch_of(*storage) == it->second.watch) storage->mutable_data();
}

at::Tensor window_on(const at::Tensor& t) {
  if (!t.has_storage() || !t.device().is_cpu()) return t;
  const StorageImpl& of = *storage_of(t);
  auto storage = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), of.nbytes(),
                                                  c10::DataPtr(const_cast<void*>(of.data()), of.device()), nullptr, false);
  at::Tensor window =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  window.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  window.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.is_conj()) window.unsafeGetTensorImpl()->_set_conj(true);
  if (t.is_neg()) window.unsafeGetTensorImpl()->_set_neg(true);
  return window;
}

}  // namespace vitrify
