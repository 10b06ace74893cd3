#include "torch/placement.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "support/error.h"

namespace vitrify {

namespace {

// A key that PyTorch lets every op fall through, and sets only inside the first generation's vmap.
constexpr auto kKey = c10::DispatchKey::VmapMode;

thread_local c10::DataPtr place;
thread_local size_t place_bytes = 0;

struct PlacingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!place || bytes != place_bytes) return c10::GetCPUAllocator()->allocate(bytes);
    return std::exchange(place, {});
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  static PlacingAllocator allocator;
  auto sizes = c10::asIntArrayRefSlowOpt(size);
  const bool plain = layout.value_or(at::kStrided) == at::kStrided && device.value_or(at::kCPU).is_cpu() && !pinned.value_or(false);
  if (place && sizes && type && plain)
    return at::Tensor(at::detail::empty_generic(*sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), *type, format));
  c10::impl::ExcludeDispatchKeyGuard below(kKey);
  return at::empty_symint(size, type, layout, device, pinned, format);
}

}  // namespace

Placement::Placement(c10::DataPtr memory, size_t bytes) {
  VT_CHECK(!place, "one placement at a time");
  place = std::move(memory);
  place_bytes = bytes;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

Placement::~Placement() {
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  place.clear();
}

TORCH_LIBRARY_IMPL(aten, VmapMode, m) { m.impl("empty.memory_format", TORCH_FN(empty)); }

}  // namespace vitrify
