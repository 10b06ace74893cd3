#include "python/asked.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "torch/sym_node.h"

namespace py = pybind11;

namespace vitrify::python {
namespace {

// Modules of Python's that ask for whoever calls them: isinstance() of an abstract class, singledispatch().
constexpr std::string_view kForOthers[] = {"abc", "functools", "typing"};

bool is_in(std::string_view module, std::string_view package) {
  return module.starts_with(package) && (module.size() == package.size() || module[package.size()] == '.');
}

// Whether the code that runs now is the program's or a library's. `beside`: modules of torch's and ours through which a program comes here too.
bool asked_by_program(const std::vector<std::string>& beside = {}) {
  for (auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame())); frame;
       frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()))))) {
    const py::object name = frame.attr("f_globals").attr("get")("__name__", "");
    if (!py::isinstance<py::str>(name)) return true;
    const auto module = name.cast<std::string>();
    if (std::ranges::find(beside, module) != beside.end() || std::ranges::find(kForOthers, module) != std::end(kForOthers)) continue;
    return !is_in(module, "torch") && !is_in(module, "vitrify");
  }
  return false;
}

// Through the dictionary: an assignment to a class's __class__ changes the class of the class.
void show_class(const char* symbolic, const char* plain) {
  const py::module_ builtins = py::module_::import("builtins");
  const py::object real = py::module_::import("torch").attr(symbolic), shown = builtins.attr(plain);
  const py::object get = py::cpp_function([real, shown](py::handle self) { return is_ours(self) && asked_by_program() ? shown : real; });
  auto* type = reinterpret_cast<PyTypeObject*>(real.ptr());
  if (PyDict_SetItemString(type->tp_dict, "__class__", builtins.attr("property")(get).ptr()) != 0) throw py::error_already_set();
  PyType_Modified(type);
}

}  // namespace

bool is_ours(py::handle number) {
  const py::object node = py::getattr(number, "node", py::none());
  if (py::isinstance<c10::SymNodeImpl>(node)) return capture::is_ours(node.cast<c10::SymNode>());
  return py::hasattr(node, "step");  // _numbers.py
}

// torch's methods of sizes ask for their answer's class.
bool compared_by_program() {
  const py::object ours = py::module_::import("torch").attr("SymInt").attr("__lt__");
  return asked_by_program({ours.attr("__module__").cast<std::string>(), ours.attr("__wrapped__").attr("__module__").cast<std::string>()});
}

void show_classes_of_numbers() {
  show_class("SymInt", "int");
  show_class("SymFloat", "float");
}

}  // namespace vitrify::python
