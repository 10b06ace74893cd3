// Graph to plan, without machine code: lowering, fusion, kernels, memory.
#pragma once
#include <memory>

#include "runtime/plan.h"
#include "schedule/lower_graph.h"
#include "support/options.h"

namespace vitrify::schedule {

struct Scheduled {
  std::shared_ptr<runtime::Plan> plan;  // kernels have names and no code yet
  std::vector<loop::Kernel> kernels;    // distinct ones; plan->kernels is parallel to it
};

// Per graph output, the input whose memory it goes to once the plan has run, or -1; empty: none does. A plan makes it there at once if it can.
using Destinations = std::vector<int32_t>;

Scheduled schedule(std::shared_ptr<ir::Graph>, const Options&, const Destinations& = {});
std::string print(const runtime::Plan&);

}  // namespace vitrify::schedule
