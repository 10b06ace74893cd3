// Which graph outputs would share memory: what a pass must ask before it lets one value stand for another.
#pragma once
#include <unordered_map>

#include "ir/graph.h"

namespace vitrify::passes {

class OutputStorage {
 public:
  explicit OutputStorage(const ir::Graph&);
  // May `to` stand for `from` everywhere, outputs included? If so, takes note of it.
  bool replace(ir::Value from, ir::Value to);

 private:
  std::unordered_map<ir::Value, uint32_t> outputs_;  // how often a value is an output
  std::unordered_map<ir::Value, uint32_t> inside_;   // how many outputs may lie in the memory of a value: counted along each output's chain of views
};

}  // namespace vitrify::passes
