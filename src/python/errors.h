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
void forget_error();                        // clears the error indicator; an interrupt comes again as soon as Python looks
bool is_interrupt(const std::exception&);   // an exception of Python's that is no Exception: KeyboardInterrupt, SystemExit

}  // namespace vitrify::python
