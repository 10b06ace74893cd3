#include "support/types.h"

namespace vitrify {

namespace {
constexpr size_t kBytes[] = {
#define _(n, s, b) b,
    VT_DTYPES(_)
#undef _
};
constexpr std::string_view kNames[] = {
#define _(n, s, b) s,
    VT_DTYPES(_)
#undef _
};
}  // namespace

size_t size_of(DType t) { return kBytes[static_cast<size_t>(t)]; }
std::string_view to_string(DType t) { return kNames[static_cast<size_t>(t)]; }

bool parse_dtype(std::string_view s, DType& out) {
  for (size_t i = 0; i < std::size(kNames); ++i)
    if (kNames[i] == s) return out = static_cast<DType>(i), true;
  return false;
}

}  // namespace vitrify
