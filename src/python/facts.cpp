#include "python/facts.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/python_symnode.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <utility>

#include "python/errors.h"
#include "python/ref.h"
#include "torch/compat.h"
#include "torch/fake.h"
#include "torch/seed_seen.h"
#include "torch/tracer.h"
#include "torch/unreadable.h"

namespace vitrify::python {

using torch::autograd::Edge;

namespace {

// note(tracer, tensor), while one is captured. False: a Python error is set.
template <class Note>
bool noted_by(PyObject* self, Note note) {
  Tracer* t = Tracer::current();
  if (!t || !THPVariable_Check(self)) return true;
  HANDLE_TH_ERRORS  // of what set_python_error() does not know
      try {
    note(*t, THPVariable_Unpack(self));
    return true;
  } catch (...) {
    set_python_error(std::current_exception());
    return false;
  }
  END_HANDLE_TH_ERRORS_RET(false)
}

bool noted(PyObject* self, Fact fact, const char* name) {
  return noted_by(self, [&](Tracer& t, const at::Tensor& of) { t.note_fact(of, fact, name); });
}

// `value`: as it was given; null: True. What is no bool torch refuses.
bool noted_requires_grad(PyObject* self, PyObject* value) {
  if (value && !PyBool_Check(value)) return true;
  return noted_by(self, [&](Tracer& t, const at::Tensor& of) { t.note_requires_grad(of, value != Py_False); });
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
  return a.fact != Fact::Other || noted(self, a.fact, a.real.name) ? a.real.set(self, value, a.real.closure) : -1;
}

// What a backward of the user's reads of .grad, or sets, is of each backward's own time. What it has made itself it may ask.
bool noted_grad(PyObject* self) {
  Tracer* t = Tracer::current();
  if (!t || !t->takes_gradients() || !THPVariable_Check(self)) return true;
  if (const capture::FakeImpl* f = capture::as_fake(THPVariable_Unpack(self)); f && f->view->round) return true;
  constexpr const char* kWhy = "reads or sets the .grad of a tensor in a backward of its own";
  t->note_failure(kWhy);
  set_python_error(std::make_exception_ptr(CaptureError(kWhy)));
  return false;
}
PyObject* read_grad(PyObject* self, void* closure) {
  const auto& real = *static_cast<const PyGetSetDef*>(closure);
  return noted_grad(self) ? real.get(self, real.closure) : nullptr;
}
int write_grad(PyObject* self, PyObject* value, void* closure) {
  const auto& real = *static_cast<const PyGetSetDef*>(closure);
  return noted_grad(self) ? real.set(self, value, real.closure) : -1;
}

PyObject* with_keywords(const PyMethodDef& method, PyObject* self, PyObject* args, PyObject* kwargs) {
  return reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void*>(method.ml_meth))(self, args, kwargs);
}

PyObject* read_requires_grad(PyObject* self, void* closure) {
  const auto& real = *static_cast<const PyGetSetDef*>(closure);
  return real.get(self, real.closure);
}
int write_requires_grad(PyObject* self, PyObject* value, void* closure) {
  const auto& real = *static_cast<const PyGetSetDef*>(closure);
  return noted_requires_grad(self, value) ? real.set(self, value, real.closure) : -1;
}

PyMethodDef requires_grad;
PyObject* call_requires_grad(PyObject* self, PyObject* args, PyObject* kwargs) {
  PyObject* value = PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, 0) : kwargs ? PyDict_GetItemString(kwargs, "requires_grad") : nullptr;
  return noted_requires_grad(self, value) ? with_keywords(requires_grad, self, args, kwargs) : nullptr;
}

struct Method {
  const char* name;
  Fact fact;
  PyMethodDef real = {};
};
std::array methods{Method{"untyped_storage", Fact::Memory}, Method{"storage_offset", Fact::Offset}, Method{"_is_view", Fact::View},
                   Method{"data_ptr", Fact::Address},       Method{"numpy", Fact::Address},         Method{"tolist", Fact::Address},
                   Method{"apply_", Fact::Address},         Method{"map_", Fact::Address},          Method{"map2_", Fact::Address},
                   Method{"_use_count", Fact::Other},       Method{"retain_grad", Fact::History}};

// The function of a method gets nothing that says which it is: each has one of its own.
template <size_t I>
PyObject* call_method(PyObject* self, PyObject* args, PyObject* kwargs) {
  const Method& m = methods[I];
  if (!noted(self, m.fact, m.name)) return nullptr;
  if (m.real.ml_flags & METH_KEYWORDS) return with_keywords(m.real, self, args, kwargs);
  return m.real.ml_meth(self, args);
}

