// Parts of a graph that follow from few inputs, as graphs of their own.
#pragma once
#include <memory>
#include <vector>

#include "ir/graph.h"

namespace vitrify {

struct Slice {
  std::shared_ptr<ir::Graph> graph;  // shares the symbols of the graph it was cut from
  std::vector<uint32_t> sources;     // its inputs, as inputs of that graph
};

// A copy of everything `outs` need.
Slice slice(const ir::Graph&, const std::vector<ir::Value>& outs);

// True when v follows, through pure ops, from integer inputs on the CPU (and nothing else) for which `may_read` holds; at least one.
bool follows_from_integers(const ir::Graph&, ir::Value v, const std::function<bool(uint32_t input)>& may_read);

// The same computation, by structure.
bool same_computation(const ir::Value&, const ir::Value&);

}  // namespace vitrify
