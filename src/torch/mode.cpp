#include "torch/mode.h"

#include <torch/library.h>

#include "support/error.h"

namespace vitrify {
namespace capture {
namespace {

using c10::TensorImpl;
using c10::impl::PyInterpreter;
using c10::impl::PyInterpreterVTable;
using compat::ModeStack;

PyInterpreter* interpreter();
thread_local ModeHandler* handler = nullptr;
thread_local PyObject* object = nullptr;
thread_local std::shared_ptr<compat::Mode> waiting;  // while it is unseen

// No part of torch uses this key, which comes before all others but the Python dispatcher's.
constexpr auto kUnseenKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Forwards to torch's table in a Python process; in a C++ process (next == nullptr) there are no Python objects, so nothing but dispatch and detach
// is reached.
struct Table final : PyInterpreterVTable {
  const PyInterpreterVTable* next = nullptr;
  const PyInterpreterVTable& to() const {
    TORCH_CHECK(next, "vitrify: a Python tensor in a process without Python");
    return *next;
  }
  std::string name() const override { return next ? next->name() : "vitrify"; }
  void incref(PyObject* p) const override {
    if (next) next->incref(p);
  }
  void decref(PyObject* p) const override {
    if (next) next->decref(p);
  }
  bool try_incref(const c10::impl::PyObjectSlot& s) const override { return next && next->try_incref(s); }
  size_t refcnt(PyObject* p) const override { return next ? next->refcnt(p) : 1; }
  c10::intrusive_ptr<TensorImpl> detach(const TensorImpl* t) const override { return mode_on_top() ? handler->detach(t) : to().detach(t); }
  void dispatch(const c10::OperatorHandle& op, compat::Stack* stack) const override {
    if (mode_on_top())
      handler->dispatch(op, stack);
    else
      to().dispatch(op, stack);
  }
  void reportErrorCallback(PyObject* p, c10::DispatchKey k) const override { to().reportErrorCallback(p, k); }
  void python_op_registration_trampoline(const c10::OperatorHandle& op, c10::DispatchKey k, c10::DispatchKeySet s, compat::Stack* st, bool a,
                                         bool b) const override {
    to().python_op_registration_trampoline(op, k, s, st, a, b);
  }
  void throw_abstract_impl_not_imported_error(std::string n, const char* m, const char* c) const override {
    if (next) next->throw_abstract_impl_not_imported_error(std::move(n), m, c);
  }
  void python_dispatcher(const c10::OperatorHandle& op, c10::DispatchKeySet s, compat::Stack* st) const override {
    to().python_dispatcher(op, s, st);
  }
#define FORWARD(type, name) \
  type name(const TensorImpl* t) const override { return to().name(t); }
#define FORWARD_FORMAT(type, name) \
  type name(const TensorImpl* t, at::MemoryFormat f) const override { return to().name(t, f); }
  FORWARD_FORMAT(bool, is_contiguous)
  FORWARD_FORMAT(c10::SymBool, sym_is_contiguous)
  FORWARD_FORMAT(bool, is_strides_like)
  FORWARD(bool, is_non_overlapping_and_dense)
  FORWARD(c10::Device, device)
  FORWARD(int64_t, dim)
  FORWARD(c10::IntArrayRef, strides)
  FORWARD(c10::IntArrayRef, sizes)
  FORWARD(c10::SymIntArrayRef, sym_sizes)
  FORWARD(c10::Layout, layout)
  FORWARD(int64_t, numel)
  FORWARD(c10::SymInt, sym_numel)
  FORWARD(c10::SymIntArrayRef, sym_strides)
  FORWARD(c10::SymInt, sym_storage_offset)
  FORWARD(void, reset_backward_hooks)
#define TRACE0(name)                            \
  void name(c10::DeviceType d) const override { \
    if (next) next->name(d);                    \
  }
#define TRACE1(name)                                         \
  void name(c10::DeviceType d, uintptr_t a) const override { \
    if (next) next->name(d, a);                              \
  }
#define TRACE2(name)                                                      \
  void name(c10::DeviceType d, uintptr_t a, uintptr_t b) const override { \
    if (next) next->name(d, a, b);                                        \
  }
  TRACE1(trace_gpu_event_creation)
  TRACE1(trace_gpu_event_deletion)
  TRACE2(trace_gpu_event_record)
  TRACE2(trace_gpu_event_wait)
  TRACE1(trace_gpu_memory_allocation)
  TRACE1(trace_gpu_memory_deallocation)
  TRACE1(trace_gpu_stream_creation)
  TRACE0(trace_gpu_device_synchronization)
  TRACE1(trace_gpu_stream_synchronization)
  TRACE1(trace_gpu_event_synchronization)
};

// Never freed: tensors that outlive static destruction still call through it.
Table* table() {
  static Table* t = new Table;
  return t;
}
PyInterpreter*& python_interpreter() {
  static PyInterpreter* p = nullptr;
  return p;
}
PyInterpreter* interpreter() {
  if (python_interpreter()) return python_interpreter();
  static PyInterpreter* own = new PyInterpreter(table());
  return own;
}

}  // namespace

bool mode_on_top() {
  if (!handler) return false;
  int64_t n = ModeStack::stack_len();
  return n > 0 && ModeStack::get_stack_at(n - 1)->ptr(interpreter()) == object;
}

void push_mode(ModeHandler* h, void* python_mode) {
  VT_CHECK(!handler, "a mode is already on this thread's stack");
  VT_CHECK(bool(python_mode) == bool(python_interpreter()), "a Python process needs a TorchDispatchMode object, a C++ process has none");
  static char cpp_object;
  object = python_mode ? static_cast<PyObject*>(python_mode) : reinterpret_cast<PyObject*>(&cpp_object);
  (*interpreter())->incref(object);  // the holder steals a reference
  auto mode = std::make_shared<compat::Mode>(object, interpreter());
  ModeStack::push_non_infra_mode_onto_stack(std::move(mode));
  handler = h;
}

namespace {

// Ours is taken from wherever on the stack it is, and `bottom`, if any, is put below all others: a mode of the program's own is asked first. Those of
// torch's own (fake tensors, proxies) lie below these and stay in their places, where their ends look for them.
void restack(const std::shared_ptr<compat::Mode>& bottom) {
  std::vector<std::shared_ptr<compat::Mode>> others;
  while (ModeStack::any_modes_set(/*skip_infra_modes=*/true))
    if (auto mode = ModeStack::pop_stack(); mode->ptr(interpreter()) != object) others.push_back(std::move(mode));
  if (bottom) ModeStack::push_non_infra_mode_onto_stack(bottom);
  for (size_t i = others.size(); i-- > 0;) ModeStack::push_non_infra_mode_onto_stack(others[i]);
}

}  // namespace

bool has_mode() { return handler; }

void remove_mode(const ModeHandler* h) {
  if (!handler || handler != h) return;
  restack(nullptr);
  handler = nullptr;
  object = nullptr;
}

namespace {

// In autograd and above it such an op is no op of ours: only what it calls is.
bool is_taken_apart(const c10::OperatorHandle& op, c10::DispatchKeySet keys) {
  if (!keys.has_any(c10::autograd_dispatch_keyset) || !compat::has_composite_kernel(op)) return false;
  for (auto own : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::CompositeExplicitAutograd})
    if (op.hasKernelForDispatchKey(own)) return false;
  return true;
}

void call_unseen(const c10::OperatorHandle& op, c10::DispatchKeySet keys, compat::Stack* stack) {
  if (!waiting || is_taken_apart(op, keys)) return op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kUnseenKey), stack);
  Seen seen;
  op.callBoxed(stack);
}

