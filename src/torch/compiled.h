// A captured program compiled to native code: what both doors call.
#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "support/options.h"
#include "torch/program.h"

namespace vitrify {

// A kernel met data that eager raises for. Nothing outside the plan has been written: a door may run eager instead, for its very message.
struct IndexFault final : c10::IndexError {
  using IndexError::IndexError;
};
struct DivisionFault final : c10::Error {
  using Error::Error;
};

class CompiledGraph {
 public:
  // Compiles; throws InternalError on a bug of ours (the door falls back to eager and writes the reproducer).
  static std::shared_ptr<CompiledGraph> compile(Program, const Options&);
  virtual ~CompiledGraph() = default;

  // Runs the plan, writes mutated inputs back, makes the results. `args`: the declared inputs (program.num_args of them), metadata as captured
  // (the caller's guards checked it). Captured tensors are read live. Thread-safe. Call with grad mode off or no input requiring grad.
  virtual std::vector<at::Tensor> run(at::ArrayRef<at::Tensor> args) = 0;
  // The same, results into `out` (cleared first): no allocation when its capacity suffices.
  virtual void run(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out) = 0;

  // The same where the caller owns the arguments: each is dropped as soon as nothing reads it any more. `unseen`: nobody sees of what the results are
  // views.
  virtual void run_consuming(std::vector<at::Tensor>& args, std::vector<at::Tensor>& out, bool /*unseen*/) { run(args, out); }
  virtual bool learned() const { return false; }  // a layout was not as recorded: see Program::lenient

  // The same with the Python floats that the program reads anew.
  virtual void run_live(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out, at::ArrayRef<double>) { run(args, out); }

  // No call runs it or will, though results of earlier ones may: it does not hold what it captured any more.
  virtual void let_go() = 0;

  // What has been assumed of sizes since it was compiled, its runs look at too. Before the first of them.
  virtual void settle() {}

  virtual const Program& program() const = 0;
  struct Stats {
    uint32_t kernels = 0, launches = 0, externs = 0;
    int64_t arena_bytes = 0;
    int64_t kept_bytes = 0;  // by each call for its backward, besides what it was given and what it returns
  };
  virtual Stats stats() const = 0;
  virtual double estimated_us() const = 0;   // rough cost of a run: callers release the GIL above about 50
  virtual std::string describe() const = 0;  // graph, kernels, plan as text
};

}  // namespace vitrify
