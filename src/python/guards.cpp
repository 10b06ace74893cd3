#include "python/guards.h"

#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "python/errors.h"
#include "torch/process_state.h"

namespace vitrify::python {

// ---- modes

namespace {

int32_t device_context_of_stack(int64_t n) {
  if (n != 1) return -1;
  PyObject* mode = at::impl::PythonTorchFunctionTLS::get_stack_at(0)->ptr(getPyInterpreter());
  if (strcmp(Py_TYPE(mode)->tp_name, "DeviceContext")) return -1;
  Ref d = Ref::steal(PyObject_GetAttrString(mode, "device"));
  if (!d || !THPDevice_Check(d.get())) {
    forget_error();
    return -1;
  }
  c10::Device dev = ((THPDevice*)d.get())->device;
  return 1 + (int32_t)dev.type() * 256 + (uint8_t)dev.index();
}

enum class Hooks { None, Lossless, Checkpoint, Others };

// On saved tensors: torch's own and marked ones (vitrify/_marks.py) give back what they are given.
Hooks hooks_now() {
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
  if (!hooks) return Hooks::None;
  PyObject* pack = hooks->first.ptr(getPyInterpreter());
  if (PyObject_HasAttrString(pack, "__vitrify_lossless__")) return Hooks::Lossless;
  Ref module = Ref::steal(PyObject_GetAttrString(pack, "__module__"));
  const char* name = module && PyUnicode_Check(module.get()) ? PyUnicode_AsUTF8(module.get()) : nullptr;
  forget_error();
  if (!name || strncmp(name, "torch.", 6) != 0) return Hooks::Others;
  return strcmp(name, "torch.utils.checkpoint") == 0 ? Hooks::Checkpoint : Hooks::Lossless;
}

bool are_now(Hooks which) {
  if (!at::SavedTensorDefaultHooks::get_hooks()) return false;
  pybind11::gil_scoped_acquire gil;
  return hooks_now() == which;
}

}  // namespace

bool python_hooks_may_change() { return are_now(Hooks::Others); }
bool python_hooks_compute_again() { return are_now(Hooks::Checkpoint); }
PyObject* pack_of_checkpoint() {
  return hooks_now() == Hooks::Checkpoint ? at::SavedTensorDefaultHooks::get_hooks()->first.ptr(getPyInterpreter()) : nullptr;
}

ModeState ModeState::current() {
  ModeState m;
  auto raw = c10::impl::raw_local_dispatch_key_set;
  m.included = raw.included_;
  m.excluded = raw.excluded_;
  auto& a = c10::AutogradState::get_tls_state();
  m.autograd = a.get_grad_mode() | a.get_inference_mode() << 1 | a.get_fw_grad_mode() << 2 | a.get_view_replay_enabled() << 3 |
               torch::autograd::AnomalyMode::is_enabled() << 4;
  if (raw.excluded_ & c10::autocast_dispatch_keyset.raw_repr())  // stored inverted: a set bit is a device with autocast on
    m.autocast = 1 | (uint32_t)at::autocast::get_autocast_dtype(at::kCPU) << 8 | (uint32_t)at::autocast::get_autocast_dtype(at::kCUDA) << 16 |
                 (uint32_t)at::autocast::is_autocast_cache_enabled() << 24;
  m.threads = at::get_num_threads();
  m.default_dtype = (uint16_t)c10::get_default_dtype_as_scalartype();
  m.library = library_state();
  m.function_modes = (uint8_t)at::impl::PythonTorchFunctionTLS::get_disabled_state();
  m.hooks = m.grad() && hooks_now() == Hooks::Others;
  if (int64_t n = at::impl::PythonTorchFunctionTLS::stack_len()) m.device_context = device_context_of_stack(n);
  return m;
}

const char* ModeState::refusal() const {
  using c10::DispatchKey;
  c10::impl::PODLocalDispatchKeySet raw{included, excluded};
  auto inc = raw.included();
  if (inc.has(DispatchKey::Python) || inc.has(DispatchKey::PythonTLSSnapshot)) return "a TorchDispatchMode is active";
  if (inc.has(DispatchKey::Tracer)) return "torch.jit.trace is running";
  if (inc.has(DispatchKey::FuncTorchDynamicLayerFrontMode) || inc.has(DispatchKey::FuncTorchDynamicLayerBackMode) ||
      inc.has(DispatchKey::FuncTorchBatched) || inc.has(DispatchKey::FuncTorchVmapMode) || inc.has(DispatchKey::FuncTorchGradWrapper))
    return "the call is inside a torch.func transform";
  if (inc.has(DispatchKey::VmapMode)) return "the call is made in a backward of batched gradients, which lets nobody draw";
  if (inc.has(DispatchKey::Functionalize) || inc.has(DispatchKey::PreDispatch)) return "another tracer is active";
  if (grad() && autograd & 1 << 4) return "detect_anomaly is on";
  if (hooks)
    return "hooks on saved tensors, which may give back something else than they are given, are around the call (vitrify.mark_lossless says of a "
           "hook that it does not)";
  if (device_context < 0) return "a TorchFunctionMode is active";
  if (function_modes) return "__torch_function__ is disabled here";
  return nullptr;
}

// ---- dict watching: one watcher id for the process, subscribers by dict

namespace {

struct Subscription {
  Guards* guards;
  const std::unordered_set<PyObject*>* keys;  // null: all
};
std::unordered_map<PyObject*, std::vector<Subscription>>& subscriptions() {
  static auto* m = new std::unordered_map<PyObject*, std::vector<Subscription>>();
  return *m;
}
int watcher_id = -2;

uintptr_t dict_word(PyObject* o) {
#if PY_VERSION_HEX >= 0x030c0000 && PY_VERSION_HEX < 0x030d0000
  // 3.12: the managed dict (or its inline values) is three words before the object
  if (Py_TYPE(o)->tp_flags & Py_TPFLAGS_MANAGED_DICT) return ((uintptr_t*)o)[-3];
#endif
  PyObject** p = _PyObject_GetDictPtr(o);
  return p ? (uintptr_t)*p : 0;
}

}  // namespace

int on_dict_event(PyDict_WatchEvent event, PyObject* dict, PyObject* key, PyObject*) {
  auto& subs = subscriptions();
  auto it = subs.find(dict);
  if (it == subs.end()) return 0;
  bool whole = event == PyDict_EVENT_CLONED || event == PyDict_EVENT_CLEARED || event == PyDict_EVENT_DEALLOCATED || !key;
  for (auto& s : it->second)
    if (whole || !s.keys || s.keys->count(key)) s.guards->dirty.store(true, std::memory_order_relaxed);
  return 0;
}

Guards::~Guards() {
  if (!watching_) return;
  auto& subs = subscriptions();
  for (auto& d : dicts_) {
    auto it = subs.find(d->dict.get());
    if (it == subs.end()) continue;
    std::erase_if(it->second, [&](auto& s) { return s.guards == this; });
    if (it->second.empty()) {
      subs.erase(it);
      if (watcher_id >= 0) PyDict_Unwatch(watcher_id, d->dict.get());
    }
  }
}

void Guards::add_dict(PyObject* dict, PyObject* keys, const std::string& name) {
  auto d = std::make_unique<Dict>();
  d->dict = Ref::borrow(dict);
  d->name = name;
  if (keys && keys != Py_None) {
    d->all = false;
    Ref seq = checked(PySequence_Tuple(keys));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(seq.get()); ++i) {
      PyObject* k = Py_NewRef(PyTuple_GET_ITEM(seq.get(), i));
      if (PyUnicode_CheckExact(k)) PyUnicode_InternInPlace(&k);
      d->items.emplace_back(Ref::steal(k), Ref::borrow(PyDict_GetItemWithError(dict, k)));
      d->keys.insert(k);
    }
  } else {
    Py_ssize_t pos = 0;
    PyObject *k, *v;
    while (PyDict_Next(dict, &pos, &k, &v)) d->items.emplace_back(Ref::borrow(k), Ref::borrow(v));
  }
  dicts_.push_back(std::move(d));
}

