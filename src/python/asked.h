// What Python code asks of sizes and numbers that differ from call to call: a program sees Python's own, as in eager.
#pragma once
#include <pybind11/pybind11.h>

namespace vitrify::python {

// Whether the comparison of sizes that runs now is the program's, or that of a library which it uses, and not one of torch's own code, which knows
// symbolic numbers. Needs the interpreter's lock.
bool compared_by_program();

// Whether a torch.SymInt or torch.SymFloat is one of ours.
bool is_ours(pybind11::handle number);

// isinstance(n, int) and isinstance(x, float) of torch.SymInt and torch.SymFloat, where they are ours and a program asks.
void show_classes_of_numbers();

}  // namespace vitrify::python
