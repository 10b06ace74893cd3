// Where to cut a joint graph in two: which values the forward keeps for the backward, by a minimum cut on bytes. What is cheap may be computed again
// from what is kept instead. Tests: tests/unit/passes/partition.cpp.
#pragma once
#include <functional>
#include <unordered_set>
#include <vector>

#include "ir/graph.h"

namespace vitrify::passes {

// What prices are made of: sizes as they were seen, or a guess.
int64_t likely(sym::Int);
int64_t likely_bytes(const ir::TensorType&);

struct JointView {
  const ir::Graph& graph;
  uint32_t num_forward = 0;                           // graph outputs of the forward; the rest are the backward's
  size_t first_tangent = 0;                           // graph inputs from here on: only the backward has them
  std::function<bool(const ir::Node&)> in_backward;   // nodes that must run in the backward, besides those that need what only the backward has
  std::function<bool(const ir::Node&)> recomputable;  // may run again in the backward: it fuses into what reads it
  std::function<bool(const ir::Node&)> materialized;  // its result is memory in the forward anyway
  std::function<bool(ir::Value)> may_save;            // false: the user could change it, and eager keeps no hold on it
  std::function<bool(ir::Value)> may_copy = nullptr;  // of inputs that may not be saved: a copy may
  std::function<bool(ir::Value)> is_held = nullptr;   // something else has its memory: it costs no more than an input
  // Of a result of a node that may not run again: other values, of which the backward can make it element by element; none: it cannot.
  std::function<std::vector<ir::Value>(ir::Value)> made_of = nullptr;
};

struct Partition {
  std::vector<ir::Value> saved;   // in graph order; graph inputs among them
  std::vector<char> backward;     // by node id: needs something that only the backward has
  std::vector<ir::Value> remade;  // that the backward makes of what JointView::made_of says
};

Partition partition(const JointView&);

}  // namespace vitrify::passes
