// What autograd sees of a compiled call that has gradients.
#pragma once
#include <torch/csrc/autograd/function.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch/kept.h"
#include "torch/tangents.h"
#include "torch/tracer.h"

namespace vitrify {

class Training;

// What the nodes of a call have in common.
struct RegionCall : Call {
  RegionCall(const JointProgram& j, std::shared_ptr<const Whole> derivative, std::shared_ptr<Call> below)
      : Call(j.tape, std::move(derivative), std::move(below)), joint(j) {}
  // Eager has saved it: it may not change, whether it is kept here or not.
  void watch(const at::Tensor&, int64_t expected, bool is_output, uint32_t index);
  at::Tensor seen(ir::Value) const;  // what is watched in its place; undefined: nothing, or nobody has it
  // The views of root `root`, each after those that gradients come through later.
  void add_view(uint32_t root, uint32_t view, const at::Tensor&);
  // Through which of them the backward under way comes.
  void find_views(Layouts& how) const;
  bool made(const at::Tensor&) const;  // its gradient goes to one of the nodes
  void add_place(const torch::autograd::Edge&);
  std::vector<torch::autograd::Edge> places() const;  // where their gradients come in; none where the node is gone

  using Seen = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;  // errors name its sizes
  struct View {
    uint32_t root, view;
    const torch::autograd::Node* node;  // it may be gone, and
    uint64_t number;                    // another in its place
  };
  struct Watched {
    c10::VariableVersion version;
    Seen tensor;
    int64_t expected;
    bool is_output, has_node;
    uint32_t index;
    bool is_detached() const {
      const at::Tensor now(tensor.lock());
      return now.defined() && now.is_leaf();
    }
  };
  // A step of eager's backward that raises. Without a tensor: always the same, but for how often it was written since it had that version.
  struct Raised {
    size_t step;
    std::optional<c10::VariableVersion> version;
    std::optional<Seen> tensor;
    int64_t expected = 0;
  };
  // A result that eager has saved (Tape::views).
  struct InMemory {
    uint32_t result;
    int32_t output;  // it is that one of the forward, and a first derivative reads it as it is by then (Hold); else -1
    Followed tensor;
    at::Tensor recorded;  // hollow: as the trace has it
  };
  void note_memory(uint32_t result, int32_t output, const at::Tensor&, const at::Tensor& recorded = {});
  // Those whose .data is another tensor by now. `all`: also those with an output.
  struct Other {
    at::Tensor tensor, recorded;
    int32_t output;
  };
  // Above level 0: what eager's nodes have saved themselves, and these do not follow to other memory.
  struct Unfollowed {
    Followed tensor;
    bool is_output;
    uint32_t index;
  };
  void check_unfollowed(const Path&) const;
  using Assigned = std::map<uint32_t, Other>;
  Assigned assigned(bool all) const;
  static std::vector<uint32_t> numbers_of(const Assigned&);
  struct Given {
    Seen tensor;
    uint32_t index;
    bool needs_grad;
  };
  // Of JointProgram::given, then of the results, what needs gradients by now and did not in the forward, or the other way round.
  Tracer::Needs needs_now() const;
  const JointProgram& joint;          // of what the nodes hold
  std::vector<Given> computed_again;  // a checkpoint's function may read it
  std::vector<Seen>
      saved_leaves;  // what it has written or made, as eager has saved it: they needed no gradients, and derivatives do not lead to them
  std::vector<Watched> watched;
  std::vector<Raised> raised;
  std::vector<View> views;
  std::vector<InMemory> in_memory;
  std::vector<Unfollowed> unfollowed;
  uint64_t oldest = 0;  // number of its first node
  // By step: the backward that ran the user's derivative there last.
  std::vector<int> ran;

 private:
  void all_freed() override;
  std::vector<std::pair<compat::WeakNodePtr, uint32_t>> places_;
};

// To autograd each is what one or more of eager's nodes are.
class CallNode : public compat::OwningNode<torch::autograd::Node> {
 public:
  explicit CallNode(std::shared_ptr<RegionCall> call) : call_(std::move(call)) {}
  std::string name() const override { return "VitrifyBackward"; }
  const RegionCall& call() const { return *call_; }

