#include "python/errors.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "support/error.h"

namespace vitrify::python {

static ErrorTypes types{};
const ErrorTypes& error_types() { return types; }

void register_errors(PyObject* module) {
  auto make = [&](const char* name, const char* doc, PyObject* base) {
    std::string qualified = std::string("vitrify.") + name;
    PyObject* t = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, base, nullptr);
    PyModule_AddObjectRef(module, name, t);
    return t;
  };
  types.error = make("Error", "Base of what Vitrify raises.", PyExc_RuntimeError);
  types.option = make("OptionError", "An unknown option or mode, or a value of the wrong type.", types.error);
  types.capture = make("CaptureError", "The program cannot be captured (raised under fullgraph=True).", types.error);
  types.recompile = make("RecompileError", "A new signature would have been compiled under error_on_recompile.", types.error);
  types.compiler = make("CompilerError", "A bug of the compiler; .reproducer is the file that replays it.", types.error);
  types.warning = make("VitrifyWarning", "Why a call runs eagerly.", PyExc_UserWarning);
}

void forget_error() {
  const bool interrupt = PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
  PyErr_Clear();
  if (interrupt) PyErr_SetInterrupt();
}

bool is_interrupt(const std::exception& e) {
  const auto no_failure = [](PyObject* type) { return type && !PyErr_GivenExceptionMatches(type, PyExc_Exception); };
  if (auto* raised = dynamic_cast<const pybind11::error_already_set*>(&e)) {
    pybind11::gil_scoped_acquire gil;
    return no_failure(raised->type().ptr());
  }
  if (auto* raised = dynamic_cast<const python_error*>(&e)) {
    pybind11::gil_scoped_acquire gil;
    return no_failure(raised->type ? raised->type : PyErr_Occurred());
  }
  return false;
}

void set_python_error(std::exception_ptr p) {
  try {
    std::rethrow_exception(p);
  } catch (const PythonError&) {
  } catch (python_error& e) {
    e.restore();
  } catch (const Unsupported& e) {
    PyErr_SetString(types.capture, e.what());
  } catch (const CaptureError& e) {
    PyErr_SetString(types.capture, e.what());
  } catch (const OptionError& e) {
    PyErr_SetString(types.option, e.what());
  } catch (const InternalError& e) {
    PyErr_SetString(types.compiler, e.what());
  } catch (const Error& e) {
    PyErr_SetString(types.error, e.what());
  }
}

}  // namespace vitrify::python
