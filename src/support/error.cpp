#include "support/error.h"

#include <cstring>

namespace vitrify {

void internal_error(const char* file, int line, const char* cond, std::string msg) {
  const char* base = std::strstr(file, "src/");
  throw InternalError(fmt::format("{}:{}: {}{}{}", base ? base : file, line, cond, msg.empty() ? "" : ": ", msg));
}

}  // namespace vitrify