 protected:
  void let_go() override {
    release_variables();
    call_.reset();  // it knows its nodes
  }
  std::shared_ptr<RegionCall> call_;
};

// Of independent results: a backward comes to those nodes that eager's comes to, and all that they are given goes on together. It leads to one
// RegionNode.
class ResultNode final : public CallNode {
 public:
  using CallNode::CallNode;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& tangents) override;
};

// One for each of JointProgram::parts. The gradient that it is given of a result and what it gives to one behind it are as eager's; in between, the
// derivative of all that it leads to is one program.
class RegionNode final : public CallNode {
 public:
  RegionNode(std::shared_ptr<const Training> region, std::shared_ptr<RegionCall> call, size_t part)
      : CallNode(std::move(call)), region_(std::move(region)), part_(part) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& tangents) override;
  void release_variables() override;
  size_t part() const { return part_; }
  // There are ResultNodes in front of it: what it is not given may not have been come to.
  void has_results_in_front() { came_.resize(num_inputs(), kNone); }
  void note_come(size_t input);
  // Of the backward under way, by place: gradients stop there; empty: nowhere.
  const std::vector<char>& stops() const { return stops_; }
  // How gradients come, but for their strides.
  Layouts layouts(const torch::autograd::variable_list& tangents) const;
  size_t edges_out() const;    // so many of its edges lead out of the program, the others to places
  size_t edges_shown() const;  // gradients go along so many
  // What eager's node to which input `input` belongs leads to, and whether that one has input `other` too.
  torch::autograd::edge_list edges_behind(size_t input) const;
  bool is_of_one(size_t input, size_t other) const;
  // A backward comes to eager's node of that result, and goes no further: backward(inputs=) of the result.
  void end_at(size_t input) const;

 private:
  size_t place_of(size_t input) const { return call_->joint.parts.empty() ? input : call_->joint.parts[part_].places[input]; }
  torch::autograd::variable_list by_place(torch::autograd::variable_list given) const;
  // The places that the backward under way has come to, whether with a gradient or without.
  std::vector<char> places_come(const torch::autograd::variable_list& tangents) const;
  // Eager raises at the first of its nodes that cannot run. `path`: from the places that it has `come` to, at some of them with a gradient that is
  // `given`.
  void raise_first(std::vector<char> given, const std::vector<char>& come, const Path& path) const;
  std::vector<std::pair<const RegionNode*, std::vector<char>>> later() const;
  void describe_inner(const torch::autograd::variable_list& grads);
  // Where the gradients that this gives have to be seen on their way; what has come to those through which it goes itself is taken along.
  void find_stops(torch::autograd::variable_list& tangents, const std::vector<char>& come);
  // Eager runs a user's derivative also where no gradient comes to it: whether it would behind places that have `come`, and nothing else runs it.
  void find_without(const torch::autograd::variable_list& tangents, const std::vector<char>& come, bool behind_stops);
  static constexpr int kNone = -2;
  std::shared_ptr<const Training> region_;
  size_t part_;
  std::vector<char> stops_;
  std::vector<char> without_;  // by place, as find_without() left it; empty: none
  std::vector<int> came_;      // by input, if there are ResultNodes: the backward that came there last
  bool freed_ = false;         // as the backward that ran last asked for
};

// Whether the backward under way asks for a gradient that eager's nodes lead to along `e`. A RegionNode stands for several, which need not all lead
// to all of its edges: the engine, which knows nodes only, comes to it on the way to what none of those lead to.
bool is_asked(const torch::autograd::Edge& e);

std::vector<char> which_defined(const torch::autograd::variable_list&);

// One more input of that type, for the gradient of what nobody has been given.
void add_inner(torch::autograd::Node&, const ir::TensorType&);

}  // namespace vitrify