void Guards::add_names(PyObject* dicts_and_labels, PyObject* names) {
  auto among = std::make_shared<Names>();
  Ref seq = checked(PySequence_Tuple(names)), dicts = checked(PySequence_Tuple(dicts_and_labels));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(seq.get()); ++i) {
    PyObject* k = Py_NewRef(PyTuple_GET_ITEM(seq.get(), i));
    PyUnicode_InternInPlace(&k);
    among->held.push_back(Ref::steal(k));
    among->keys.insert(k);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts.get()); ++i) {
    PyObject* pair = PyTuple_GET_ITEM(dicts.get(), i);
    auto d = std::make_unique<Dict>();
    d->dict = Ref::borrow(PyTuple_GET_ITEM(pair, 0));
    d->name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(pair, 1));
    d->among = among;
    Py_ssize_t pos = 0;
    PyObject *k, *v;
    while (PyDict_Next(d->dict.get(), &pos, &k, &v))
      if (d->counts(k)) d->items.emplace_back(Ref::borrow(k), Ref::borrow(v));
    dicts_.push_back(std::move(d));
  }
}

void Guards::add_attributes(PyObject* type, PyObject* keys, const std::string& name) {
  add_dict(((PyTypeObject*)type)->tp_dict, keys, name);
  dicts_.back()->type = Ref::borrow(type);
}

