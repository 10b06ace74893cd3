// Bindings of everything that is not the hot path.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_symnode.h>

#include <thread>

#include "pipeline/pipeline.h"
#include "python/asked.h"
#include "python/entry.h"
#include "python/errors.h"
#include "python/facts.h"
#include "support/budget.h"
#include "support/counters.h"
#include "support/eager.h"
#include "support/fault.h"
#include "support/options.h"
#include "torch/compiled.h"
#include "torch/mode.h"
#include "torch/number_hooks.h"
#include "torch/overlap.h"
#include "torch/saved_hooks.h"
#include "torch/seed_mark.h"
#include "torch/seed_seen.h"
#include "torch/tracer.h"
#include "torch/training.h"
#include "torch/versions.h"

namespace py = pybind11;

namespace vitrify::python {
namespace {

// What autograd has left in its queues after an error lives on when the interpreter has ended: nothing of Python's is let go of then.
template <class T>
void delete_with_gil(T* t) {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  delete t;
}

// One capture on this thread, and the program it recorded.
struct Session {
  std::shared_ptr<std::weak_ptr<Guards>> state = std::make_shared<std::weak_ptr<Guards>>();  // the entry holds them
  std::shared_ptr<Tracer> tracer;
  std::unique_ptr<Budget> budget;  // of the capture, on its thread
  // The tracer holds a bare pointer to the mode: they live as long as each other. It may be let go of on any thread.
  Session(py::object mode, const std::string& name, py::handle attempts, bool settles)
      : tracer(new Tracer(tracer_options(mode, name, attempts, settles, state)), [mode](Tracer* t) mutable {
          if (!Py_IsInitialized()) return static_cast<void>(mode.release());
          py::gil_scoped_acquire gil;
          delete t;
          mode = py::object();
        }) {}

  static TracerOptions tracer_options(const py::object& mode, const std::string& name, py::handle attempts, bool settles,
                                      const std::shared_ptr<std::weak_ptr<Guards>>& state) {
    TracerOptions o;
    o.refused = settles;
    if (const Attempt* a = attempts.is_none() ? nullptr : attempt_of(attempts.ptr()); a && !a->refused.empty()) {
      o.refused = true;
      o.effects = a->effects;
    }
    o.resumes = true;
    o.name = name;
    o.warn = warn;
    o.python_mode = mode.is_none() ? nullptr : mode.ptr();
    o.symbolic_number = symbolic_number;
    o.state_holds = [state] {
      py::gil_scoped_acquire gil;
      const std::shared_ptr<Guards> guards = state->lock();
      return guards && guards->check();
    };
    o.saved_tensors = saved_tensors;
    o.keeps_attributes = keeps_attributes;
    o.raised_anew = raised_anew;
    o.without_gil = without_gil;
    o.describe = describe;
    o.with_gil = [](const std::function<void()>& f) {
      py::gil_scoped_acquire gil;
      const Checkpoints ours;
      f();
    };
    return o;
  }
  // Checkpoints are ours while a derivative is taken after the capture: one that is computed again meets others that it calls.
  class Checkpoints {
   public:
    Checkpoints() : replaced_(py::module_::import("vitrify._checkpoint").attr("REPLACED")), user_(py::module_::import("builtins").attr("object")()) {
      replaced_.attr("begin")(user_);
    }
    ~Checkpoints() {
      const py::error_scope raised;
      try {
        replaced_.attr("end")(user_);
      } catch (py::error_already_set& e) {
        e.discard_as_unraisable("a checkpoint of a compiled program");
      }
    }
    Checkpoints(const Checkpoints&) = delete;

