// What calls of libraries stand for. Passes put one call in the place of several ops; where it fails (a library has limits that ATen's ops have not),
// or finds numbers that it does not compute as ATen does, the ops themselves run.
#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "ir/node_map.h"

namespace vitrify {

// Thrown by a kernel of ours: an infinity or a NaN, which it may have put elsewhere than ATen does.
struct NotFinite : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Originals {
 public:
  // To be made before the first pass that fuses.
  explicit Originals(const ir::Graph&);

  // Graph inputs that it had: those after them hold what passes have computed once.
  uint32_t num_inputs() const;
  // `by` has the elements that `what` had.
  void replaced(ir::Value by, ir::Value what);

  // The ops behind the results of one call.
  struct Ops {
    std::shared_ptr<ir::Graph> graph;
    struct Source {
      bool operand = false;  // of the call
      uint32_t index = 0;    // of the operand, or of a graph input
    };
    std::vector<Source> sources;   // the graph's inputs
    std::vector<int32_t> results;  // per result of the call: an output of the graph, or -1
  };
  // Null where they cannot be run in its place: they draw, have effects, or read inputs below `first_kept`, which may be gone or written by then.
  std::shared_ptr<const Ops> behind(const ir::Node& call, uint32_t first_kept) const;

 private:
  std::shared_ptr<ir::Graph> graph_;
  ir::ValueMap<ir::Value> original_;
};

}  // namespace vitrify
