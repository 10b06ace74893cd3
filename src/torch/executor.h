// Runs a plan. One PlanRun is one execution context: memory, boxed tensors and kernel arguments prepared once; a call only fills in what is new.
#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "runtime/layout.h"
#include "runtime/memory.h"
#include "runtime/plan.h"
#include "torch/effects.h"
#include "torch/extern_call.h"
#include "torch/originals.h"
#include "torch/watch.h"

namespace vitrify {

// Payload of graph constant `index`.
const at::Tensor& constant_tensor(const ir::Graph&, uint32_t index);

at::ScalarType slot_scalar_type(const runtime::Slot&);

// A result tensor with memory of its own: from the block cache if it has `cached_from` bytes or more.
at::Tensor new_result(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType, bool contiguous,
                      size_t cached_from = runtime::BlockCache::kMinBytes);

// Whether there is more memory than `t` spans from its beginning.
bool shows_part(const at::Tensor& t);
// In a graph whose results depend on where in its memory lies what a custom op gives.
constexpr const char* kLooksAtMemory = "vitrify::looks_at_memory";
// A copy in the same strides that is not negative: kernels read memory, where the bit is not.
at::Tensor without_bits(const at::Tensor&);

class PlanRun {
 public:
  // `originals`: of the plan's library calls, or null; `first_kept`: graph inputs from here on are there, and unwritten, until a run ends.
  explicit PlanRun(std::shared_ptr<const runtime::Plan>, std::shared_ptr<const Originals> originals = nullptr, uint32_t first_kept = 0);
  ~PlanRun();
  // `inputs` in graph order. Not re-entrant. Appends to `outputs`, one per graph output. Throws what an op or the data raises; nothing outside
  // has been written then. Call under PlanGuard.
  // owned: tensors that inputs point at and that may be dropped once nothing reads them any more.
  void run(const at::Tensor* const* inputs, std::vector<at::Tensor>& outputs, std::vector<at::Tensor>* owned = nullptr);
  bool gives_ordinary = false;                                     // custom ops are given no inference tensors (Program::gives_ordinary)
  bool lenient = false;                                            // a result in another layout than recorded is copied
  bool learned = false;                                            // that has happened
  void keep_effects();                                             // of custom ops before steps that may fail: eager then makes what the run has not
  size_t cached_from = runtime::BlockCache::kMinBytesOfInference;  // bytes of results from which they are the block cache's

 private:
  // A tensor over memory we own or borrow; its pointer is set without touching anything else.
  struct Window {
    at::Tensor tensor;
    c10::StorageImpl* storage = nullptr;
    int64_t offset = 0;  // bytes
  };
  struct SlotState {
    std::vector<int64_t> sizes, strides;
    int64_t bytes = 0;
    int64_t arena_offset = -1;  // -1: on demand
    bool ready = false;
    bool contiguous = false;
    std::vector<void**> patches;    // kernel arguments that point at this slot
    std::vector<uint32_t> windows;  // windows over it
  };
  struct LaunchState {
    std::vector<void*> args;
    std::vector<int64_t> sizes;
    int64_t iterations = 0;
    bool ready = false;
  };
  struct ExternState {
    std::vector<const at::Tensor*> pointers;  // what the call gets
    // Where each operand's tensor comes from: (operand, graph input), (operand, slot), (operand, window).
    std::vector<std::pair<uint32_t, uint32_t>> inputs, slots, windows;
    Window result;         // over memory of the plan, when the call writes there
    bool relaid = false;   // a pass may have chosen the layout: the record knows eager's strides
    bool foreign = false;  // a kernel of another library: it may ask for a mutable pointer to read, in a parallel region, where torch refuses it
    bool shown = false;    // unknown code sees where its operands lie, or where views of them do
    bool ready = false;
  };
  // Everything that follows from one set of symbol values.
  struct Frame {
    std::vector<int64_t> key;
    bool proven = false;  // a run has come to its end: custom ops have given what their authors describe
    runtime::SymbolValues symbols;
    std::vector<SlotState> slots;
    std::vector<void*> pointers;
    std::vector<LaunchState> launches;
    std::vector<ExternState> externs;
    std::vector<Window> windows;
    int64_t arena_bytes = 0;
    char* arena = nullptr;  // where its pointers say that it is
  };
  // Pointers into the arena hold while a run has it. Torch's profiler counts it as long.
  class ArenaUse {
   public:
    ArenaUse(PlanRun& run, Frame& f);
    ~ArenaUse();
    ArenaUse(const ArenaUse&) = delete;

   private:
    void take(PlanRun& run, Frame& f, size_t bytes);
    runtime::Arena shared_;
    void* at_ = nullptr;
  };
  struct Binding {
    uint32_t symbol, input, dim;
    bool stride;
  };

  void run_steps(Frame&, const at::Tensor* const* inputs, std::vector<at::Tensor>* owned);
  void find_lifetimes();
  void note_generator(const ir::Node&);
  void find_waits();
  void find_refusals(const std::vector<char>& bound);
  void set_found(Frame&, uint32_t symbol, int64_t value);  // RunRefused where the plan is for others
  // frame.cpp
  Frame& frame_for(const at::Tensor* const* inputs);
  std::unique_ptr<Frame> make_frame(std::vector<int64_t> key);
  void place_arena(Frame&, char* at);
  bool prepare_slot(Frame&, uint32_t slot);
  bool prepare_launch(Frame&, uint32_t launch, bool patch);
  bool prepare_extern(Frame&, uint32_t ext, bool patch);
  void set_pointer(Frame&, uint32_t slot, void*);
  void point_to(Frame&, const at::Tensor* const* inputs);
  std::vector<at::Tensor> give_views(const Frame&, const runtime::ExternCall&, ExternState&, const at::Tensor* const* inputs) const;
  Window make_window(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, at::ScalarType, bool wrapped, int64_t offset_bytes);

