// From a graph to a plan: the list of stages, and the one wrapper that runs each of them.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ir/graph.h"
#include "runtime/plan.h"
#include "schedule/schedule.h"
#include "support/options.h"

namespace vitrify::pipeline {

// A graph pass returns whether it changed anything. `above` passes live in src/passes; doors may add passes that need ATen (src/torch/passes).
using GraphPass = std::function<bool(ir::Graph&, const Options&)>;
struct Stage {
  std::string name;
  std::string why;  // the reason for its place in the list
  GraphPass run;
};
const std::vector<Stage>& graph_stages();
bool name_stages(const std::vector<Stage>&);  // makes their names known to the option `disable`

// Skips if disabled by name, times, runs, verifies and dumps when it changed something.
void run_stage(const Stage&, ir::Graph&, const Options&);

// Runs every stage and the code generator.
std::shared_ptr<runtime::Plan> compile(std::shared_ptr<ir::Graph>, const Options&, const std::vector<Stage>& extra_graph_stages = {},
                                       const schedule::Destinations& = {});

// To be called when a plan has run for the first time: capture's and the compiler's code leaves memory (support/resident.h), and that of the shared
// object of a door, which says an address inside of it once.
void return_code_pages();
void has_code_pages(const void* door);

}  // namespace vitrify::pipeline
