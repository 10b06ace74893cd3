#include "python/tree.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/python_symnode.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <optional>

#include "python/errors.h"
#include "torch/leaf_gradient.h"
#include "torch/versions.h"

namespace vitrify::python {
namespace {

PyObject* flatten_hook = nullptr;

bool is_value_type(PyObject* o) {
  PyTypeObject* t = Py_TYPE(o);
  if (t == &PyLong_Type || t == &PyFloat_Type || t == &PyUnicode_Type || t == &PyBytes_Type || t == &PyComplex_Type || t == &PyRange_Type ||
      t == &PySlice_Type)
    return true;
  // torch.dtype and friends are singletons or compare by value; numpy scalars and enums compare by value
  static const char* const names[] = {"torch.dtype", "torch.device", "torch.layout", "torch.memory_format"};
  for (const char* n : names)
    if (!strcmp(t->tp_name, n)) return true;
  return false;
}

bool is_singleton(PyObject* o) { return o == Py_None || o == Py_True || o == Py_False || o == Py_Ellipsis || o == Py_NotImplemented; }

// Whether its module has it by its name: then no call has made it.
bool is_of_its_module(PyObject* o) {
  if (PyCFunction_Check(o)) return !PyCFunction_GET_SELF(o) || PyModule_Check(PyCFunction_GET_SELF(o));
  const Ref module = Ref::steal(PyObject_GetAttrString(o, "__module__")), name = Ref::steal(PyObject_GetAttrString(o, "__qualname__"));
  Ref found = module ? Ref::steal(PyImport_GetModule(module.get())) : Ref();
  const Ref dot = checked(PyUnicode_FromString("."));
  const Ref parts = name && PyUnicode_Check(name.get()) ? Ref::steal(PyUnicode_Split(name.get(), dot.get(), -1)) : Ref();
  for (Py_ssize_t i = 0; found && parts && i < PyList_GET_SIZE(parts.get()); ++i)
    found = Ref::steal(PyObject_GetAttr(found.get(), PyList_GET_ITEM(parts.get(), i)));
  forget_error();
  return parts && found.get() == o;
}

// What each call gives as it is. A function or class in a result may be one that the program makes.
bool is_shared_object(PyObject* o, bool result) {
  if (is_singleton(o) || PyModule_Check(o)) return true;
  return (PyType_Check(o) || PyFunction_Check(o) || PyCFunction_Check(o)) && (!result || is_of_its_module(o));
}

// A key of a dict that a program gives, with the numbers that symbols in it stand for.
Ref plain_key(PyObject* key) {
  if (torch::is_symint(key)) return checked(PyNumber_Index(key));
  if (torch::is_symfloat(key)) return checked(PyNumber_Float(key));
  if (!PyTuple_CheckExact(key)) return Ref::borrow(key);
  Ref r = checked(PyTuple_New(PyTuple_GET_SIZE(key)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i) PyTuple_SET_ITEM(r.get(), i, plain_key(PyTuple_GET_ITEM(key, i)).release());
  return r;
}

bool has_weak_references(PyObject* o) {
  return Py_TYPE(o)->tp_weaklistoffset > 0 || (Py_TYPE(o)->tp_flags & (1UL << 3));  // managed weakref list
}

bool is_known(PyObject* o, PyObject* known) {
  if (!known || is_value_type(o)) return false;
  const Ref id = checked(PyLong_FromVoidPtr(o));
  return PyDict_Contains(known, id.get()) > 0;
}

bool is_leaf(const c10::TensorImpl* t) {
  const auto* m = static_cast<const torch::autograd::AutogradMeta*>(t->autograd_meta());
  return !m || !m->grad_fn_;
}
bool is_view(const c10::TensorImpl* t) {
  const auto* m = static_cast<const torch::autograd::AutogradMeta*>(t->autograd_meta());
  return m && m->is_view_ && static_cast<const torch::autograd::DifferentiableViewMeta*>(m)->has_bw_view();
}
bool is_dual(const c10::TensorImpl* t) {  // within a level of forward-mode differentiation
  const auto* m = static_cast<const torch::autograd::AutogradMeta*>(t->autograd_meta());
  return m && m->fw_grad_ && !m->fw_grad_->empty();
}

}  // namespace

void set_flatten_hook(PyObject* hook) { Py_XSETREF(flatten_hook, Py_NewRef(hook)); }

bool is_plain_tensor(PyObject* o) { return THPVariable_CheckExact(o); }

namespace {

using Same = bool (*)(PyObject*, PyObject*);

bool same_attributes(PyObject* a, PyObject* b, std::initializer_list<const char*> names, Same same) {
  return std::ranges::all_of(names, [&](const char* name) {
    Ref x = Ref::steal(PyObject_GetAttrString(a, name)), y = Ref::steal(PyObject_GetAttrString(b, name));
    if (!x || !y) forget_error();
    return x && y && same(x.get(), y.get());
  });
}

// 1 == 1.0 == True and 0.0 == -0.0, but programs can tell them apart: what is in a value is compared by type and bits too.
// nullopt: only == can say.
std::optional<bool> exactly(PyObject* a, PyObject* b, Same same) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) {
    double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return !memcmp(&x, &y, sizeof x);
  }
  if (PyComplex_CheckExact(a)) {
    Py_complex x = PyComplex_AsCComplex(a), y = PyComplex_AsCComplex(b);
    return !memcmp(&x, &y, sizeof x);
  }
  if (PyTuple_CheckExact(a) || PyFrozenSet_CheckExact(a)) return same_elements(a, b, same);
  if (Py_TYPE(a) == &PyRange_Type || Py_TYPE(a) == &PySlice_Type) return same_attributes(a, b, {"start", "stop", "step"}, same);
  if (!strncmp(Py_TYPE(a)->tp_name, "numpy.", 6)) {
    Py_buffer x{}, y{};
    if (PyObject_GetBuffer(a, &x, PyBUF_SIMPLE) == 0) {
      bool equal = PyObject_GetBuffer(b, &y, PyBUF_SIMPLE) == 0 && x.len == y.len && !memcmp(x.buf, y.buf, x.len);
      forget_error();
      if (y.obj) PyBuffer_Release(&y);
      PyBuffer_Release(&x);
      return equal;
    }
    forget_error();
  }
  return std::nullopt;
}

// What the user has written to the tensor object: marks of dimensions are ours.
PyObject* attributes(PyObject* tensor) {
  PyObject** dict = _PyObject_GetDictPtr(tensor);
  return dict && *dict && PyDict_GET_SIZE(*dict) ? *dict : nullptr;
}

bool is_mark(PyObject* key) { return PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, "_vitrify_dims") == 0; }

