// What is known of sizes by now, to go back to where what was found out since may not be kept.
#pragma once
#include <optional>
#include <utility>
#include <vector>

#include "sym/sym.h"

namespace vitrify::sym {

struct Known {
  std::vector<Guard> guards;
  std::vector<std::pair<Range, int64_t>> symbols;  // range and multiple_of
};

Known known(const Context&);
void go_back(Context&, const Known&);  // symbols made since keep what is known of them

// While this lives, hints are what the sizes of another call are, for which all guards so far hold. By symbol; those that are not known stay.
class Hints {
 public:
  Hints(Context&, const std::vector<std::optional<int64_t>>&);
  ~Hints();
  Hints(const Hints&) = delete;

 private:
  Context& ctx_;
  std::vector<std::pair<uint32_t, int64_t>> before_;
};
uint64_t hinted(const Context&);  // another number whenever they are others

}  // namespace vitrify::sym