   private:
    py::object replaced_, user_;
  };
  static bool describe(const c10::OperatorHandle& op, const std::vector<c10::IValue>& args, const TracerOptions::NewSize& new_size,
                       std::vector<at::Tensor>& results) {
    py::gil_scoped_acquire gil;
    py::list positional;
    py::dict named;
    for (size_t i = 0; i < args.size(); ++i) {
      const c10::Argument& a = op.schema().arguments()[i];
      py::object value = torch::jit::toPyObject(args[i]);
      if (a.kwarg_only())
        named[py::str(a.name())] = value;
      else
        positional.append(value);
    }
    py::object made = py::module_::import("vitrify._described")
                          .attr("results")(op.schema().name(), positional, named,
                                           py::cpp_function([&](int64_t least, std::optional<int64_t> most) { return new_size(least, most); }));
    if (made.is_none()) return false;
    for (py::handle t : made) results.push_back(t.is_none() ? at::Tensor() : THPVariable_Unpack(t.ptr()));
    return true;
  }
  static void warn(const std::string& message) {
    py::gil_scoped_acquire gil;
    try {
      py::module_::import("vitrify._messages").attr("warn")(message);
    } catch (py::error_already_set& e) {  // where warnings are errors
      e.restore();
      python_error raised;
      raised.persist();
      throw raised;
    }
  }
  static void without_gil(const std::function<void()>& f) {
    try {
      py::gil_scoped_release no_gil;
      f();
    } catch (python_error& e) {  // of a backward written in Python
      e.persist();
      e.restore();
      const py::error_already_set shown;
      e.message = shown.what();
      throw;  // it may be kept and raised again, which pybind's raises once
    }
  }
  // The Python side of a node; newer torches keep it elsewhere.
  template <class N>
  static PyObject* object_of(const N& n) {
    if constexpr (requires { n.obj; })
      return n.obj;
    else
      return n.pyobj();
  }
  // The caller has seen that it is one.
  static std::vector<at::Tensor> saved_tensors(const torch::autograd::Node& n) {
    const auto* function = reinterpret_cast<const THPFunction*>(object_of(static_cast<const torch::autograd::PyNode&>(n)));
    std::vector<at::Tensor> r;
    for (const torch::autograd::SavedVariable& s : function->saved_variables)
      r.push_back(s.has_hooks() || !s.get_raw_data() ? at::Tensor() : *s.get_raw_data());
    return r;
  }
  static std::function<bool()> keeps_attributes(const torch::autograd::Node& n, bool in_call) {
    py::gil_scoped_acquire gil;
    auto function = py::reinterpret_borrow<py::object>(object_of(static_cast<const torch::autograd::PyNode&>(n)));
    auto same =
        std::shared_ptr<py::object>(new py::object(py::module_::import("vitrify._ctx").attr("kept")(function, in_call)), delete_with_gil<py::object>);
    return [same] {
      py::gil_scoped_acquire gil;
      return (*same)().cast<bool>();
    };
  }
  // An exception that is kept would hold the frames that it went through.
  static std::function<void()> raised_anew(const std::exception_ptr& error) {
    py::gil_scoped_acquire gil;
    py::object value;
    try {
      std::rethrow_exception(error);
    } catch (const python_error& e) {
      PyErr_Clear();  // the engine has left it there
      value = py::reinterpret_borrow<py::object>(e.value);
    } catch (const py::error_already_set& e) {
      value = e.value();
    } catch (...) {
    }
    if (!value) return nullptr;
    const auto anew = py::module_::import("vitrify._ctx").attr("anew");
    auto kept = std::shared_ptr<py::object>(new py::object(anew(value)), delete_with_gil<py::object>);
    return [kept] {
      py::gil_scoped_acquire gil;
      const py::object value = py::module_::import("vitrify._ctx").attr("anew")(*kept);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
      python_error raised;
      raised.persist();
      throw raised;
    };
  }
  // torch keeps the symbolic number as an attribute; the tensor's value says nothing.
  static std::optional<c10::Scalar> symbolic_number(const at::Tensor& t) {
    py::gil_scoped_acquire gil;
    auto* o = t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
    if (!o || !PyObject_HasAttrString(o, "_wrapped_number")) return std::nullopt;
    py::object n = py::reinterpret_borrow<py::object>(o).attr("_wrapped_number");
    if (torch::is_symint(n)) return c10::Scalar(n.cast<c10::SymInt>());
    if (torch::is_symfloat(n)) {
      auto f = n.cast<c10::SymFloat>();
      return capture::step_of(f) ? c10::Scalar(f) : c10::Scalar(f.guard_float(__FILE__, __LINE__));
    }
    if (torch::is_symbool(n)) return c10::Scalar(n.cast<c10::SymBool>().guard_bool(__FILE__, __LINE__));
    return std::nullopt;
  }
};

py::object to_python(const OptionValue& v) {
  return std::visit([](auto& x) -> py::object { return py::cast(x); }, v);
}

// Python's bool is an int and ints are fine where a float is expected; set_option names the option when the type is wrong.
OptionValue from_python(const std::string& name, py::handle v) {
  for (auto& o : option_table())
    if (o.name == name && o.type == "double" && PyLong_CheckExact(v.ptr())) return v.cast<double>();
  if (PyBool_Check(v.ptr())) return v.ptr() == Py_True;
  if (PyLong_Check(v.ptr())) return v.cast<int64_t>();
  if (PyFloat_Check(v.ptr())) return v.cast<double>();
  if (PyUnicode_Check(v.ptr())) return v.cast<std::string>();
  if (PyList_Check(v.ptr()) || PyTuple_Check(v.ptr()) || PyAnySet_Check(v.ptr())) {
    std::vector<std::string> list;
    for (auto item : py::reinterpret_borrow<py::object>(v)) {
      if (!PyUnicode_Check(item.ptr())) throw OptionError("option '" + name + "' takes a list of strings");
      list.push_back(item.cast<std::string>());
    }
    return list;
  }
  throw OptionError("option '" + name + "' cannot take a value of type " + Py_TYPE(v.ptr())->tp_name);
}

std::vector<Tree*> trees_of(Signature& s) {
  std::vector<Tree*> all;
  for (auto& t : s.args) all.push_back(&t);
  for (auto& [k, t] : s.kwargs) all.push_back(&t);
  return all;
}

void bind_signature(py::module_& m) {
  py::class_<Signature, std::shared_ptr<Signature>>(m, "Signature")
      .def(py::init([](py::tuple args, py::dict kwargs) { return Signature::of(args.ptr(), kwargs.ptr()); }))
      .def_property_readonly("tensors",
                             [](Signature& s) {
                               py::list l;
                               for (auto& t : s.tensors) l.append(py::reinterpret_borrow<py::object>(t.get()));
                               return l;
                             })
      .def_property_readonly("objects",
                             [](Signature& s) {
                               py::list l;
                               for (auto& t : s.objects) l.append(py::reinterpret_borrow<py::object>(t.get()));
                               return l;
                             })
      .def_property_readonly("names", [](Signature& s) { return s.names; })
      .def_property_readonly("grad", [](Signature& s) { return s.modes.grad(); })
      .def_property_readonly("refusal",
                             [](Signature& s) -> std::optional<std::string> {
                               const char* r = s.modes.refusal();
                               return r ? std::optional<std::string>(r) : std::nullopt;
                             })
      .def("same_modes", [](Signature& a, Signature& b) { return a.modes == b.modes; })
      .def("sizes",
           [](Signature& s) {
             std::vector<std::vector<int64_t>> all;
             for (auto& t : s.metas) all.emplace_back(t.sizes.begin(), t.sizes.end());
             return all;
           })
      .def("describe",
           [](Signature& s) {
             std::vector<std::string> all;
             for (size_t i = 0; i < s.metas.size(); ++i) all.push_back(s.names[i] + ": " + to_string(s.metas[i]));
             return all;
           })
      // The same structure of containers and values, whatever the tensors are.
      .def("same_tree",
           [](Signature& s, py::tuple args, py::dict kwargs) -> py::object {
             c10::SmallVector<PyObject*, 16> found;
             auto trees = trees_of(s);
             if ((size_t)py::len(args) != s.args.size() || (size_t)py::len(kwargs) != s.kwargs.size()) return py::none();
             size_t i = 0;
             for (; i < s.args.size(); ++i)
               if (!match(*trees[i], PyTuple_GET_ITEM(args.ptr(), i), nullptr, found)) return py::none();
             for (auto& [k, t] : s.kwargs) {
               PyObject* v = PyDict_GetItemWithError(kwargs.ptr(), k.get());
               if (!v || !match(t, v, nullptr, found)) return py::none();
             }
             py::list l;
             for (PyObject* t : found) l.append(py::reinterpret_borrow<py::object>(t));
             return l;
           })
      .def("rebuild", [](Signature& s, py::list leaves) {
        PyObject* const* p = ((PyListObject*)leaves.ptr())->ob_item;
        py::tuple args(s.args.size());
        for (size_t i = 0; i < s.args.size(); ++i) args[i] = py::reinterpret_steal<py::object>(checked(python::rebuild(s.args[i], p)).release());
        py::dict kwargs;
        for (auto& [k, t] : s.kwargs)
          kwargs[py::reinterpret_borrow<py::object>(k.get())] = py::reinterpret_steal<py::object>(checked(python::rebuild(t, p)).release());
        // the containers the program gets are these copies: a result may not hold them
        Flattener f;
        f.flatten(args.ptr(), "arguments");
        f.flatten(kwargs.ptr(), "arguments");
        s.containers = f.containers;
        return py::make_tuple(args, kwargs);
      });
  py::class_<Result, std::shared_ptr<Result>>(m, "Result")
      .def(py::init([](py::object value, Signature& s, py::dict known) { return Result::of(value.ptr(), s.containers, known.ptr()); }))
      .def_property_readonly("tensors",
                             [](Result& r) {
                               py::list l;
                               for (auto& t : r.tensors) l.append(py::reinterpret_borrow<py::object>(t.get()));
                               return l;
                             })
      .def("forget_tensors", [](Result& r) { r.tensors.clear(); });
}

void bind_guards(py::module_& m) {
  py::class_<Guards, std::shared_ptr<Guards>>(m, "Guards")
      .def(py::init<>())
      .def("add_attributes", [](Guards& g, py::type t, py::object keys, const std::string& n) { g.add_attributes(t.ptr(), keys.ptr(), n); })
      .def("add_dict", [](Guards& g, py::dict d, py::object keys, const std::string& n) { g.add_dict(d.ptr(), keys.ptr(), n); })
      .def("add_object", [](Guards& g, py::handle o) { g.add_object(o.ptr()); })
      .def("add_list", [](Guards& g, py::list l, const std::string& n) { g.add_list(l.ptr(), n); })
      .def("add_cell",
           [](Guards& g, py::handle c, const std::string& n) {
             if (!PyCell_Check(c.ptr())) throw py::type_error("cell expected");
             g.add_cell(c.ptr(), n);
           })
      .def("add_slot",
           [](Guards& g, py::handle o, py::handle member, const std::string& n) {
             if (Py_TYPE(member.ptr()) != &PyMemberDescr_Type) throw py::type_error("slot expected");
             g.add_slot(o.ptr(), member.ptr(), n);
           })
      .def("add_type", [](Guards& g, py::type t) { g.add_type(t.ptr()); })
      .def("add_class", [](Guards& g, py::type t) { g.add_class(t.ptr()); })
      .def("add_function",
           [](Guards& g, py::function f) {
             if (!PyFunction_Check(f.ptr())) throw py::type_error("function expected");
             g.add_function(f.ptr());
           })
      .def("add_names", [](Guards& g, py::list dicts_and_labels, py::set names) { g.add_names(dicts_and_labels.ptr(), names.ptr()); })
      .def("add_buffer", [](Guards& g, py::handle o, const std::string& n) { g.add_buffer(o.ptr(), n); })
      .def("add_equal", [](Guards& g, py::handle o, py::handle copy, const std::string& n) { g.add_equal(o.ptr(), copy.ptr(), n); })
      .def("watch", &Guards::watch)
      .def("check", &Guards::check)
      .def("undo_writes", &Guards::undo_writes);
}

// Made by vitrify/_numbers.py.
PyObject* number_class = nullptr;

void bind_numbers(py::module_& m) {
  auto n = py::class_<Numbers, std::shared_ptr<Numbers>>(m, "Numbers");
  n.def("constant", [](Numbers& n, double v) { return n.add({Numbers::Op::Constant, 0, 0, v}); })
      .def("step",
           [](Numbers& n, const std::string& op, uint32_t a, uint32_t b) {
             using Op = Numbers::Op;
             static const std::unordered_map<std::string, Op> ops = {{"add", Op::Add}, {"sub", Op::Sub}, {"mul", Op::Mul},           {"div", Op::Div},
                                                                     {"pow", Op::Pow}, {"mod", Op::Mod}, {"floordiv", Op::FloorDiv}, {"min", Op::Min},
                                                                     {"max", Op::Max}, {"neg", Op::Neg}};
             return n.add({ops.at(op), a, b});
           })
      .def("traced", [](Numbers& n, uint32_t step) { return n.steps[step].traced; })
      .def("compare", [](Numbers& n, const std::string& how, uint32_t a, uint32_t b) {
        using C = Numbers::Compare;
        static const std::unordered_map<std::string, C> all = {{"eq", C::Eq}, {"ne", C::Ne}, {"lt", C::Lt}, {"le", C::Le}};
        return n.compare(all.at(how), a, b);
      });
  // Also where torch turns the exception into another one.
  m.def("refuse", [](const std::string& why) {
    if (Tracer* t = Tracer::current()) t->note_failure(why);
    throw CaptureError(why);
  });
  m.def("is_ours", is_ours);
  m.def("set_number_class", [](py::object c) { Py_XSETREF(number_class, c.release().ptr()); });
  capture::NumberHooks hooks;
  hooks.wrap = [](const std::shared_ptr<Numbers>& n, uint32_t step) {
    py::gil_scoped_acquire gil;
    return py::reinterpret_borrow<py::object>(number_class)(n, step).cast<c10::SymFloat>();
  };
  hooks.step_of = [](const c10::SymFloat& f) -> std::optional<uint32_t> {
    py::gil_scoped_acquire gil;
    auto* node = dynamic_cast<torch::impl::PythonSymNodeImpl*>(f.toSymNodeImplUnowned());
    if (!node || !py::hasattr(node->getPyObj(), "step")) return std::nullopt;
    return node->getPyObj().attr("step").cast<uint32_t>();
  };
  hooks.compared_by_program = compared_by_program;
  capture::set_number_hooks(hooks);
  show_classes_of_numbers();
}

void bind_capture(py::module_& m) {
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def_property_readonly("graph", [](Program& p) { return ir::print(*p.graph); })
      .def_property_readonly("mutates", [](Program& p) { return p.mutations.size(); })
      .def_property_readonly("num_nodes", [](Program& p) { return p.graph->nodes().size(); });
  py::class_<JointProgram, std::shared_ptr<JointProgram>>(m, "JointProgram")
      .def_property_readonly("needs_grad", [](JointProgram& j) { return !j.roots.empty(); })
      .def_property_readonly("graph", [](JointProgram& j) { return ir::print(*j.program.graph); })
      .def_property_readonly("program", [](JointProgram& j) { return std::make_shared<Program>(j.program); });
  py::class_<CaptureTurn>(m, "CaptureTurn")
      .def(py::init())
      .def("__enter__",
           [](CaptureTurn& turn) {
             py::gil_scoped_release others;
             turn.take();
           })
      .def("__exit__", [](CaptureTurn& turn, const py::args&) { turn.give_back(); });
  py::class_<Session>(m, "Session")
      .def(py::init<py::object, std::string, py::handle, bool>(), py::arg("mode"), py::arg("name"), py::arg("state") = py::none(),
           py::arg("settles") = false)
      .def("add_input",
           [](Session& s, py::handle real, int kind, const std::string& name, const std::vector<std::tuple<bool, int64_t, int64_t>>& marks) {
             const at::Tensor& t = THPVariable_Unpack(real.ptr());
             std::vector<DimMark> dims;
             for (auto& [dynamic, lo, hi] : marks) dims.push_back({dynamic, lo, hi});
             at::Tensor fake = s.tracer->add_input(t, (ir::InputKind)kind, name, dims);
             // the program may ask isinstance(x, Parameter)
             bool fresh = (PyObject*)Py_TYPE(real.ptr()) == ParameterClass && !fake.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
             return py::reinterpret_steal<py::object>(
                 checked(fresh ? THPVariable_Wrap(fake, (PyTypeObject*)ParameterClass) : THPVariable_Wrap(fake)).release());
           })
      .def("declare_source",
           [](Session& s, const at::Tensor& t, int kind, const std::string& name) { s.tracer->declare_source(t, (ir::InputKind)kind, name); })
      .def("declare_grad", [](Session& s, const at::Tensor& of, const at::Tensor& grad) { s.tracer->declare_grad(of, grad); })
      .def("live_number", [](Session& s, uint32_t index, double now) { return py::cast(s.tracer->live_number(index, now)); })
      .def("note_grad",
           [](Session& s, const at::Tensor& of, std::optional<at::Tensor> grad) { s.tracer->note_grad(of, grad.value_or(at::Tensor())); })
      .def("declare_state", [](Session& s, const std::shared_ptr<Guards>& g) { *s.state = g; })
      .def("declare_generator", [](Session& s, const at::Generator& g) { s.tracer->declare_generator(g); })
      .def("start",
           [](Session& s, double budget) {
             s.budget = std::make_unique<Budget>(budget, false);
             s.tracer->start();
           })
      .def("finish",
           [](Session& s, py::list tensors) {
             const auto budget = std::move(s.budget);
             std::vector<at::Tensor> out;
             for (auto t : tensors) out.push_back(THPVariable_Unpack(t.ptr()));
             auto p = std::make_shared<Program>(s.tracer->finish(out));
             complete(*p, s.tracer->declared_generators());
             return p;
           })
      .def("makes_gradients",
           [](Session& s, py::list tensors) {
             std::vector<at::Tensor> out;
             for (auto t : tensors) out.push_back(THPVariable_Unpack(t.ptr()));
             return s.tracer->makes_gradients(out);
           })
      // With gradients where they are needed; "needs_grad" says whether they are.
      .def("finish_joint",
           [](Session& s, py::list tensors) {
             const auto budget = std::move(s.budget);
             std::vector<at::Tensor> out;
             for (auto t : tensors) out.push_back(THPVariable_Unpack(t.ptr()));
             auto p = std::make_shared<JointProgram>(s.tracer->finish_joint(out));
             complete(p->program, s.tracer->declared_generators());
             if (p->program.inference && !p->roots.empty())
               throw CaptureError("returns what gradients come back through, of another inference mode than the call's");
             return p;
           })
      .def_property_readonly("failure", [](Session& s) { return s.tracer->failure(); })
      .def_property_readonly("takes_other_sizes", [](Session& s) { return s.tracer->takes_other_sizes(); })
      .def("abort", [](Session& s) {
        s.budget.reset();
        s.tracer->abort();
      });
  py::class_<CompiledGraph, std::shared_ptr<CompiledGraph>>(m, "Graph")
      .def("describe", &CompiledGraph::describe)
      .def_property_readonly("estimated_us", &CompiledGraph::estimated_us)
      .def_property_readonly("stats", [](CompiledGraph& g) {
        auto s = g.stats();
        return py::dict(py::arg("kernels") = s.kernels, py::arg("launches") = s.launches, py::arg("externs") = s.externs,
                        py::arg("arena_bytes") = s.arena_bytes, py::arg("kept_bytes") = s.kept_bytes);
      });
  m.def("compile", [](Program& p, const Options& o) {
    Program copy = p;  // the door keeps its own for the reproducer
    py::gil_scoped_release no_gil;
    Budget budget(o.compile_budget_s);
    return CompiledGraph::compile(std::move(copy), o);
  });
  m.def("compile_training", [](JointProgram& p, Session& s, const Options& o) {
    JointProgram copy = p;
    py::gil_scoped_release no_gil;
    Budget budget(o.compile_budget_s);
    return compile_training(std::move(copy), s.tracer, o);
  });
  m.def("replay", [](const std::string& text, const Options& o) {
    auto plan = pipeline::compile(std::make_shared<ir::Graph>(ir::parse(text)), o);
    return fmt::format("compiled: {} launches, {} externs", plan->launches.size(), plan->externs.size());
  });
  m.def("interpret", [](const std::string& text, const std::vector<at::Tensor>& inputs) { return interpret(ir::parse(text), inputs); });
  m.def("note_saved", [](const std::vector<at::Tensor>& args) { Tracer::current()->note_saved(args); });
  m.def("note_cached", [](uintptr_t which, uint64_t first) { Tracer::current()->note_cached(which, first); });
  m.def("note_taken", [](uintptr_t which) { Tracer::current()->note_taken(which); });
  m.def(
      "random_state",
      [](std::optional<at::Generator> of) {  // that generator's, or the process's, without the capture's hearing of it
        at::Generator g = of ? *of : at::detail::getDefaultCPUGenerator();
        std::lock_guard<std::mutex> lock(g.mutex());
        const at::Tensor state = g.get_state();
        return py::bytes(static_cast<const char*>(state.const_data_ptr()), state.nbytes());
      },
      py::arg("of") = py::none());
  m.def("takes_gradients", [] { return Tracer::current() && Tracer::current()->takes_gradients(); });
  m.def("address", [](const at::Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); });  // data_ptr() is taken for a write
  m.def("hooks_of", &hooks_of);
  m.def("grad_of",
        [](const at::Tensor& t) { return grad_of(t.unsafeGetTensorImpl()).defined() ? py::cast(grad_of(t.unsafeGetTensorImpl())) : py::none(); });
  m.def("version_of", &version_of);
  m.def("writes_one_memory_twice",
        [](const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read) { return writes_one_memory_twice(written, read); });
  m.def("is_fake", [](const at::Tensor& t) { return Tracer::is_fake(t); });
  m.def("capturing", [] { return Tracer::current() != nullptr; });
}

// Ctrl-C while a compile goes on: Python runs signal handlers on its main thread only, when it is asked to.
void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() < 0) throw py::error_already_set();
}