// Their names, as a tuple; null: none.
Ref attributes_of(PyObject* tensor) {
  PyObject* dict = attributes(tensor);
  if (!dict) return {};
  Ref names = checked(PyDict_Keys(dict));
  for (Py_ssize_t i = PyList_GET_SIZE(names.get()); i-- > 0;)
    if (is_mark(PyList_GET_ITEM(names.get(), i))) PyList_SetSlice(names.get(), i, i + 1, nullptr);
  return PyList_GET_SIZE(names.get()) ? checked(PyList_AsTuple(names.get())) : Ref();
}

bool has_attributes(PyObject* tensor, PyObject* names) {
  PyObject* dict = attributes(tensor);
  if (!dict) return !names;
  Py_ssize_t pos = 0, n = 0;
  PyObject *k, *v;
  while (PyDict_Next(dict, &pos, &k, &v)) {
    if (is_mark(k)) continue;
    if (!names || n >= PyTuple_GET_SIZE(names)) return false;
    PyObject* want = PyTuple_GET_ITEM(names, n++);
    if (k != want && !same_value(k, want)) return false;
  }
  return n == (names ? PyTuple_GET_SIZE(names) : 0);
}

bool equal(PyObject* a, PyObject* b) {
  int r = PyObject_RichCompareBool(a, b, Py_EQ);
  if (r < 0) forget_error();
  return r > 0;
}

}  // namespace

bool same_elements(PyObject* a, PyObject* b, bool (*same)(PyObject*, PyObject*)) {
  Ref x = Ref::steal(PySequence_Tuple(a)), y = Ref::steal(PySequence_Tuple(b));
  if (!x || !y) forget_error();
  if (!x || !y || PyTuple_GET_SIZE(x.get()) != PyTuple_GET_SIZE(y.get())) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x.get()); ++i)
    if (!same(PyTuple_GET_ITEM(x.get(), i), PyTuple_GET_ITEM(y.get(), i))) return false;
  return true;
}

