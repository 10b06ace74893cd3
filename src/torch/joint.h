// A captured program and its derivative, in one graph.
#pragma once
#include <vector>

#include "torch/program.h"

namespace vitrify {

struct Gradient {
  uint32_t input;  // of this graph input
  ResultSpec how;  // from the graph's outputs
};

struct JointProgram {
  Program program;           // graph outputs: what the program returns and writes, then the gradients
  uint32_t num_forward = 0;  // outputs before the first gradient
  uint32_t backward = 0;     // ids from here on: nodes recorded while the gradients were computed

  // A result, or the memory that several results are views of, through which gradients come back.
  struct Root {
    uint32_t output;   // graph output
    uint32_t tangent;  // graph input: its gradient, of the same type
  };
  std::vector<Root> roots;          // empty: nothing needs gradients, `program` is all there is
  std::vector<Gradient> gradients;  // only where eager has one
};

}  // namespace vitrify
