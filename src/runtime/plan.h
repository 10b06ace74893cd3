// The flat program a compiled graph runs. Built by the pipeline, run by src/torch/executor.cpp. No compiler header is included here.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ir/graph.h"
#include "support/types.h"
#include "sym/known.h"
#include "sym/sym.h"

namespace vitrify::runtime {

using sym::Int;
using KernelFn = void (*)(void* const* bufs, const int64_t* sizes, int64_t begin, int64_t end);

enum class SlotKind : uint8_t {
  Input,     // argument or captured tensor, by graph input number
  Constant,  // by graph constant number
  Arena,     // private intermediate at a fixed offset of the plan's arena
  Output,    // memory of its own, allocated each call and given to the caller
  Extern,    // result an extern call returns
};

struct Slot {
  SlotKind kind;
  uint32_t index = 0;  // Input, Constant: number; Output: first graph output it serves
  DType dtype;
  Device device;
  std::vector<Int> sizes, strides;
  Int bytes = 0;                            // Arena, Output
  int64_t arena_offset = 0;                 // Arena, when all sizes are constant; otherwise laid out when the plan runs
  int32_t first_step = -1, last_step = -1;  // life over Plan::steps; last_step == steps.size(): an output
};

// A strided window on a slot, in elements.
struct TensorRef {
  uint32_t slot = 0;
  std::vector<Int> sizes, strides;
  Int offset = 0;
};

struct Launch {
  uint32_t kernel = 0;          // index into Plan::kernels
  std::vector<uint32_t> slots;  // one per non-scratch buffer
  std::vector<char> writes;     // parallel to slots
  std::vector<Int> sizes;       // kernel size arguments
  Int iterations = 0;           // flattened parallel iterations
  Int scratch_bytes = 0;        // per thread
  int64_t grain = 1;            // fewest iterations worth a thread
};

struct ExternCall {
  const ir::Node* node = nullptr;   // owned by Plan::graph
  std::vector<TensorRef> operands;  // one per tensor argument, in for_each_input order
  std::vector<int32_t> results;     // slot per result, -1: not needed
  bool in_place = false;            // the second operand's memory becomes the result's
};

struct Step {
  enum class Kind : uint8_t { Launch, Extern, Free } kind;
  uint32_t index = 0;  // into launches or externs; Free: slot (an Extern slot whose last use has passed)
};

struct KernelRef {
  KernelFn fn = nullptr;
  size_t scratch_bytes = 0;  // per thread at the hints; nonzero: the kernel takes scratch memory
  bool may_fault = false;
  std::string name;
};

struct Output {
  bool defined = true;
  bool in_place = false;  // made in the memory of the input it goes to, which `ref` is
  TensorRef ref;          // an Output slot whole, or a view of an Input, Constant or Extern slot
};

struct Plan {
  std::vector<Slot> slots;
  std::vector<KernelRef> kernels;
  std::vector<Launch> launches;
  std::vector<ExternCall> externs;
  std::vector<Step> steps;
  std::vector<Output> outputs;       // one per graph output
  int64_t arena_bytes = 0;           // when all sizes are constant
  bool dynamic = false;              // some size is symbolic: offsets, iterations and shapes are computed per set of sizes
  std::shared_ptr<void> code;        // keeps the machine code alive
  std::shared_ptr<ir::Graph> graph;  // extern nodes, constants, symbols
  sym::Known known;                  // of sizes, which graph->ctx() may not say while derivatives are taken in other threads
};

}  // namespace vitrify::runtime
