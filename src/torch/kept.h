// What a compiled call with gradients leaves for its backwards, and when that is let go of.
#pragma once
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ir/graph.h"
#include "torch/call_sizes.h"
#include "torch/compat.h"
#include "torch/followed.h"
#include "torch/split.h"
#include "torch/tape.h"

namespace vitrify {

// A tensor as it was.
struct Kept {
  at::Tensor tensor;
  int64_t version = 0;
  bool hollow = false;  // sizes and strides, and no elements
  bool itself = false;  // the tensor may have other memory by now, and that is read
  bool loose = false;   // of such a one, from hooks, or a gradient: it may lie otherwise than recorded
  bool freed = false;   // by a backward; what saves nothing can run again, for which sizes may count

  Kept() = default;
  // Its history is not held: it may come to lead to the node that has this. Leaves that need gradients get none.
  explicit Kept(const at::Tensor&, Hold = Hold::Memory);
  static Kept sizes_of(const at::Tensor&);
  bool readable() const { return tensor.defined() && !hollow; }
  bool changed() const;
  void take_now();            // the memory that the tensor has by now, or had when nobody had it any more
  void check_memory() const;  // raises where eager reads two by now, and this is one
  // Eager has the tensor itself: whether that needs a gradient by now, unlike then. Else none.
  std::optional<bool> needs_now() const;
  at::Tensor tensor_now() const;  // undefined where nobody has it any more
  Kept for_level(Hold) const;     // as a backward that is differentiated again has it

 private:
  at::Tensor was_;  // with the memory that views hold
  std::optional<Followed> given_;
};

std::vector<const at::Tensor*> addresses_of(const std::vector<at::Tensor>&);
bool is_alike(const at::Tensor&, const ir::TensorType&, bool strides);
// Of `saved` as `graph` reads them, what may have other memory by now. No: it is not such as plans read. BySizes: if sizes that differ from call to
// call are as they were (take_by_sizes).
enum class Fit { No, BySizes, Yes };
Fit take_as_it_is_now(std::vector<Kept>& saved, const ir::Graph& graph);
// The first `given` of what `graph` reads, in the strides that its types say. Symbols are first what the others say. False: they have other sizes.
bool take_by_sizes(std::vector<at::Tensor>& tensors, const ir::Graph& graph, size_t given);
at::Tensor laid_in(const at::Tensor&, at::IntArrayRef sizes, at::IntArrayRef strides);  // a copy
// As the trace has it: passes may have chosen another layout.
Kept laid_as_recorded(const Saved&, Kept, const CallSizes&);

// Raises eager's error where what is `asked` of `graph` reads more than the sizes of what was freed; what else it computes may be of any numbers.
void check_freed(std::vector<Kept>& saved, const ir::Graph& graph, const std::vector<ir::Value>& asked);
Kept any_numbers(const Kept& freed, const ir::TensorType&);

class Call {
 public:
  virtual ~Call() = default;
  // `derivative`: inputs are what is kept, then the tangents. `below`: of the call whose gradients this one computes.
  Call(std::shared_ptr<const Tape> tape, std::shared_ptr<const Whole> derivative, std::shared_ptr<Call> below)
      : tape_(std::move(tape)), derivative_(std::move(derivative)), below_(std::move(below)) {}

  std::vector<Kept> given;                             // by JointProgram::given: for gradients of gradients; undefined where there is none
  std::vector<Kept> kept;                              // by Split::saved
  std::vector<torch::autograd::SavedVariable> hooked;  // in their place, where hooks may want to move them
  int64_t plan = 0;                                    // of what is saved (Training::plan), behind the others in `hooked`, for a checkpoint; else 0
  std::vector<Kept> behind_hooks;                      // by Split::saved: sizes of what they have, where those differ from call to call
  bool sized = false;                                  // sizes of what was given count when it is gone

  Kept unpack(size_t saved, const compat::NodePtr& node) const;
  // What has the sizes of it: behind hooks is not the tensor itself.
  const Kept& with_sizes(size_t saved) const { return kept[saved].tensor.defined() || behind_hooks.empty() ? kept[saved] : behind_hooks[saved]; }
  // While it lives, the backward under way runs what stands for one of eager's nodes several times.
  class Repeats {
   public:
    explicit Repeats(const Call& of) : of_(of) { ++of_.repeats_; }
    ~Repeats() { --of_.repeats_; }
    Repeats(const Repeats&) = delete;
    Repeats& operator=(const Repeats&) = delete;

   private:
    const Call& of_;
  };
  // The first step at which a backward comes to what another has freed: a node of which eager keeps something.
  std::optional<size_t> spent(const Path&) const;
  // Notes that a backward comes to what only one may come to; false: another has before.
  bool come_once(const Path&);
  void free(const Path&);
  void free_all();
  std::unique_lock<std::mutex> lock() const { return std::unique_lock(mutex_); }

 private:
  virtual void all_freed() {}
  mutable std::atomic<int> repeats_ = 0;
  static constexpr int kNone = -2;
  // What hooks give back for it: once in a backward, whose parts read it one after the other. Eager's node asks once, and a checkpoint gives once.
  at::Tensor from_hooks(size_t saved, const compat::NodePtr& node) const;
  void check_plan(const compat::NodePtr& node) const;
  int freed_by(size_t step) const;
  void mark(size_t step, bool from_above = false);
  void let_go();
  void end_backward(int task);
  std::shared_ptr<const Tape> tape_;
  std::shared_ptr<const Whole> derivative_;
  std::shared_ptr<Call> below_;
  struct FromHooks {
    int task;
    std::mutex mutex;
    std::map<size_t, at::Tensor> saved;
  };
  mutable int plan_seen_ = kNone;                  // the backward that has looked at what the checkpoint gave back for `plan`
  mutable std::shared_ptr<FromHooks> from_hooks_;  // in the backward under way
  mutable std::mutex mutex_;
  std::vector<int> freed_;  // by step: the backward that has freed it, or kNone; empty: none has
  std::vector<int> came_;   // by Tape::Step::once, in the call below all: the backward that has come there, or kNone
  std::vector<int> held_;   // by step: a level above has freed it, in this backward, in which a node of this one may be about to run; or kNone
};

// Where a call that computes gradients of another's results comes from.
struct Origin {
  std::vector<Kept> given;
  torch::autograd::edge_list edges;   // by JointProgram::given: where its gradient goes
  torch::autograd::edge_list places;  // by place of the level below: where gradients come in
  std::shared_ptr<Call> call;
  size_t tangents = 0;                                // of given: where those begin that this call was given
  std::vector<std::pair<uint32_t, at::Tensor>> laid;  // of given: tangents in the strides that the program reads, where theirs are others
  std::vector<std::pair<uint32_t, Followed>> views;   // of given: tangents of which it has views
};

// The same for a gradient of gradients, which is given the tangents last. `needs`: of which of them elements are read.
bool take_given(const Origin&, std::vector<at::Tensor>& given, const JointProgram&, const std::vector<char>& needs);

}  // namespace vitrify
