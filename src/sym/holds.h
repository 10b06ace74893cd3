// Guards, looked at with values of some symbols.
#pragma once
#include <functional>
#include <optional>

#include "sym/sym.h"

namespace vitrify::sym {

// Whether the guard holds of these values; null where one of its symbols has none yet. In order: later guards divide by what earlier ones say is not
// zero.
std::optional<bool> holds(const Guard&, const std::function<std::optional<int64_t>(uint32_t symbol_id)>&);

}  // namespace vitrify::sym