  void start_late(Frame&, const std::vector<uint32_t>& slots);
  void allocate_output(Frame&, uint32_t slot);
  void run_launch(Frame&, uint32_t launch);
  void run_chunk(Frame&, uint32_t launch, int thread, int64_t begin, int64_t end);
  void begin_writes(Frame&);                                         // before the first launch that writes to an input
  void begin_step(Frame&, size_t step);                              // makes the results that come into being with it
  void end_step(size_t step, std::vector<at::Tensor>* owned) const;  // lets go of the inputs that it was the last to read
  bool run_together(Frame&, size_t step, size_t count, std::vector<at::Tensor>* owned);
  static size_t arguments_bytes(const runtime::Launch& l) { return (l.slots.size() * sizeof(void*) + 127) / 64 * 64; }  // two more than slots
  void reserve_scratch(int64_t threads);
  void run_extern(Frame&, uint32_t ext, const at::Tensor* const* inputs);
  void call_extern(Frame&, uint32_t ext);
  bool take_effect(Frame&, uint32_t ext);  // of an earlier run
  void store_results(Frame&, uint32_t ext);
  bool run_originals(Frame&, uint32_t ext, const at::Tensor* const* inputs);
  bool folds_alike(uint32_t call, const ExternState&, const at::Tensor* const* inputs);
  bool is_folded(const ir::Node&, const ExternState&) const;
  bool result_is_large(const Frame&, uint32_t ext) const;
  const Originals::Ops* originals_of(uint32_t call);  // null: none can run in its place
  void check_described(const Frame&, const runtime::ExternCall&) const;
  void store_result(Frame&, const runtime::ExternCall&, uint32_t result, at::Tensor, const ExternState&);
  void make_outputs(Frame&, const at::Tensor* const* inputs, std::vector<at::Tensor>& outputs);
  void drop_tensors() noexcept;

  std::shared_ptr<const runtime::Plan> plan_;
  std::vector<NodeCall> calls_;
  uint64_t looked_at_ = 0;  // deregistrations, by which none of their ops was gone
  std::shared_ptr<const Originals> originals_;
  uint32_t first_kept_;
  struct Failed {
    std::shared_ptr<const Originals::Ops> ops;
    bool for_good = false;
  };
  enum class Hides : char { Nothing, NaN, Overflow };  // Overflow: NaNs too
  static Hides hidden_by(const ir::Node& call);
  std::unordered_map<uint32_t, Failed> failed_;  // calls by number that a library did not do
  struct Padding {
    bool pads = false;
    std::optional<size_t> weight;  // which operand is multiplied by what it pads with
  };
  static Padding padding_of(const ir::Node& call);
  struct Fold {
    at::Tensor shift, weight;
    std::optional<TensorKey> plain;  // of a weight that is no copy: as it was
    bool alike = true;
  };
  std::vector<Fold> folds_;                          // calls by number: into what a norm was folded when that was last looked at
  std::vector<Padding> paddings_;                    // calls by number: of convolutions
  std::vector<Hides> hides_;                         // calls by number: what eager would show that they do not
  uint64_t effects_before_ = 0;                      // this run
  std::vector<std::vector<uint32_t>> first_, last_;  // by step, and one more: results that begin to exist with it; inputs it is the last to read
  std::vector<uint32_t> launch_run_;                 // by step: how many launches follow each other from here
  size_t first_write_ = 0;                           // the first step that writes to an input; as many as there are: none does
  std::vector<char> waits_;                          // by step: a launch that needs, or takes the memory of, one since the last that waits
  std::vector<Binding> bindings_;
  std::vector<std::unique_ptr<Frame>> frames_;
  Frame* current_ = nullptr;
  runtime::Arena arena_;  // when it is small
  size_t expected_ = 0;   // bytes of an arena that is shared
  runtime::Arena scratch_;
  size_t scratch_stride_ = 0, scratch_threads_ = 0;
  std::vector<runtime::Arena> late_memory_;  // per slot, sizes known only while running
  std::vector<at::Tensor> tensors_;          // per slot: outputs, extern results and constants
  std::vector<uint32_t> input_slots_, output_slots_;
  std::vector<char> input_pointer_;  // per slot: some kernel or window needs the address
  std::vector<char> written_;        // per slot: an input that kernels write
  bool looks_at_memory_ = false;
  bool late_ = false;                            // some sizes are known only while running
  std::vector<at::Generator> generators_;        // that calls draw from
  std::vector<sym::Guard> guards_;               // on sizes known only while running
  bool side_effects_ = false, resumes_ = false;  // custom ops run, of which it is kept what they gave
  std::vector<char> keeps_;                      // externs of which it is kept what they gave, should a later step fail; empty: none
  bool wrote_ = false;                           // this run, to an input
  size_t begun_ = 0;                             // custom ops of this run
  std::shared_ptr<const Effects> given_;
  Effects made_;
  int32_t fault_ = 0;
  std::vector<c10::IValue> stack_;
  std::vector<at::Tensor> results_;
};

}  // namespace vitrify