bool same_value(PyObject* a, PyObject* b) {
  if (auto r = exactly(a, b, same_value)) return *r;
  return is_value_type(a) && equal(a, b);
}

bool alike(PyObject* a, PyObject* b) {
  if (auto r = exactly(a, b, alike)) return *r;
  return PyList_CheckExact(a) ? same_elements(a, b, alike) : equal(a, b);
}

const at::Tensor& grad_of(const c10::TensorImpl* t) {
  static const at::Tensor none;
  return t->autograd_meta() ? t->grad() : none;
}

TensorMeta TensorMeta::of(const at::Tensor& t, PyTypeObject* type) {
  TensorMeta m;
  m.type = type;
  m.keys = t.key_set().raw_repr();
  m.dtype = t.dtype();
  m.device = t.device();
  m.requires_grad = t.requires_grad();
  m.leaf = is_leaf(t.unsafeGetTensorImpl());
  m.gradient = gradient_of_leaf(t.unsafeGetTensorImpl());
  m.has_grad = grad_of(t.unsafeGetTensorImpl()).defined();
  m.dual = is_dual(t.unsafeGetTensorImpl());
  m.argument = type != nullptr;
  if (t.layout() == at::kStrided && !t.is_nested() && t.unsafeGetTensorImpl()->has_storage()) {
    m.sizes.assign(t.sizes().begin(), t.sizes().end());
    m.strides.assign(t.strides().begin(), t.strides().end());
    m.offset = t.storage_offset();
    m.memory = t.storage().nbytes();
    m.view = is_view(t.unsafeGetTensorImpl());
    m.spoiled = is_spoiled(t.unsafeGetTensorImpl());
  } else {
    m.opaque = true;
  }
  return m;
}

bool TensorMeta::matches(const c10::TensorImpl* t) const {
  if (t->key_set().raw_repr() != keys || t->dtype() != dtype || t->device() != device || t->requires_grad() != requires_grad || is_dual(t) != dual)
    return false;
  if (requires_grad && (is_leaf(t) != leaf || gradient_of_leaf(t) != gradient || is_spoiled(t) != spoiled)) return false;
  if (argument && grad_of(t).defined() != has_grad) return false;
  if (opaque) return true;
  auto s = t->sizes(), st = t->strides();
  if (s.size() != sizes.size()) return false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if ((s[i] != sizes[i] && sizes[i] != kAny) || (st[i] != strides[i] && strides[i] != kAny)) return false;
  }
  if (exact_view && is_view(t) != view) return false;
  if (exact_memory && t->unsafe_storage().nbytes() != memory) return false;
  return !exact_offset || t->storage_offset() == offset;
}

std::string to_string(const TensorMeta& m) {
  std::vector<std::string> sizes;
  for (int64_t n : m.sizes) sizes.push_back(n == TensorMeta::kAny ? "any" : std::to_string(n));
  return fmt::format("{}[{}]", m.dtype.name(), fmt::join(sizes, ", "));
}

void Tree::visit(int (*f)(PyObject*, void*), void* arg, int& result) const {
  for (const Ref* r : {&type, &value, &rebuild})
    if (!result && r->get()) result = f(r->get(), arg);
  for (const Tree& c : children) c.visit(f, arg, result);
}

