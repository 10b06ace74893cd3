#include "pipeline/pipeline.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "codegen/backend.h"
#include "passes/canonicalize.h"
#include "passes/cse.h"
#include "passes/dce.h"
#include "passes/settle.h"
#include "schedule/schedule.h"
#include "support/budget.h"
#include "support/counters.h"
#include "support/fault.h"
#include "support/resident.h"

namespace vitrify::pipeline {

namespace {

// Dumps are numbered over the process, so that a folder read in order is the history of a compile.
void dump(const Options& o, const std::string& stage, const std::string& suffix, const std::string& text) {
  static std::mutex m;
  static int number = 0;
  std::lock_guard lock(m);
  const int k = number++;
  if (o.dump_dir.empty()) {
    std::fprintf(stderr, "---- %03d %s.%s\n%s\n", k, stage.c_str(), suffix.c_str(), text.c_str());
    return;
  }
  std::error_code ec;
  std::filesystem::create_directories(o.dump_dir, ec);
  std::ofstream(std::filesystem::path(o.dump_dir) / fmt::format("{:03}-{}.{}", k, stage, suffix)) << text;
}
bool wants_dump(const Options& o, std::string_view what) {
  for (auto& d : o.dump)
    if (d == what) return true;
  return false;
}

}  // namespace

bool name_stages(const std::vector<Stage>& stages) {
  for (const Stage& s : stages) add_stage_names({s.name.c_str()});
  return true;
}
namespace {
const bool named = name_stages(graph_stages());
}

const std::vector<Stage>& graph_stages() {
  static const std::vector<Stage> stages{
      {"canonicalize", "first: identities and copies hide equal values from the passes behind it", passes::canonicalize},
      {"cse", "after canonicalize has made equal things look equal", [](ir::Graph& g, const Options& o) { return passes::cse(g, o); }},
      {"dce", "last: whatever the others left without a user", passes::dce},
  };
  return stages;
}

void run_stage(const Stage& s, ir::Graph& g, const Options& o) {
  if (o.disabled(s.name)) return;
  const bool changed = [&] {
    StageTimer timer(s.name);
    fault_point(s.name.c_str());
    return s.run(g, o);
  }();
  if (o.verify) ir::verify(g);
  if (changed && wants_dump(o, "graph")) dump(o, s.name, "graph", ir::print(g));
}

std::shared_ptr<runtime::Plan> compile(std::shared_ptr<ir::Graph> graph, const Options& o, const std::vector<Stage>& extra,
                                       const schedule::Destinations& destinations) {
  Budget budget(o.compile_budget_s);
  for (const ir::Node* n : graph->nodes()) counters().values_compiled += std::max<size_t>(n->outs.size(), 1);
  if (wants_dump(o, "graph")) dump(o, "capture", "graph", ir::print(*graph));
  passes::settle(*graph);
  if (o.verify) ir::verify(*graph);
  for (auto& s : graph_stages()) run_stage(s, *graph, o);
  for (auto& s : extra) run_stage(s, *graph, o);
  if (!extra.empty())
    for (auto& s : graph_stages()) run_stage(s, *graph, o);  // what the door's passes opened up

  schedule::Scheduled sched = [&] {
    StageTimer timer("schedule");
    fault_point("schedule");
    return schedule::schedule(graph, o, destinations);
  }();
  if (wants_dump(o, "loops")) {
    std::string text = schedule::print(*sched.plan);
    for (auto& k : sched.kernels) text += loop::print(k) + "\n";
    dump(o, "schedule", "loops", text);
  }
  if (!sched.kernels.empty()) {
    codegen::Backend& backend = o.backend == "interp" ? codegen::interp_backend() : codegen::llvm_backend();
    codegen::TargetOptions to;
    to.target = o.target;
    to.threads = static_cast<int>(o.threads);
    to.keep_asm = wants_dump(o, "llvm");
    to.verify = o.verify;
    to.spend = &Budget::spend;
    std::vector<const loop::Kernel*> kernels;
    for (auto& k : sched.kernels) kernels.push_back(&k);
    std::shared_ptr<codegen::Compiled> code = [&] {
      StageTimer timer("codegen");
      fault_point("codegen");
      return backend.compile(kernels, to);
    }();
    VT_CHECK(code->functions.size() == kernels.size(), "{} functions for {} kernels", code->functions.size(), kernels.size());
    for (size_t k = 0; k < kernels.size(); ++k) sched.plan->kernels[k].fn = code->functions[k];
    if (to.keep_asm) dump(o, "codegen", "llvm", code->listing);
    counters().kernels_built += kernels.size();
    sched.plan->code = std::move(code);
    return_free_memory();
  }
  return sched.plan;
}

namespace {
std::atomic<const void*> inside_door{nullptr};
}

void has_code_pages(const void* door) { inside_door = door; }

void return_code_pages() {
  if (const void* door = inside_door) vitrify::return_code_pages(door);
  codegen::return_llvm_pages();
  vitrify::return_code_pages(reinterpret_cast<const void*>(&compile));
}

}  // namespace vitrify::pipeline
