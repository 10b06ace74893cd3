// vitrify-opt: reads text IR at any stage, runs named passes, prints the result of a stage. Replays the reproducers an internal error leaves.
//
//   vitrify-opt graph.ir                          # parse, verify, print
//   vitrify-opt graph.ir --passes cse,dce         # run these graph passes in this order
//   vitrify-opt graph.ir --emit loops             # everything up to the kernels and the plan
//   vitrify-opt graph.ir --emit llvm              # and machine code: prints the LLVM IR
//   vitrify-opt --list                            # the stages, in pipeline order, with the reason for their place
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>

#include "codegen/backend.h"
#include "pipeline/pipeline.h"
#include "schedule/schedule.h"

using namespace vitrify;

namespace {

std::string read(const std::string& path) {
  std::stringstream s;
  if (path == "-") {
    s << std::cin.rdbuf();
  } else {
    std::ifstream f(path);
    if (!f) throw Error("cannot read " + path);
    s << f.rdbuf();
  }
  return s.str();
}

void emit_loops(std::shared_ptr<ir::Graph> g, const Options& o, bool llvm) {
  auto sched = schedule::schedule(g, o);
  for (auto& k : sched.kernels) loop::verify(k);
  if (!llvm) {
    for (auto& k : sched.kernels) std::cout << loop::print(k) << "\n";
    std::cout << schedule::print(*sched.plan);
    return;
  }
  std::vector<const loop::Kernel*> kernels;
  for (auto& k : sched.kernels) kernels.push_back(&k);
  codegen::TargetOptions t;
  t.keep_asm = true;
  t.target = o.target;
  std::cout << codegen::llvm_backend().compile(kernels, t)->listing;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Reads text IR, runs named passes, prints"};
  std::string file = "-", emit = "graph", target = "native";
  std::vector<std::string> passes, disable;
  bool list = false, all = false;
  app.add_option("file", file, "text IR ('-': standard input)");
  app.add_option("--passes", passes, "graph passes to run, in order")->delimiter(',');
  app.add_flag("--all-passes", all, "run the pipeline's graph passes");
  app.add_option("--disable", disable, "stages to skip")->delimiter(',');
  app.add_option("--emit", emit, "graph, loops or llvm")->check(CLI::IsMember({"graph", "loops", "llvm"}));
  app.add_option("--target", target, "native, x86-64-v2, x86-64-v3 or x86-64-v4");
  app.add_flag("--list", list, "list the stages");
  CLI11_PARSE(app, argc, argv);
  try {
    if (list) {
      for (auto& s : pipeline::graph_stages()) std::printf("%-16s %s\n", s.name.c_str(), s.why.c_str());
      return 0;
    }
    Options o;
    o.verify = true;
    o.disable = disable;
    o.target = target;
    auto g = std::make_shared<ir::Graph>(ir::parse(read(file)));
    ir::verify(*g);
    if (all)
      for (auto& s : pipeline::graph_stages()) pipeline::run_stage(s, *g, o);
    for (auto& name : passes) {
      bool found = false;
      for (auto& s : pipeline::graph_stages())
        if (s.name == name) {
          pipeline::run_stage(s, *g, o);
          found = true;
        }
      if (!found) throw Error("no pass named '" + name + "'; see vitrify-opt --list");
    }
    if (emit == "graph")
      std::cout << ir::print(*g);
    else
      emit_loops(g, o, emit == "llvm");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "vitrify-opt: %s\n", e.what());
    return 1;
  }
}
