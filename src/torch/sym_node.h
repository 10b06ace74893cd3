// Our symbolic integers as torch's: what a program sees of a dynamic size.
#pragma once
#include <c10/core/SymBool.h>
#include <c10/core/SymFloat.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymNodeImpl.h>

#include "ir/graph.h"
#include "torch/compat.h"

namespace vitrify::capture {

c10::SymInt to_sym_int(const std::shared_ptr<sym::Context>&, sym::Int);
// The expression of one of our SymInts; any other is asked for its value (which guards it).
sym::Int from_sym_int(const c10::SymInt&);
bool is_ours(const c10::SymNode&);
// Of a float that is the quotient of two integers which differ from call to call.
std::optional<std::pair<sym::Int, sym::Int>> quotient_of(const c10::SymFloat&);
std::vector<sym::Int> ints_of(const c10::IValue& list);  // of an int or SymInt list
bool is_static(const ir::TensorType&);
bool is_static(const c10::IValue&);
// The same argument with symbols replaced by numbers: their hints, guarded if `specialize`.
c10::IValue static_value(const c10::IValue&, bool specialize);

}  // namespace vitrify::capture
