// Ops that raise where the data say so. Eager computes them in full: they stay where nobody reads their results, and are not cut down to what is
// read.
#pragma once
#include "ir/graph.h"

namespace vitrify::ir {

// Beside OpFlags.
enum FaultFlags : uint32_t {
  kFaults = 1 << 4,        // whatever the types
  kDivides = 1 << 5,       // integers, where the second operand is zero
  kNamesDims = 1 << 6,     // where the list of dims that is the second argument is empty, of a tensor that has some
  kNarrows = 1 << 14,      // where the number of a 0-d operand does not fit the result's type
  kChecksIndex = 1 << 11,  // its rule looks at indices for results of no elements too
};

// Any op may that has a number which the type of its result cannot hold.
bool may_fault(const Node&);

// At the end of a capture: takes what else is dead off the ops that may fault. From then on one that nothing reads is the program's, which
// Graph::remove_dead() keeps, and one whose readers are all dead is what a pass has replaced.
void cut_dead_readers(Graph&);
std::vector<Node*> dead_nodes(const Graph&);  // that it would take
void retire(Graph&, Node&);                   // another value has taken the place of its result: it goes, though nothing reads it

}  // namespace vitrify::ir