// False where another library has taken the key: the mode is then seen.
const bool can_be_unseen = [] {
  try {
    static auto* library = new torch::Library(torch::Library::IMPL, "_", kUnseenKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&call_unseen>());
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}();

}  // namespace

Unseen::Unseen() : keys_(c10::impl::tls_local_dispatch_key_set()) {
  if (!can_be_unseen || !mode_on_top()) return;
  mode_ = waiting = ModeStack::pop_stack();
  c10::impl::tls_set_dispatch_key_included(kUnseenKey, true);
  c10::impl::tls_set_dispatch_key_excluded(kUnseenKey, false);
}
Unseen::~Unseen() {
  if (!mode_) return;
  waiting.reset();
  c10::impl::tls_set_dispatch_key_included(kUnseenKey, keys_.included_.has(kUnseenKey));
  c10::impl::tls_set_dispatch_key_excluded(kUnseenKey, keys_.excluded_.has(kUnseenKey));
  ModeStack::push_non_infra_mode_onto_stack(std::move(mode_));
}

InBatch::InBatch(bool on) : before_(c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::VmapMode)) {
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::VmapMode, on);
}
InBatch::~InBatch() { c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::VmapMode, before_); }

Seen::Seen() : mode_(std::move(waiting)), not_unseen_(kUnseenKey) {
  if (mode_) restack(mode_);
}
Seen::~Seen() {
  if (!mode_) return;
  restack(nullptr);
  waiting = std::move(mode_);
}

Paused::Paused() : not_unseen_(kUnseenKey) {
  if (mode_on_top()) mode_ = ModeStack::pop_stack();
}
Paused::~Paused() {
  if (mode_) ModeStack::push_non_infra_mode_onto_stack(std::move(mode_));
}

}  // namespace capture

void use_python_interpreter(c10::impl::PyInterpreter* p) {
  if (capture::python_interpreter()) return;
  capture::table()->next = p->vtable_;
  p->vtable_ = capture::table();
  capture::python_interpreter() = p;
}

}  // namespace vitrify
