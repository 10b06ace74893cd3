// Plans by what they were made from. Repeated blocks of a model are captured one by one; those that are alike but for their tensors run one plan.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/plan.h"
#include "schedule/schedule.h"
#include "support/options.h"
#include "torch/passes/passes.h"
#include "torch/program.h"

namespace vitrify {

// What a compile makes, bound to no tensor.
struct SharedPlan {
  std::shared_ptr<ir::Graph> graph;  // after the passes
  std::shared_ptr<runtime::Plan> plan;
  std::vector<FrozenGroup> groups;
  std::shared_ptr<const Originals> originals;
};

// Of a program before its passes: everything that they, the schedule and the code may look at. Nullopt where that cannot be written down: sizes that
// are symbols, large constants, and arguments that the IR does not look into.
std::optional<std::string> plan_key(const ir::Graph&, const PassState&, const schedule::Destinations&, const Options&);
// Null: none that somebody still runs.
std::shared_ptr<const SharedPlan> find_plan(const std::string& key);
void keep_plan(const std::string& key, const std::shared_ptr<const SharedPlan>&);

}  // namespace vitrify
