// What Python code asks of sizes and numbers that differ from call to call: a program sees Python's own, as in eager.
#pragma once

namespace vitrify::python {

// Whether the code that runs now is the program's, or a library's that it uses, and not torch's own, which knows symbolic numbers. `beside`: a module
// of torch through which a program comes here too. Needs the interpreter's lock.
bool asked_by_program(const char* beside = nullptr);

// isinstance(n, int) and isinstance(x, float) of torch.SymInt and torch.SymFloat, where they are ours and a program asks.
void show_classes_of_numbers();

}  // namespace vitrify::python
