// Errors by blame. A user's mistake is an OptionError or CaptureError, ours is an InternalError (always with file:line).
// What may fail in the normal course (an op that cannot be lowered, a fusion that is refused) is a value, not an exception.
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace vitrify {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct OptionError : Error { using Error::Error; };    // unknown option, mode or wrong type
struct CaptureError : Error { using Error::Error; };   // the program cannot be captured (the caller decides: eager, or throw under fullgraph)
struct InternalError : Error { using Error::Error; };  // a bug of ours; the pipeline turns it into an eager call and a reproducer

// What a kernel found wrong in the data while running; the runtime maps it to the exception eager raises.
enum class KernelFault : int32_t { None = 0, IndexOutOfRange = 1, DivisionByZero = 2 };

[[noreturn]] void internal_error(const char* file, int line, const char* cond, std::string msg);

#define VT_CHECK(cond, ...)                                                                                             \
  do {                                                                                                                  \
    if (!(cond)) [[unlikely]]                                                                                           \
      ::vitrify::internal_error(__FILE__, __LINE__, #cond, ::fmt::format("" __VA_ARGS__));                              \
  } while (0)
#define VT_UNREACHABLE(...) ::vitrify::internal_error(__FILE__, __LINE__, "unreachable", ::fmt::format("" __VA_ARGS__))

}  // namespace vitrify
