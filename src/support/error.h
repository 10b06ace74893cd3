// Checks. A user's mistake is an OptionError or CaptureError, ours is an InternalError (always with file:line).
// What may fail in the normal course (an op that cannot be lowered, a fusion that is refused) is a value, not an exception.
#pragma once
#include <fmt/format.h>

#include <string>

#include "vitrify/error.h"

namespace vitrify {

// What a kernel found wrong in the data while running; the runtime maps it to the exception eager raises.
enum class KernelFault : int32_t { None = 0, IndexOutOfRange = 1, DivisionByZero = 2 };

[[noreturn]] void internal_error(const char* file, int line, const char* cond, std::string msg);

#define VT_CHECK(cond, ...)                                                                \
  do {                                                                                     \
    if (!(cond)) [[unlikely]]                                                              \
      ::vitrify::internal_error(__FILE__, __LINE__, #cond, ::fmt::format("" __VA_ARGS__)); \
  } while (0)
#define VT_UNREACHABLE(...) ::vitrify::internal_error(__FILE__, __LINE__, "unreachable", ::fmt::format("" __VA_ARGS__))

}  // namespace vitrify
