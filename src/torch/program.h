// What a capture hands to the compiler and to the doors: the functional graph and the effects around it.
#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ir/graph.h"
#include "torch/compat.h"
#include "torch/numbers.h"

namespace torch::autograd {
struct Edge;
}

namespace vitrify {

// Where a view is made: autograd takes it for another, and lets nobody write to some.
enum class ViewMode : uint8_t { Grad, NoGrad, Inference };
ViewMode view_mode();  // of this place

// How one tensor result of the user's program is made from the graph's outputs and the caller's tensors.
struct ResultSpec {
  enum class Kind : uint8_t {
    Value,        // graph output `index`; by `path` it is a view, as eager's is: who writes to it or detaches it in place hears of that
    Input,        // the very object that input `index` is (identity kept)
    ViewOfInput,  // a view of input `index`, made by running `path` on it
    ViewOfValue,  // a view of result `index`, made by running `path` on it
    Undefined,
    ViewOfOutput,  // a view of graph output `index`, which no result is, made by running `path` on it
  } kind = Kind::Value;
  uint32_t index = 0;
  // View ops to run for real, in order: ATen op names with the arguments after `self`, ints only ("aten::select.int", dim, index).
  struct ViewOp {
    std::string op;
    std::vector<c10::IValue> args;
    int32_t result = -1;               /* which of a multi-view op's results */
    uint64_t call = 0;                 /* of such an op, which one: its results are made together, as the program did */
    bool own_versions = false;         /* no op: .data, which counts its writes by itself */
    std::optional<ViewMode> mode = {}; /* made in this mode, which is not the call's */
    int8_t creation = -1;              /* autograd is told that it was made so (CreationMeta): what eager's is a view of has no tensor here */
  };
  std::vector<ViewOp> path;
  uint32_t order = 0;  // of a view that gradients follow: made in this order, so that they come back in their turn
  // Of a view: made once autograd knows so many parts of the program (JointProgram::parts). 0, of an input's: before it hears of the program, so that
  // its gradient is added after the program's. None: at the end.
  std::optional<uint32_t> turn;
  bool outdated = false;  // a view that was made before a write: once its base needs gradients, autograd makes its history anew
  bool held = false;      // of a gradient: eager's leaf would find that another node still has it, and copy it
};

// An input written by the program: graph output `output` is its final value.
struct Mutation {
  uint32_t input = 0;
  uint32_t output = 0;
  int32_t version_bumps = 1;             // as eager counts them; 0 for writes through .data
  int32_t counted = -1;                  // and as many more as this graph output says
  bool metadata_only = false;            // t_(), unsqueeze_(): `path` is replayed in place instead
  std::vector<ResultSpec::ViewOp> path;  // of a write: what gives the input its size before
};

// What a program can read of a tensor that no op says.
enum class Fact : uint8_t {
  Version,  // how often its memory has been written
  View,     // whether it is a view
  Offset,   // where in its memory it begins
  Memory,   // that, and how large its memory is and who else has it
  Address,  // where its memory is, or what it holds
  History,  // the node that made it
  Hooks,    // what runs with its gradient
  Other,    // what nobody can compare
  Sought,   // its gradient, which the program asks for itself
  Crossed,  // where that would go on behind it: it has a history
};

// A fact of an input (Fact::View, Offset, Memory) that the program has read: it is as it was at the capture. Gradients of the program's own end at
// its inputs: from those that are Crossed nothing leads to those that are Sought.
struct InputFact {
  uint32_t input = 0;
  Fact fact = Fact::Offset;
};

// An input that no call passes and nothing holds: found anew by every call.
struct LiveInput {
  uint32_t input = 0;
  int32_t grad_of = -1;  // the .grad of this input, or
  uint32_t number = 0;   // a step of Program::numbers, as a 0-d tensor
};

// The program leaves another .grad on an input.
struct GradWrite {
  uint32_t input = 0;
  int32_t result = -1;  // of Program::results, after those of the user's program; -1: None
};

struct Program {
  std::shared_ptr<ir::Graph> graph;
  std::vector<at::Tensor> captured;  // real tensors met during the capture; graph inputs [num_args, num_args + captured.size()); undefined: live
  uint32_t num_args = 0;             // graph inputs [0, num_args) are the tensors the door declared, in order
  std::vector<ResultSpec> results;   // one per tensor the user's program returned, then one per new gradient
  std::vector<Mutation> mutations;
  bool goes_back = false;  // it takes gradients itself, and where they look at versions every placeholder has its own
  // To an argument that it also reaches by itself its gradients go by both ways, and here by one. C++ programs may go back where no op shows it.
  bool goes_by_name = false;
  bool freezes = false;  // or unfreezes what it is given: an argument that it also reaches by itself is frozen by either name
  bool resumes = false;  // calls that turn out to be of another program may begin anew: what custom ops gave is known (Effects)
  std::vector<LiveInput> live;
  std::vector<InputFact> facts;
  std::shared_ptr<const Numbers> numbers;  // null: none
  std::vector<GradWrite> grad_writes;
  // A result whose graph the program's own backward() has freed, and the inputs that it led to.
  struct Spent {
    uint32_t result;
    std::vector<uint32_t> inputs;
  };
  std::vector<Spent> spent;
  bool lenient = false;           // results of calls in other layouts than recorded are copied (nobody sees them)
  bool trained = false;           // captured parameters that need gradients change from call to call
  bool gives_ordinary = false;    // in inference mode custom ops are given tensors that were made outside of it, or views of them
  std::optional<bool> inference;  // results are (not) inference tensors, whatever mode the call is made in
};

// All graph inputs of a call. `live`: the Python floats behind Numbers::Op::Live. CallRefused where the numbers lead another way.
std::vector<at::Tensor> all_inputs(const Program&, at::ArrayRef<at::Tensor> args, at::ArrayRef<double> live = {});
// Eager's gradients would go on through the history of an argument: CallRefused.
void check_histories(const Program&, const at::Tensor* const* inputs);
// Gradients of its own save what hooks of the user's are to see, or look at another input too for which what it writes would be counted: CallRefused.
void check_own_backward(const Program&, at::ArrayRef<const at::Tensor*> inputs);
bool leads_to(const torch::autograd::Edge& from, const std::vector<torch::autograd::Edge>& to);
// Where a backward comes to `result`, on its way to what its graph led to, it raises: that graph is gone.
compat::NodePtr spent_node(const Program::Spent&, const at::Tensor* const* inputs);
// After a call: sets the .grad of inputs and drops those results; results whose graph is gone say so.
void take_grads(const Program&, const at::Tensor* const* inputs, std::vector<at::Tensor>& results);
at::Tensor number_tensor(double);  // as Python's numbers arrive in ops

// Custom ops, which may do more than compute: a call that has run them cannot begin anew.
bool is_side_effect(const ir::Node&);
bool has_side_effects(const ir::Graph&);

// By graph output, of the first `count`: is a result made from it? Users then see its memory.
std::vector<char> returned_outputs(const Program&, size_t count);

// Completes a program with what only the door knows; CaptureError if it draws from a generator that is none of `known`: one that the program makes is
// made anew by every eager call.
void complete(Program&, const std::vector<at::Generator>& known = {});

}  // namespace vitrify