void Guards::add_object(PyObject* o) {
  _PyObject_GetDictPtr(o);  // materialises inline values, so that the word is stable
  objects_.push_back({Ref::borrow(o), Py_TYPE(o), dict_word(o)});
}

void Guards::add_list(PyObject* l, const std::string& name) {
  List g{Ref::borrow(l), {}, name};
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(l); ++i) g.items.push_back(Ref::borrow(PyList_GET_ITEM(l, i)));
  lists_.push_back(std::move(g));
}

void Guards::add_cell(PyObject* c, const std::string& name) {
  cells_.push_back({Ref::borrow(c), &((PyCellObject*)c)->ob_ref, Ref::borrow(PyCell_GET(c)), name});
}

void Guards::add_slot(PyObject* o, PyObject* descriptor, const std::string& name) {
  PyMemberDef* member = ((PyMemberDescrObject*)descriptor)->d_member;
  if (member->type != Py_T_OBJECT_EX || !PyObject_TypeCheck(o, PyDescr_TYPE(descriptor))) return;
  auto** at = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(o) + member->offset);
  cells_.push_back({Ref::borrow(o), at, Ref::borrow(*at), name});
}

void Guards::add_type(PyObject* t) {
  if (!PyUnstable_Type_AssignVersionTag((PyTypeObject*)t)) return;  // out of version tags: the class is taken as constant
  types_.push_back({Ref::borrow(t), ((PyTypeObject*)t)->tp_version_tag});
}

void Guards::add_class(PyObject* t) { classes_.emplace_back(Ref::borrow(t), checked(PyDict_Copy(((PyTypeObject*)t)->tp_dict))); }

void Guards::add_function(PyObject* f) {
  auto* fn = (PyFunctionObject*)f;
  functions_.push_back({Ref::borrow(f), Ref::borrow(fn->func_code), Ref::borrow(fn->func_defaults), Ref::borrow(fn->func_kwdefaults)});
}

static bool same_bytes(PyObject* o, const std::string& bytes) {
  Py_buffer b;
  if (PyObject_GetBuffer(o, &b, PyBUF_FULL_RO) < 0) {
    forget_error();
    return false;
  }
  bool same = (size_t)b.len == bytes.size();
  if (same && PyBuffer_IsContiguous(&b, 'C')) {
    same = !memcmp(b.buf, bytes.data(), bytes.size());
  } else if (same) {
    std::string now(bytes.size(), 0);
    same = PyBuffer_ToContiguous(now.data(), &b, b.len, 'C') == 0 && now == bytes;
    forget_error();
  }
  PyBuffer_Release(&b);
  return same;
}

static void write_buffer(PyObject* o, const std::string& bytes) {
  Py_buffer b;
  if (PyObject_GetBuffer(o, &b, PyBUF_FULL) == 0) {
    if ((size_t)b.len == bytes.size()) PyBuffer_FromContiguous(&b, bytes.data(), b.len, 'C');
    PyBuffer_Release(&b);
  }
  forget_error();
}

static bool read_buffer(PyObject* o, std::string& out) {
  Py_buffer b;
  if (PyObject_GetBuffer(o, &b, PyBUF_FULL_RO) < 0) {
    forget_error();
    return false;
  }
  out.resize(b.len);
  bool ok = PyBuffer_ToContiguous(out.data(), &b, b.len, 'C') == 0;
  forget_error();
  PyBuffer_Release(&b);
  return ok;
}

void Guards::add_buffer(PyObject* o, const std::string& name) {
  Buffer g{Ref::borrow(o), {}, name};
  if (!read_buffer(o, g.bytes)) throw Unsupported(name + " cannot be read");
  buffers_.push_back(std::move(g));
}

// Of sets and deques the elements in their order, which programs see too.
static bool same_equal(PyObject* now, PyObject* before) {
  if (PyTuple_CheckExact(before) && Py_TYPE(now)->tp_iter) return same_elements(now, before, alike);
  int r = PyObject_RichCompareBool(now, before, Py_EQ);
  if (r < 0) forget_error();
  return r > 0;
}

void Guards::add_equal(PyObject* o, PyObject* copy, const std::string& name) { equals_.push_back({Ref::borrow(o), Ref::borrow(copy), name}); }