// Descriptors are objects; what they point to may be memory that nobody can write. Ours are given the real one as their closure; null: there is none.
PyGetSetDef* replace_getset(PyObject* type, const char* name, getter get, setter set) {
  PyObject* o = PyDict_GetItemString(reinterpret_cast<PyTypeObject*>(type)->tp_dict, name);
  if (!o || Py_TYPE(o) != &PyGetSetDescr_Type) return nullptr;
  auto* descriptor = reinterpret_cast<PyGetSetDescrObject*>(o);
  auto* ours = new PyGetSetDef(*descriptor->d_getset);
  ours->closure = new PyGetSetDef(*descriptor->d_getset);
  ours->get = get;
  if (ours->set && set) ours->set = set;
  return descriptor->d_getset = ours;
}
void replace_attribute(PyObject* type, const char* name, Fact fact) {
  PyGetSetDef* ours = replace_getset(type, name, read_attribute, write_attribute);
  if (!ours) return;
  const std::unique_ptr<PyGetSetDef> real(static_cast<PyGetSetDef*>(ours->closure));
  ours->closure = new Attribute{*real, fact};
}
// What does what the descriptor does; its function is `ours`.
bool replace_function(PyObject* type, const char* name, PyCFunction ours, PyMethodDef& real) {
  PyObject* o = PyDict_GetItemString(reinterpret_cast<PyTypeObject*>(type)->tp_dict, name);
  if (!o || Py_TYPE(o) != &PyMethodDescr_Type) return false;
  auto* descriptor = reinterpret_cast<PyMethodDescrObject*>(o);
  const int flags = descriptor->d_method->ml_flags & ~(METH_COEXIST);
  if (flags != METH_NOARGS && flags != METH_O && flags != METH_VARARGS && flags != (METH_VARARGS | METH_KEYWORDS)) return false;
  real = *descriptor->d_method;
  auto* def = new PyMethodDef(real);
  def->ml_meth = ours;
  descriptor->d_method = def;
  return true;
}
template <size_t I>
void replace_method(PyObject* type) {
  replace_function(type, methods[I].name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_method<I>)), methods[I].real);
}

// --- gradients that a program takes itself

PyMethodDef run_backward = {};

// Of a tensor, or of torch.autograd.graph.GradientEdge.
Edge edge_of(PyObject* o) {
  if (THPVariable_Check(o)) {
    const at::Tensor& t = THPVariable_Unpack(o);
    return t.requires_grad() ? torch::autograd::impl::gradient_edge(t) : Edge();
  }
  if (!PyTuple_Check(o) || PyTuple_GET_SIZE(o) < 2) return {};
  PyObject* node = PyTuple_GET_ITEM(o, 0);
  const long input = PyLong_AsLong(PyTuple_GET_ITEM(o, 1));
  PyErr_Clear();
  if (THPFunction_Check(node)) return {compat::lock(reinterpret_cast<THPFunction*>(node)->cdata), static_cast<uint32_t>(input)};
  if (torch::autograd::THPCppFunction_Check(node))
    return {reinterpret_cast<torch::autograd::THPCppFunction*>(node)->cdata, static_cast<uint32_t>(input)};
  return {};
}

PyObject* call_run_backward(PyObject* self, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  if (Tracer* t = Tracer::current()) {
    const auto any = [&](Py_ssize_t i, const char* name) {
      return i < PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, i) : kwargs ? PyDict_GetItemString(kwargs, name) : nullptr;
    };
    const auto argument = [&](Py_ssize_t i, const char* name) {
      PyObject* o = any(i, name);
      return o && PyTuple_Check(o) ? o : nullptr;
    };
    std::vector<Edge> of, to_edges;
    std::vector<at::Tensor> to;
    if (PyObject* o = argument(0, "tensors"))
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i) of.push_back(edge_of(PyTuple_GET_ITEM(o, i)));
    if (PyObject* o = argument(4, "inputs"))
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i) {
        PyObject* one = PyTuple_GET_ITEM(o, i);
        if (THPVariable_Check(one))
          to.push_back(THPVariable_Unpack(one));
        else if (Edge e = edge_of(one); e.function)
          to_edges.push_back(std::move(e));
      }
    PyObject* accumulates = any(6, "accumulate_grad");
    try {
      if (accumulates && PyObject_IsTrue(accumulates) == 1 &&
          std::ranges::any_of(to, [](const at::Tensor& o) { return !Tracer::is_fake(o) && o.requires_grad() && !o.is_leaf(); })) {
        t->note_failure("a backward of its own goes through the node of what it finds");  // eager's, which would be freed
        throw CaptureError(*t->failure());
      }
      t->note_gradients(of, to, to_edges);
    } catch (...) {
      set_python_error(std::current_exception());
      return nullptr;
    }
  }
  return with_keywords(run_backward, self, args, kwargs);
  END_HANDLE_TH_ERRORS
}

// --- hooks on nodes, those of eager's among them: the call that runs eagerly registers them