Tree Flattener::flatten(PyObject* o, const std::string& path, int depth) {
  if (depth > 40) throw Unsupported(path + " is nested too deeply");
  Tree t;
  t.type = Ref::borrow((PyObject*)Py_TYPE(o));
  if (THPVariable_CheckExact(o)) {
    t.kind = TreeKind::Tensor;
    t.tensor = tensors.size();
    t.value = attributes_of(o);
    tensors.push_back(o);
    names.push_back(path);
    return t;
  }
  const bool is_of_before = is_known(o, known);
  if (is_of_before || is_shared_object(o, result)) {
    t.kind = TreeKind::Object;
    t.weak = is_of_before ? has_weak_references(o) : !result && PyFunction_Check(o);
    t.value = t.weak ? checked(PyWeakref_NewRef(o, nullptr)) : Ref::borrow(o);
    if (!is_singleton(o)) objects.push_back(o);
    return t;
  }
  if (is_value_type(o) && !(result && PySlice_Check(o))) {
    t.value = Ref::borrow(o);
    return t;
  }
  if (PyTuple_Check(o) || PyList_CheckExact(o)) {
    bool tuple = PyTuple_Check(o);
    if (!tuple) containers.push_back(o);
    if (tuple && !PyTuple_CheckExact(o)) objects.push_back(t.type.get());
    t.kind = tuple ? TreeKind::Tuple : TreeKind::List;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(o);
    t.children.reserve(n);
    for (Py_ssize_t i = 0; i < n; ++i) t.children.push_back(flatten(PySequence_Fast_GET_ITEM(o, i), fmt::format("{}[{}]", path, i), depth + 1));
    return t;
  }
  if (PyDict_CheckExact(o)) {
    t.kind = TreeKind::Dict;
    containers.push_back(o);
    t.value = checked(PySequence_Tuple(o));
    std::vector<Ref> keys;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(t.value.get()); ++i) {
      PyObject* key = PyTuple_GET_ITEM(t.value.get(), i);
      PyObject* v = PyDict_GetItemWithError(o, key);
      if (!v) throw PyErr_Occurred() ? throw PythonError() : Unsupported(path + " has an unstable key");
      Ref r = checked(PyObject_Repr(key));
      t.children.push_back(flatten(v, fmt::format("{}[{}]", path, PyUnicode_AsUTF8(r.get())), depth + 1));
      if (result) keys.push_back(plain_key(key));
    }
    if (result) {
      t.value = checked(PyTuple_New(static_cast<Py_ssize_t>(keys.size())));
      for (size_t i = 0; i < keys.size(); ++i) PyTuple_SET_ITEM(t.value.get(), static_cast<Py_ssize_t>(i), keys[i].release());
    }
    return t;
  }
  if (THPVariable_Check(o)) throw Unsupported(fmt::format("{} is a tensor subclass ({})", path, Py_TYPE(o)->tp_name));
  if (flatten_hook) {
    Ref r = checked(PyObject_CallFunctionObjArgs(flatten_hook, o, result ? Py_True : Py_False, nullptr));
    if (PyUnicode_Check(r.get())) throw Unsupported(fmt::format("{} {}", path, PyUnicode_AsUTF8(r.get())));
    if (PyTuple_Check(r.get())) {
      t.kind = TreeKind::Custom;
      if (!PySlice_Check(o)) containers.push_back(o);
      objects.push_back(t.type.get());
      PyObject* kids = PyTuple_GET_ITEM(r.get(), 0);
      t.value = Ref::borrow(PyTuple_GET_ITEM(r.get(), 1));
      t.rebuild = Ref::borrow(PyTuple_GET_ITEM(r.get(), 2));
      Ref seq = checked(PySequence_Tuple(kids));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(seq.get()); ++i)
        t.children.push_back(flatten(PyTuple_GET_ITEM(seq.get(), i), fmt::format("{}[{}]", path, i), depth + 1));
      return t;
    }
    if (r.get() == Py_True) {  // a value: compared with ==
      objects.push_back(t.type.get());
      t.value = Ref::borrow(o);
      return t;
    }
  }
  if (result) throw Unsupported(fmt::format("{} is an object of type {}", path, Py_TYPE(o)->tp_name));
  t.kind = TreeKind::Object;
  t.weak = has_weak_references(o);
  t.value = t.weak ? checked(PyWeakref_NewRef(o, nullptr)) : Ref::borrow(o);
  objects.push_back(o);
  return t;
}

