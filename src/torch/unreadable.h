// What asking for the data of a placeholder raises.
#pragma once
#include <string_view>

namespace vitrify::capture {

bool reads_placeholder(std::string_view message);

}  // namespace vitrify::capture