enum Registers : size_t { Hook, Prehook };
template <size_t>
std::array<PyMethodDef, 2> node_methods;  // of nodes of C++ code, and of Python code

template <size_t Python, Registers I>
PyObject* call_register(PyObject* self, PyObject* hook) {
  if (Tracer* t = Tracer::current()) {
    constexpr const char* kWhy = "it registers a gradient hook on a node of autograd's graph";
    t->note_failure(kWhy);
    set_python_error(std::make_exception_ptr(CaptureError(kWhy)));
    return nullptr;
  }
  return node_methods<Python>[I].ml_meth(self, hook);
}

// Of the type that torch shows nodes by which it does not know.
struct Unnamed final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
};

template <size_t Python>
void hear_of_hooks(PyObject* type) {
  replace_function(type, "register_hook", &call_register<Python, Hook>, node_methods<Python>[Hook]);
  replace_function(type, "register_prehook", &call_register<Python, Prehook>, node_methods<Python>[Prehook]);
}

// --- what a backward of the user's takes of what it has saved

PyObject* read_saved(PyObject* self, void* closure) {
  const auto& real = *static_cast<const PyGetSetDef*>(closure);
  if (Tracer* t = Tracer::current())
    if (const auto node = compat::lock(reinterpret_cast<THPFunction*>(self)->cdata)) t->note_unpacked(*node);
  return real.get(self, real.closure);
}

// --- generators: captures mark their seeds (torch/seed_mark.h)

struct GeneratorMethod {
  const char* name;
  enum { Seed, State, Sets } does;
  PyMethodDef real = {};
};
std::array generator_methods{GeneratorMethod{"initial_seed", GeneratorMethod::Seed}, GeneratorMethod{"__reduce__", GeneratorMethod::Seed},
                             GeneratorMethod{"get_state", GeneratorMethod::State},   GeneratorMethod{"manual_seed", GeneratorMethod::Sets},
                             GeneratorMethod{"seed", GeneratorMethod::Sets},         GeneratorMethod{"set_state", GeneratorMethod::Sets},
                             GeneratorMethod{"__setstate__", GeneratorMethod::Sets}};

template <size_t I>
PyObject* call_generator(PyObject* self, PyObject* args) {
  const GeneratorMethod& m = generator_methods[I];
  const at::Generator& g = reinterpret_cast<THPGenerator*>(self)->cdata;
  Tracer* t = Tracer::current();
  HANDLE_TH_ERRORS
  if (!t && g.device().is_cpu()) {
    if (m.does == GeneratorMethod::State) return THPVariable_Wrap(state_seen(g));
    if (m.does == GeneratorMethod::Seed && m.real.ml_name == std::string_view("initial_seed")) return PyLong_FromUnsignedLongLong(seed_seen(g));
  }
  if (t && m.does == GeneratorMethod::Sets) note_state_set(g);
  if (t && m.does == GeneratorMethod::Seed && is_marked(g)) {
    constexpr const char* kWhy = "it reads the seed of the process's random generator";
    t->note_failure(kWhy);
    set_python_error(std::make_exception_ptr(CaptureError(kWhy)));
    return nullptr;
  }
  return m.real.ml_meth(self, args);
  END_HANDLE_TH_ERRORS
}

// --- tensors made of Python's numbers beside a placeholder, whose key torch's constructors do not know

PyMethodDef new_tensor = {}, new_of_old = {};

// Of one whose bits make them raise it is theirs to say so.
bool is_placeholder(PyObject* self) {
  if (!Tracer::current() || !THPVariable_Check(self)) return false;
  const at::Tensor& t = THPVariable_Unpack(self);
  return Tracer::is_fake(t) && !t.is_conj() && !t.is_neg();
}

bool has_only(PyObject* kwargs, std::initializer_list<std::string_view> names) {
  Py_ssize_t at = 0;
  PyObject *key, *value;
  while (kwargs && PyDict_Next(kwargs, &at, &key, &value))
    if (std::ranges::find(names, std::string_view(PyUnicode_AsUTF8(key))) == names.end()) return false;
  return true;
}

PyObject* call_new_tensor(PyObject* self, PyObject* args, PyObject* kwargs) {
  if (!is_placeholder(self) || PyTuple_GET_SIZE(args) != 1 || !has_only(kwargs, {"dtype", "device", "requires_grad"}))
    return with_keywords(new_tensor, self, args, kwargs);
  const Ref torch = Ref::steal(PyImport_ImportModule("torch"));
  const Ref tensor = Ref::steal(torch ? PyObject_GetAttrString(torch.get(), "tensor") : nullptr);
  const Ref given = Ref::steal(kwargs ? PyDict_Copy(kwargs) : PyDict_New());
  if (!tensor || !given) return nullptr;
  for (const char* name : {"dtype", "device"}) {
    if (PyObject* o = PyDict_GetItemString(given.get(), name); o && o != Py_None) continue;
    const Ref own = Ref::steal(PyObject_GetAttrString(self, name));
    if (!own || PyDict_SetItemString(given.get(), name, own.get()) != 0) return nullptr;
  }
  return PyObject_Call(tensor.get(), args, given.get());
}

