// Errors Vitrify throws, by blame. What eager would throw is thrown as eager throws it.
#pragma once
#include <stdexcept>
#include <string>

namespace vitrify {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct OptionError : Error {
  using Error::Error;
};  // unknown option or mode, or a value of the wrong type
struct CaptureError : Error {
  using Error::Error;
};  // the program cannot be captured; reaches callers only under fullgraph
struct RecompileError : Error {
  using Error::Error;
};  // a new signature under error_on_recompile
struct InternalError : Error {
  using Error::Error;
};  // a bug of ours; callers see an eager result instead, and a diagnostic line

}  // namespace vitrify
