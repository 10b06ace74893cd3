// One fused group to one loop kernel: stages, forwarding of values between parts, scratch rows, the vector axis.
#pragma once
#include <vector>

#include "schedule/fuse.h"

namespace vitrify::schedule {

struct BuiltKernel {
  loop::Kernel kernel;
  std::vector<uint32_t> buffers;  // program buffer of each non-scratch kernel buffer, in argument order
  sym::Int iterations = 0;        // parallel iterations
  int64_t grain = 1;
};

// `needed[b]`: buffer b is read outside the group or is a graph output.
BuiltKernel build_kernel(const ops::LoopProgram&, const Group&, const std::vector<char>& needed);

}  // namespace vitrify::schedule