void Guards::watch() {
  if (watcher_id == -2) {
    watcher_id = PyDict_AddWatcher(on_dict_event);
    if (watcher_id < 0) forget_error();  // all ids taken: dicts are compared on every call
  }
  if (watching_) return;
  watching_ = true;
  for (auto& d : dicts_) {
    auto& list = subscriptions()[d->dict.get()];
    if (list.empty() && watcher_id >= 0) PyDict_Watch(watcher_id, d->dict.get());
    list.push_back({this, d->among ? &d->among->keys : d->all ? nullptr : &d->keys});
  }
  dirty = true;
}

// Whether keys that were all there stand in the order in which they stood: loops over the dict take them so.
static bool in_order(PyObject* dict, const std::vector<std::pair<Ref, Ref>>& items) {
  Py_ssize_t pos = 0;
  PyObject *k, *v;
  for (size_t i = 0; PyDict_Next(dict, &pos, &k, &v); ++i)
    if (i >= items.size() || (k != items[i].first.get() && !same_value(k, items[i].first.get()))) return false;
  return true;
}

bool Guards::same(const Dict& d) {
  if (d.all && !d.among && ((size_t)PyDict_GET_SIZE(d.dict.get()) != d.items.size() || !in_order(d.dict.get(), d.items))) return false;
  if (d.among) {
    Py_ssize_t pos = 0;
    PyObject *k, *v;
    size_t n = 0;
    while (PyDict_Next(d.dict.get(), &pos, &k, &v)) n += d.counts(k);
    if (n != d.items.size()) return false;
  }
  for (auto& [k, v] : d.items) {
    PyObject* now = PyDict_GetItemWithError(d.dict.get(), k.get());
    if (now == v.get()) continue;
    if (!now || !v || !same_value(now, v.get())) {
      forget_error();
      return false;
    }
  }
  return true;
}

bool Guards::check_dicts() {
  dirty.store(false, std::memory_order_relaxed);
  for (auto& d : dicts_)
    if (!same(*d)) {
      dirty.store(true, std::memory_order_relaxed);
      return false;
    }
  if (watcher_id < 0) dirty.store(true, std::memory_order_relaxed);
  return true;
}

bool Guards::check() {
  for (auto& o : objects_)
    if (Py_TYPE(o.object.get()) != o.type || dict_word(o.object.get()) != o.dict_word) return false;
  for (auto& t : types_) {
    auto* type = (PyTypeObject*)t.type.get();
    if (type->tp_version_tag != t.version || !(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)) return false;
  }
  for (auto& c : cells_) {
    PyObject* now = *c.at;
    if (now != c.value.get() && !(now && c.value && same_value(now, c.value.get()))) return false;
  }
  for (auto& f : functions_) {
    auto* fn = (PyFunctionObject*)f.function.get();
    if (fn->func_code != f.code.get() || fn->func_defaults != f.defaults.get() || fn->func_kwdefaults != f.kwdefaults.get()) return false;
  }
  for (auto& l : lists_) {
    if ((size_t)PyList_GET_SIZE(l.list.get()) != l.items.size()) return false;
    for (size_t i = 0; i < l.items.size(); ++i) {
      PyObject* now = PyList_GET_ITEM(l.list.get(), i);
      if (now != l.items[i].get() && !same_value(now, l.items[i].get())) return false;
    }
  }
  for (auto& b : buffers_)
    if (!same_bytes(b.object.get(), b.bytes)) return false;
  for (auto& e : equals_)
    if (!same_equal(e.object.get(), e.copy.get())) return false;
  return !dirty.load(std::memory_order_relaxed) || check_dicts();
}

// A key may be a tensor, whose text is all its elements.
static std::string key_name(PyObject* k) { return PyUnicode_Check(k) ? PyUnicode_AsUTF8(k) : Py_TYPE(k)->tp_name; }

// An OrderedDict keeps a list of its keys beside the dict.
static void put(PyObject* dict, PyObject* k, PyObject* v) {
  const bool ordered = PyODict_Check(dict);
  const int r = v ? (ordered ? PyODict_SetItem : PyDict_SetItem)(dict, k, v) : (ordered ? PyODict_DelItem : PyDict_DelItem)(dict, k);
  if (r < 0) forget_error();
}