void bind_options(py::module_& m) {
  m.def("environment_flag", [](const std::string& variable) { return environment_flag(variable.c_str()); });
  py::class_<Options>(m, "Options")
      .def(py::init([] { return Options::from_environment(); }))
      .def("set", [](Options& o, const std::string& name, py::object v) { set_option(o, name, from_python(name, v)); })
      .def("get", [](const Options& o, const std::string& name) { return to_python(get_option(o, name)); });
  m.def("option_table", [] {
    py::list rows;
    for (auto& o : option_table()) rows.append(py::make_tuple(o.name, o.type, o.default_text, o.in_key, o.help));
    return rows;
  });
  m.def("counters", [] {
    py::dict d;
    for (auto& [k, v] : counters().snapshot()) d[py::str(k)] = v;
    return d;
  });
  m.def("lifetime_counters", [] {
    py::dict d;
    for (auto& [k, v] : lifetime_counters()) d[py::str(k)] = v;
    return d;
  });
  m.def("plant_fault", &plant_fault);
  m.def("note_eager", [](const std::string& why) { note_eager(why); });
  m.def("eager_reasons", [] {
    py::dict d;
    for (auto& [k, n] : eager_reasons()) d[py::str(k)] = n;
    return d;
  });
  m.def("reset_counters", [] {
    counters().reset();
    reset_stage_times();
  });
  m.def("count", [](const std::string& what) {
#define _(n) \
  if (what == #n) return (void)counters().n.fetch_add(1, std::memory_order_relaxed);
    VT_COUNTERS(_)
#undef _
    throw py::key_error(what);
  });
  m.def("stage_times", [] {
    py::dict d;
    for (auto& [k, us] : stage_times()) d[py::str(k)] = us;
    return d;
  });
  m.def("add_stage_time", &add_stage_time);
}

void bind_states(py::module_& m) {
  py::handle state((PyObject*)state_type());
  m.attr("State") = state;
  auto get = [](py::handle h) -> State& {
    if (Py_TYPE(h.ptr()) != state_type()) throw py::type_error("State expected");
    return state_of(h.ptr());
  };
  m.def("make_state", [](py::object original, py::object miss) {
    return py::reinterpret_steal<py::object>(checked(make_state(original.ptr(), miss.ptr())).release());
  });
  m.def("state_call", [get](py::handle h, py::tuple args, py::dict kwargs) -> py::object {
    get(h);
    bool hit = false;
    PyObject* r = call_entries(h.ptr(), args.ptr(), kwargs.ptr(), hit);
    if (!hit) return py::none();
    if (!r) throw py::error_already_set();
    return py::make_tuple(py::reinterpret_steal<py::object>(r));
  });
  m.def("state_has", [get](py::handle h, py::tuple args, py::dict kwargs) {
    get(h);
    return has_entry(h.ptr(), args.ptr(), kwargs.ptr());
  });
  // Why a plan has refused the call under way.
  m.def("state_refused", [get](py::handle h) -> py::object {
    get(h);
    const Attempt* a = attempt_of(h.ptr());
    return a && !a->refused.empty() ? py::object(py::str(a->why)) : py::object(py::none());
  });
  // The call under way, eagerly: what its custom ops have given they give again.
  m.def("state_call_eagerly", [get](py::handle h, py::tuple args, py::dict kwargs) {
    get(h);
    PyObject* r = call_eagerly(h.ptr(), args.ptr(), kwargs.ptr());
    if (!r) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(r);
  });
  m.def("state_settle", [get](py::handle h) {
    get(h);
    settle(h.ptr());
  });
  m.def("state_clear", [get](py::handle h) {
    auto dead = std::move(get(h).entries);
    get(h).entries.clear();
  });
  // What is compiled of a tensor is let go of.
  m.def("state_set_here", [](const at::Generator& g) { return state_set_here(g); });
  m.def("state_forget", [get](py::handle h, py::handle t) {
    const at::TensorImpl* impl = THPVariable_Unpack(t.ptr()).unsafeGetTensorImpl();
    std::vector<std::shared_ptr<Entry>> gone;
    for (auto& e : get(h).entries)
      if (e->holds(impl)) gone.push_back(e);
    std::erase_if(get(h).entries, [&](auto& e) { return std::ranges::find(gone, e) != gone.end(); });
    for (auto& e : gone)
      if (e->graph && e.use_count() == 1) e->graph->let_go();  // else a call runs it
  });
  m.def("state_off", [get](py::handle h, bool off) { get(h).off = off; });
  m.def("state_set_original", [get](py::handle h, py::object f) { get(h).original = Ref::borrow(f.ptr()); });
  // (compiled?, signature) of each live entry; entries that can never match again are dropped
  m.def("state_entries", [get](py::handle h) {
    State& s = get(h);
    std::vector<std::shared_ptr<Entry>> dead;
    for (auto& e : s.entries)
      if (e->dead()) dead.push_back(e);
    std::erase_if(s.entries, [&](auto& e) { return std::find(dead.begin(), dead.end(), e) != dead.end(); });
    py::list l;
    for (auto& e : s.entries) l.append(py::make_tuple(e->graph, e->signature));
    return l;
  });
  m.def("state_add", [get](py::handle h, std::shared_ptr<Signature> s, std::shared_ptr<Guards> g, std::shared_ptr<CompiledGraph> graph,
                           std::shared_ptr<Result> result, const std::vector<at::Tensor>& grads,
                           const std::vector<std::tuple<py::object, py::object, int64_t>>& floats, const std::vector<at::Tensor>& reached) {
    std::vector<Live::Float> live;
    for (auto& [dict, key, index] : floats) live.push_back({Ref::borrow(dict.ptr()), Ref::borrow(key.ptr()), index});
    auto e = Entry::make(std::move(s), std::move(g), std::move(graph), std::move(result), grads, std::move(live), reached);
    if (Attempt* attempt = attempt_of(h.ptr()); attempt && !attempt->refused.empty()) attempt->captured = true;
    auto& entries = get(h).entries;
    entries.insert(entries.begin(), std::move(e));
  });
  m.def("install", [get](py::function f, py::handle h) {
    get(h);
    if (!PyFunction_Check(f.ptr())) throw py::type_error("function expected");
    install(f.ptr(), h.ptr());
  });
  auto or_none = [](PyObject* p) { return p ? py::reinterpret_borrow<py::object>(p) : py::none(); };
  m.def("installed_state", [or_none](py::handle f) { return or_none(installed_state(f.ptr())); });
  m.def("arm_twin_type", [](py::type t, py::type base, py::object hook) { arm_twin_type(t.ptr(), base.ptr(), hook.ptr()); });
  m.def("link_twin", [](py::handle t, py::handle o, py::handle s) { link_twin(t.ptr(), o.ptr(), s.ptr()); });
  m.def("unlink_twin", [](py::handle t) { unlink_twin(t.ptr()); });
  m.def("twin_original", [or_none](py::handle t) { return or_none(twin_original(t.ptr())); });
  m.def("twin_state", [or_none](py::handle t) { return or_none(twin_state(t.ptr())); });
  m.def("twin_call_descriptor", [] { return py::reinterpret_steal<py::object>(checked(twin_call_descriptor()).release()); });
  m.def("set_flatten_hook", [](py::object hook) { set_flatten_hook(hook.ptr()); });
}

}  // namespace
}  // namespace vitrify::python

PYBIND11_MODULE(_C, m) {
  using namespace vitrify::python;
  register_errors(m.ptr());
  vitrify::use_python_interpreter(getPyInterpreter());
  vitrify::pipeline::has_code_pages(reinterpret_cast<const void*>(&PyInit__C));
  py::register_exception_translator([](std::exception_ptr p) {
    if (p) set_python_error(p);
  });
  vitrify::set_interrupt_check(check_signals);
  vitrify::set_interrupt_test(is_interrupt);
  bind_options(m);
  bind_signature(m);
  bind_guards(m);
  vitrify::ask_saved_hooks(&python_hooks_may_change, &python_hooks_compute_again);
  bind_numbers(m);
  bind_capture(m);
  bind_states(m);
  hear_of_facts();
}
