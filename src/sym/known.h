// What is known of sizes by now, to go back to where what was found out since may not be kept.
#pragma once
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

}  // namespace vitrify::sym