std::vector<std::string> Guards::undo_writes() {
  std::vector<std::string> wrote;
  for (auto& d : dicts_) {
    if (same(*d)) continue;
    for (auto& [k, v] : d->items) {
      Ref now = Ref::borrow(PyDict_GetItemWithError(d->dict.get(), k.get()));
      if (now.get() == v.get() || (now && v && same_value(now.get(), v.get()))) continue;
      wrote.push_back(d->name + "." + key_name(k.get()));
      put(d->dict.get(), k.get(), v.get());
      if (d->type) PyType_Modified((PyTypeObject*)d->type.get());
    }
    if (!d->all) continue;
    Ref now = checked(PyDict_Keys(d->dict.get()));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(now.get()); ++i) {
      PyObject* k = PyList_GET_ITEM(now.get(), i);
      bool known = std::any_of(d->items.begin(), d->items.end(), [&](auto& p) { return p.first.get() == k || same_value(p.first.get(), k); });
      if (known || !d->counts(k)) continue;
      wrote.push_back(d->name + "." + key_name(k));
      put(d->dict.get(), k, nullptr);
    }
    if (d->among || in_order(d->dict.get(), d->items)) continue;
    wrote.push_back("the order of " + d->name);
    for (auto& [k, v] : d->items) put(d->dict.get(), k.get(), nullptr), put(d->dict.get(), k.get(), v.get());
  }
  for (auto& l : lists_) {
    bool same = (size_t)PyList_GET_SIZE(l.list.get()) == l.items.size();
    for (size_t i = 0; same && i < l.items.size(); ++i)
      same = PyList_GET_ITEM(l.list.get(), i) == l.items[i].get() || same_value(PyList_GET_ITEM(l.list.get(), i), l.items[i].get());
    if (same) continue;
    wrote.push_back(l.name);
    Ref old = checked(PyList_New(l.items.size()));
    for (size_t i = 0; i < l.items.size(); ++i) PyList_SET_ITEM(old.get(), i, Py_NewRef(l.items[i].get()));
    if (PyList_SetSlice(l.list.get(), 0, PY_SSIZE_T_MAX, old.get()) < 0) forget_error();
  }
  for (auto& c : cells_) {
    PyObject* now = *c.at;
    if (now == c.value.get() || (now && c.value && same_value(now, c.value.get()))) continue;
    wrote.push_back(c.name);
    Ref old = Ref::steal(now);
    *c.at = Py_XNewRef(c.value.get());
  }
  for (auto& [type, before] : classes_) {
    auto* t = (PyTypeObject*)type.get();
    auto set = [&](PyObject* k, PyObject* v) {
      wrote.push_back(std::string(t->tp_name) + "." + key_name(k));
      if (PyType_Type.tp_setattro(type.get(), k, v) < 0) forget_error();
    };
    Ref now = checked(PyDict_Copy(t->tp_dict));
    PyObject *k, *v;
    for (Py_ssize_t at = 0; PyDict_Next(before.get(), &at, &k, &v);)
      if (PyObject* w = PyDict_GetItemWithError(now.get(), k); w != v && !(w && same_value(w, v))) set(k, v);
    for (Py_ssize_t at = 0; PyDict_Next(now.get(), &at, &k, &v);)
      if (PyDict_Contains(before.get(), k) == 0) set(k, nullptr);
  }
  for (auto& b : buffers_) {
    if (same_bytes(b.object.get(), b.bytes)) continue;
    wrote.push_back(b.name);
    write_buffer(b.object.get(), b.bytes);
  }
  for (auto& e : equals_) {
    if (same_equal(e.object.get(), e.copy.get())) continue;
    wrote.push_back(e.name);
    Ref a = Ref::steal(PyObject_CallMethod(e.object.get(), "clear", nullptr));
    Ref b = a ? Ref::steal(PyObject_CallMethod(e.object.get(), PySet_Check(e.object.get()) ? "update" : "extend", "(O)", e.copy.get())) : Ref();
    if (!b) forget_error();
  }
  return wrote;
}

void Guards::visit(int (*f)(PyObject*, void*), void* arg, int& result) const {
  auto v = [&](const Ref& r) {
    if (!result && r) result = f(r.get(), arg);
  };
  for (auto& d : dicts_) {
    v(d->dict), v(d->type);
    for (auto& [k, x] : d->items) v(k), v(x);
  }
  for (auto& o : objects_) v(o.object);
  for (auto& l : lists_) {
    v(l.list);
    for (auto& x : l.items) v(x);
  }
  for (auto& c : cells_) v(c.cell), v(c.value);
  for (auto& t : types_) v(t.type);
  for (auto& [t, before] : classes_) v(t), v(before);
  for (auto& x : functions_) v(x.function), v(x.code), v(x.defaults), v(x.kwdefaults);
  for (auto& b : buffers_) v(b.object);
  for (auto& e : equals_) v(e.object), v(e.copy);
}

}  // namespace vitrify::python
