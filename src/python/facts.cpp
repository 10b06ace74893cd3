#include "python/facts.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <utility>

#include "python/errors.h"
#include "torch/tracer.h"

namespace vitrify::python {
namespace {

bool noted(PyObject* self, Fact fact, const char* name) {
  Tracer* t = Tracer::current();
  if (!t || !THPVariable_Check(self)) return true;
  try {
    t->note_fact(THPVariable_Unpack(self), fact, name);
    return true;
  } catch (...) {
    set_python_error(std::current_exception());
    return false;
  }
}

struct Attribute {
  PyGetSetDef real;
  Fact fact;
};

PyObject* read_attribute(PyObject* self, void* closure) {
  const auto& a = *static_cast<const Attribute*>(closure);
  return noted(self, a.fact, a.real.name) ? a.real.get(self, a.real.closure) : nullptr;
}
int write_attribute(PyObject* self, PyObject* value, void* closure) {
  const auto& a = *static_cast<const Attribute*>(closure);
  return a.real.set(self, value, a.real.closure);
}

struct Method {
  const char* name;
  Fact fact;
  PyMethodDef real = {};
};
std::array methods{Method{"untyped_storage", Fact::Memory}, Method{"storage_offset", Fact::Offset}, Method{"_is_view", Fact::View},
                   Method{"data_ptr", Fact::Address},       Method{"numpy", Fact::Address},         Method{"tolist", Fact::Address},
                   Method{"apply_", Fact::Address},         Method{"map_", Fact::Address},          Method{"map2_", Fact::Address},
                   Method{"_use_count", Fact::Other}};

// The function of a method gets nothing that says which it is: each has one of its own.
template <size_t I>
PyObject* call_method(PyObject* self, PyObject* args, PyObject* kwargs) {
  const Method& m = methods[I];
  if (!noted(self, m.fact, m.name)) return nullptr;
  if (m.real.ml_flags & METH_KEYWORDS) return reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void*>(m.real.ml_meth))(self, args, kwargs);
  return m.real.ml_meth(self, args);
}

// Descriptors are objects; what they point to may be memory that nobody can write.
void replace_attribute(PyObject* type, const char* name, Fact fact) {
  PyObject* o = PyDict_GetItemString(reinterpret_cast<PyTypeObject*>(type)->tp_dict, name);
  if (!o || Py_TYPE(o) != &PyGetSetDescr_Type) return;
  auto* descriptor = reinterpret_cast<PyGetSetDescrObject*>(o);
  auto* ours = new PyGetSetDef(*descriptor->d_getset);
  ours->closure = new Attribute{*descriptor->d_getset, fact};
  ours->get = read_attribute;
  if (ours->set) ours->set = write_attribute;
  descriptor->d_getset = ours;
}
template <size_t I>
void replace_method(PyObject* type) {
  PyObject* o = PyDict_GetItemString(reinterpret_cast<PyTypeObject*>(type)->tp_dict, methods[I].name);
  if (!o || Py_TYPE(o) != &PyMethodDescr_Type) return;
  auto* descriptor = reinterpret_cast<PyMethodDescrObject*>(o);
  const int flags = descriptor->d_method->ml_flags & ~(METH_COEXIST);
  if (flags != METH_NOARGS && flags != METH_O && flags != METH_VARARGS && flags != (METH_VARARGS | METH_KEYWORDS)) return;
  methods[I].real = *descriptor->d_method;
  auto* ours = new PyMethodDef(*descriptor->d_method);
  ours->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_method<I>));
  descriptor->d_method = ours;
}

}  // namespace

size_t hooks_of(const at::Tensor& t) {
  if (!torch::autograd::impl::get_autograd_meta(t)) return 0;
  size_t n = torch::autograd::impl::post_acc_grad_hooks(t) ? 1 : 0;
  const auto dicts = [&](PyObject* o) { return o && PyDict_Check(o) ? static_cast<size_t>(PyDict_GET_SIZE(o)) : 0; };
  if (const PyObject* o = t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj(); o) {
    auto* v = reinterpret_cast<const THPVariable*>(o);
    n = dicts(v->backward_hooks) + dicts(v->post_accumulate_grad_hooks);
  }
  return n;
}

void hear_of_facts() {
  PyObject* base = THPVariableClass ? reinterpret_cast<PyObject*>(reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_base) : nullptr;
  if (!base) return;
  for (auto [name, fact] : std::initializer_list<std::pair<const char*, Fact>>{{"_version", Fact::Version},
                                                                               {"_base", Fact::View},
                                                                               {"grad_fn", Fact::History},
                                                                               {"_grad_fn", Fact::History},
                                                                               {"output_nr", Fact::History},
                                                                               {"retains_grad", Fact::History},
                                                                               {"_backward_hooks", Fact::Hooks},
                                                                               {"_post_accumulate_grad_hooks", Fact::Hooks},
                                                                               {"_cdata", Fact::Other}})
    replace_attribute(base, name, fact);
  [&]<size_t... I>(std::index_sequence<I...>) { (replace_method<I>(base), ...); }(std::make_index_sequence<methods.size()>());
}

}  // namespace vitrify::python
