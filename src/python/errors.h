// The Python exception classes, and how C++ ones become them.
#pragma once
#include "python/ref.h"

namespace vitrify::python {

struct ErrorTypes {
  PyObject *error, *option, *capture, *recompile, *compiler, *warning;
};
const ErrorTypes& error_types();
void register_errors(PyObject* module);
void set_python_error(std::exception_ptr);  // sets the Python error indicator; rethrows what it does not know

}  // namespace vitrify::python
