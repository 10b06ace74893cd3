#pragma once
#include <string_view>

namespace vitrify::ops {

// How much of its operands an op reads, at least.
enum class Reads {
  All,       // every element
  AsResult,  // every element, where every element of its results is computed
  Some,
};
Reads reads_of(std::string_view name);

}  // namespace vitrify::ops