PyObject* call_new(PyObject* self, PyObject* args, PyObject* kwargs) {
  if (!is_placeholder(self)) return with_keywords(new_of_old, self, args, kwargs);
  const Py_ssize_t n = PyTuple_GET_SIZE(args);
  PyObject* first = n ? PyTuple_GET_ITEM(args, 0) : nullptr;
  if (n == 1 && !kwargs && (PyList_Check(first) || PyTuple_CheckExact(first))) return call_new_tensor(self, args, nullptr);
  if (n && !kwargs && (PyLong_Check(first) || torch::is_symint(first) || THPSize_Check(first))) {
    const Ref empty = Ref::steal(PyObject_GetAttrString(self, "new_empty"));
    return empty ? PyObject_Call(empty.get(), args, nullptr) : nullptr;
  }
  constexpr const char* kWhy = "it calls Tensor.new() with something else than sizes or numbers";
  Tracer::current()->note_failure(kWhy);
  set_python_error(std::make_exception_ptr(CaptureError(kWhy)));
  return nullptr;
}

// --- exceptions

// Whoever asks for the data of a placeholder meets an exception that eager does not raise. A program may catch it: the capture hears of it where it
// is made, whatever function of torch's, or of a library's, has asked.
newfunc make_error = nullptr;

PyObject* new_error(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (Tracer* t = Tracer::current(); t && PyTuple_GET_SIZE(args) == 1 && PyUnicode_Check(PyTuple_GET_ITEM(args, 0))) {
    Py_ssize_t n = 0;
    const char* says = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(args, 0), &n);
    if (!says)
      PyErr_Clear();
    else if (capture::reads_placeholder({says, static_cast<size_t>(n)}))
      t->note_failure("it looks into the memory of a tensor, as tolist() does, where its data cannot be read");
  }
  return make_error(type, args, kwargs);
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
  if (const auto node = torch::autograd::impl::try_get_grad_accumulator(t)) n += node->pre_hooks().size() + node->post_hooks().size();
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
                                                                               {"grad_dtype", Fact::Other},
                                                                               {"_cdata", Fact::Other}})
    replace_attribute(base, name, fact);
  for (const char* name : {"grad", "_grad"}) replace_getset(base, name, read_grad, write_grad);
  [&]<size_t... I>(std::index_sequence<I...>) { (replace_method<I>(base), ...); }(std::make_index_sequence<methods.size()>());
  const auto as_method = [](auto* function) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)); };
  replace_getset(base, "requires_grad", read_requires_grad, write_requires_grad);
  replace_function(base, "requires_grad_", as_method(&call_requires_grad), requires_grad);
  replace_function(base, "new_tensor", as_method(&call_new_tensor), new_tensor);
  replace_function(base, "new", as_method(&call_new), new_of_old);
  if (THPGeneratorClass)
    [&]<size_t... I>(std::index_sequence<I...>) {
      (replace_function(THPGeneratorClass, generator_methods[I].name, &call_generator<I>, generator_methods[I].real), ...);
    }(std::make_index_sequence<generator_methods.size()>());
  if (const Ref torch_c = Ref::steal(PyImport_ImportModule("torch._C"))) {
    if (const Ref function = Ref::steal(PyObject_GetAttrString(torch_c.get(), "_FunctionBase"))) {
      for (const char* name : {"saved_tensors", "saved_variables"}) replace_getset(function.get(), name, read_saved, nullptr);
      hear_of_hooks<1>(function.get());
    }
    if (const Ref nodes = Ref::steal(PyObject_GetAttrString(torch_c.get(), "_functions"))) {
      PyObject *name, *type;
      for (Py_ssize_t at = 0; PyDict_Next(PyModule_GetDict(nodes.get()), &at, &name, &type);)
        if (PyType_Check(type)) hear_of_hooks<0>(type);
    }
    if (const Ref unnamed = Ref::steal(torch::autograd::functionToPyObject(compat::make_node<Unnamed>())))
      hear_of_hooks<0>(reinterpret_cast<PyObject*>(Py_TYPE(unnamed.get())));
    if (const Ref engine = Ref::steal(PyObject_GetAttrString(torch_c.get(), "_ImperativeEngine")))
      replace_function(engine.get(), "run_backward", as_method(&call_run_backward), run_backward);
  }
  auto* error = reinterpret_cast<PyTypeObject*>(PyExc_RuntimeError);
  if (!make_error) make_error = std::exchange(error->tp_new, new_error);
}

}  // namespace vitrify::python
