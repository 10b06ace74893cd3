// Every spelling that depends on the torch version is here. Built against 2.11 and 2.15.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/COWDeleter.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

namespace vitrify::compat {

using Stack = std::vector<c10::IValue>;
using Mode = c10::impl::PyObject_TorchDispatchMode;
using ModeStack = c10::impl::TorchDispatchModeTLS;

inline bool any_mode_on_stack() { return ModeStack::any_modes_set() || ModeStack::stack_len() > 0; }

// Keys a dense tensor of this device has in eager mode; an inference tensor lacks autograd's and ADInplaceOrView.
inline c10::DispatchKeySet dense_keys(c10::Device device, c10::ScalarType dtype, bool inference) {
  auto key = c10::computeDispatchKey(dtype, c10::kStrided, device);
  auto backend = c10::toBackendComponent(key);
  c10::DispatchKeySet keys(key);
  keys = keys | c10::getAutocastRelatedKeySetFromBackend(backend);
  if (!inference) keys = keys | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) | c10::getAutogradRelatedKeySetFromBackend(backend);
  return keys;
}

// A storage of that many bytes on `device` without memory: any access to its data raises `message`.
inline c10::Storage unreadable_storage(c10::Device device, size_t nbytes, const char* message) {
  auto impl = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes, c10::DataPtr(nullptr, device), nullptr, false);
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
  impl->set_throw_on_mutable_data_ptr();
  return c10::Storage(std::move(impl));
}

// From now on the storage shows when somebody asks for a mutable pointer to its memory, which must be plain memory of torch's allocator; false: it
// cannot. 2.15 calls a hook of ours before it gives the pointer away. 2.11 has copy-on-write memory only: any such request ends that state, and as
// there is one reference it moves nothing. It is made here, not by lazy_clone_storage(), which has a second reference for a moment.
template <class S>
bool watch_writes(S& storage) {
  if constexpr (requires { storage.has_materializer(); }) {
    if (storage.has_materializer()) return false;
    storage.set_materializer([](c10::StorageImpl*) {});
  } else {
    c10::DataPtr& own = storage._mutable_data_ptr_no_checks();
    void* data = own.mutable_get();
    const c10::Device device = own.device();
    auto* context = new c10::impl::cow::COWDeleterContext(own.move_context());
    storage.set_data_ptr_noswap(c10::DataPtr(data, context, c10::impl::cow::cow_deleter, device));
  }
  return true;
}

// What tells one watch from another; null: there is none.
template <class S>
const void* watch_of(S& storage) {
  const c10::DataPtr& own = storage._mutable_data_ptr_no_checks();
  const bool shared = c10::impl::cow::is_cow_data_ptr(own);
  if constexpr (requires { storage.has_materializer(); })
    return storage.has_materializer() && !shared ? own.get() : nullptr;
  else
    return shared ? own.get_context() : nullptr;
}

// What Python's custom ops write is counted before their kernels run. 2.15 calls these as if nothing had been: what they write through other ops is
// counted as well (torch/_library/custom_ops.py).
inline constexpr bool kKernelsBehindCountedWritesCount = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15;

// From 2.15 on the derivative of a determinant of one element is the gradient that is given, without a history that leads to the element
// (torch/csrc/autograd/FunctionsManual.cpp).
inline constexpr bool kDeterminantOfOneIsItsElement = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15;

// Named tensors: 2.15 has none.
template <class T>
bool has_names(const T& t) {
  if constexpr (requires { t.has_names(); }) return t.has_names();
  return false;
}

// A node of the autograd graph, made as torch makes its own. 2.15: nodes count their own references.
using NodePtr = decltype(torch::autograd::Edge::function);
using WeakNodePtr = std::conditional_t<std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>,
                                       std::optional<c10::weak_intrusive_ptr<torch::autograd::Node>>, std::weak_ptr<torch::autograd::Node>>;
template <class W>
NodePtr lock(const W& weak) {
  if constexpr (requires { weak.lock(); })
    return weak.lock();
  else if constexpr (std::is_same_v<W, NodePtr>)  // 2.15: a Function of Python owns its node
    return weak;
  else
    return weak ? weak->lock() : NodePtr();
}
template <class N, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, N>)
    return c10::make_intrusive<N>(std::forward<Args>(args)...);
  else
    return std::shared_ptr<N>(new N(std::forward<Args>(args)...), [](auto* n) { deleteNode(n); });
}

// A node that lets go of what it owns with the last reference to it. 2.15: who knows it weakly keeps its members alive until then.
template <class N, bool = std::is_base_of_v<c10::intrusive_ptr_target, N>>
struct OwningNode : N {
  using N::N;

 protected:
  virtual void let_go() = 0;
};
template <class N>
struct OwningNode<N, true> : N {
  using N::N;
  void release_resources() override {
    let_go();
    N::release_resources();
  }

 protected:
  virtual void let_go() = 0;
};

inline bool has_composite_kernel(const c10::OperatorHandle& op) { return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd); }

// Keys that must not be seen again when an op is sent on below autograd.
inline c10::DispatchKeySet above_backend_keys() {
  return c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) | c10::autocast_dispatch_keyset;
}

}  // namespace vitrify::compat
