// Ops that libraries have taken out of the dispatcher again: what holds an OperatorHandle of one holds nothing.
#pragma once
#include <cstdint>
#include <string>

namespace vitrify {

uint64_t deregistrations();                                        // so far, from the first question on
bool is_deregistered_since(const std::string& op, uint64_t then);  // "ns::name.overload"

}  // namespace vitrify