bool match(const Tree& t, PyObject* o, const std::vector<TensorMeta>* metas, c10::SmallVectorImpl<PyObject*>& tensors) {
  if ((PyObject*)Py_TYPE(o) != t.type.get()) {
    // without metadata only the structure counts
    if (metas || t.kind != TreeKind::Tensor || !THPVariable_CheckExact(o)) return false;
  }
  switch (t.kind) {
    case TreeKind::Tensor:
      if (metas) {
        const TensorMeta& m = (*metas)[t.tensor];
        if (!m.matches(THPVariable_Unpack(o).unsafeGetTensorImpl()) || (m.argument && !has_attributes(o, t.value.get()))) return false;
      }
      tensors.push_back(o);
      return true;
    case TreeKind::Object:
      return o == (t.weak ? PyWeakref_GET_OBJECT(t.value.get()) : t.value.get());
    case TreeKind::Value:
      return o == t.value.get() || alike(o, t.value.get());
    case TreeKind::Tuple:
    case TreeKind::List: {
      if ((size_t)PySequence_Fast_GET_SIZE(o) != t.children.size()) return false;
      for (size_t i = 0; i < t.children.size(); ++i)
        if (i >= (size_t)PySequence_Fast_GET_SIZE(o) || !match(t.children[i], PySequence_Fast_GET_ITEM(o, i), metas, tensors)) return false;
      return true;
    }
    case TreeKind::Dict: {
      if ((size_t)PyDict_GET_SIZE(o) != t.children.size()) return false;
      Py_ssize_t pos = 0;
      PyObject *k, *v;
      for (size_t i = 0; PyDict_Next(o, &pos, &k, &v); ++i) {
        PyObject* want = PyTuple_GET_ITEM(t.value.get(), i);
        if (i >= t.children.size() || (k != want && !same_value(k, want)) || !match(t.children[i], v, metas, tensors)) return false;
      }
      return true;
    }
    case TreeKind::Custom: {
      Ref r = Ref::steal(PyObject_CallFunctionObjArgs(flatten_hook, o, Py_False, nullptr));
      if (!r || !PyTuple_Check(r.get())) {
        forget_error();
        return false;
      }
      Ref seq = Ref::steal(PySequence_Tuple(PyTuple_GET_ITEM(r.get(), 0)));
      if (!seq) forget_error();
      if (!seq || !alike(PyTuple_GET_ITEM(r.get(), 1), t.value.get()) || (size_t)PyTuple_GET_SIZE(seq.get()) != t.children.size()) return false;
      for (size_t i = 0; i < t.children.size(); ++i)
        if (!match(t.children[i], PyTuple_GET_ITEM(seq.get(), i), metas, tensors)) return false;
      return true;
    }
  }
  return false;
}

PyObject* rebuild(const Tree& t, PyObject* const* leaves) {
  switch (t.kind) {
    case TreeKind::Tensor:
      return Py_NewRef(leaves[t.tensor]);
    case TreeKind::Object:
      return Py_NewRef(t.weak ? PyWeakref_GET_OBJECT(t.value.get()) : t.value.get());
    case TreeKind::Value:
      return Py_NewRef(t.value.get());
    case TreeKind::Tuple: {
      Ref r = Ref::steal(PyTuple_New(t.children.size()));
      if (!r) return nullptr;
      for (size_t i = 0; i < t.children.size(); ++i) {
        PyObject* c = rebuild(t.children[i], leaves);
        if (!c) return nullptr;
        PyTuple_SET_ITEM(r.get(), i, c);
      }
      if (t.type.get() == (PyObject*)&PyTuple_Type) return r.release();
      // namedtuple._make and torch.Size both build from one iterable; result types of torch (structseq) take it in their constructor
      Ref make = Ref::steal(PyObject_GetAttrString(t.type.get(), "_make"));
      if (!make) forget_error();
      return PyObject_CallOneArg(make ? make.get() : t.type.get(), r.get());
    }
    case TreeKind::List: {
      Ref r = Ref::steal(PyList_New(t.children.size()));
      if (!r) return nullptr;
      for (size_t i = 0; i < t.children.size(); ++i) {
        PyObject* c = rebuild(t.children[i], leaves);
        if (!c) return nullptr;
        PyList_SET_ITEM(r.get(), i, c);
      }
      return r.release();
    }
    case TreeKind::Dict: {
      Ref r = Ref::steal(PyDict_New());
      if (!r) return nullptr;
      for (size_t i = 0; i < t.children.size(); ++i) {
        Ref c = Ref::steal(rebuild(t.children[i], leaves));
        if (!c || PyDict_SetItem(r.get(), PyTuple_GET_ITEM(t.value.get(), i), c.get()) < 0) return nullptr;
      }
      return r.release();
    }
    case TreeKind::Custom: {
      Ref kids = Ref::steal(PyList_New(t.children.size()));
      if (!kids) return nullptr;
      for (size_t i = 0; i < t.children.size(); ++i) {
        PyObject* c = rebuild(t.children[i], leaves);
        if (!c) return nullptr;
        PyList_SET_ITEM(kids.get(), i, c);
      }
      return PyObject_CallFunctionObjArgs(t.rebuild.get(), t.value.get(), kids.get(), nullptr);
    }
  }
  return nullptr;
}

}  // namespace vitrify::python
