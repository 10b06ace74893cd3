// Capture: runs a program on placeholder tensors ("fakes") under our own dispatch mode and records ATen ops below autograd.
// One Tracer per thread at a time; everything it changes in the process (mode stack, autocast cache, generators, MHA fast path) is restored by
// finish() or by the destructor, also when an exception passes.
#pragma once
#include <c10/core/SymFloat.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch/joint.h"

namespace torch::autograd {
struct Node;
struct Edge;
}  // namespace torch::autograd

#pragma GCC visibility push(default)

namespace vitrify {

struct Effects;  // effects.h

struct TracerOptions {
  // In a Python process: a real TorchDispatchMode instance (PyObject*) that stands for the tracer on torch's mode stack; null in a C++ process.
  void* python_mode = nullptr;
  // In a Python process: the number that a 0-d tensor stands for when torch made it from a symbolic one, whose value it does not hold; null: no such
  // tensors.
  std::function<std::optional<c10::Scalar>(const at::Tensor&)> symbolic_number;
  // In a Python process: calls its argument with the GIL.
  std::function<void(const std::function<void()>&)> with_gil;
  // In a Python process: calls its argument without the GIL, which autograd's engine must not hold; what Python code raised comes out as any
  // exception.
  std::function<void(const std::function<void()>&)> without_gil;
  // In a Python process: whether what the program reaches of Python's state is as it was when it was captured.
  std::function<bool()> state_holds;
  // In a Python process: what a node of Python code has saved; undefined: it is not known, or none.
  std::function<std::vector<at::Tensor>(const torch::autograd::Node&)> saved_tensors;
  // Gives what says later whether the node still has the Python attributes that it has now. `in_call`: the call may still be left to eager, as where
  // the node's code may do what a derivative taken later cannot.
  std::function<std::function<bool()>(const torch::autograd::Node&, bool in_call)> keeps_attributes;
  // Gives what raises the same again, and holds nothing else; null: it is no exception of Python's.
  std::function<std::function<void()>(const std::exception_ptr&)> raised_anew;
  // In a Python process: what a custom op's author says that it returns, as placeholders; `new_size` makes a size (at least, at most) that only a run
  // knows. False: the author says nothing.
  using NewSize = std::function<c10::SymInt(int64_t, std::optional<int64_t>)>;
  std::function<bool(const c10::OperatorHandle&, const std::vector<c10::IValue>& args, const NewSize&, std::vector<at::Tensor>& results)> describe;
  // The call has been refused by a plan for its signature, or a capture of it has failed that took other sizes (takes_other_sizes()); `effects`: what
  // its custom ops gave in that run, or null.
  bool refused = false;
  std::shared_ptr<const Effects> effects;
  // The door can run a call from the start after its custom ops have run (Resumed).
  bool resumes = false;
  std::string name = "the program";              // as warnings call it
  std::function<void(const std::string&)> warn;  // as the door does, on any thread; null: as torch does
  // Runs the Meta kernel beside each shape rule and throws InternalError where they differ. For tests.
  bool check_shapes = false;
  // Which dims are symbolic: per declared input, per dim. Empty: all static.
  // (set through Tracer::add_input)
};

struct DimMark {
  bool dynamic = false;
  int64_t min = 2, max = INT64_MAX;
};

class Tracer {
 public:
  explicit Tracer(TracerOptions = {});
  ~Tracer();  // abandons the capture if finish() was not called
  Tracer(const Tracer&) = delete;

  // Declares a real tensor as an input and returns its placeholder. Inputs that share storage are seen as aliases. Call before start().
  // Throws CaptureError (with the reason) for tensors out of scope: sparse, quantised, nested, subclass, meta, other devices, named.
  at::Tensor add_input(const at::Tensor& real, ir::InputKind kind, const std::string& name, const std::vector<DimMark>& dims = {});
  // Real tensors reachable from a source that become inputs by identity when the program meets them (parameters, buffers, closure cells).
  void declare_source(const at::Tensor& real, ir::InputKind kind, const std::string& name);
  // True: any undeclared real tensor met is also taken as an input by identity (C++ callables); false: it must come from lift_fresh, else
  // CaptureError.
  void accept_unknown_tensors(bool);
  // What .grad of an input or of a declared source is now; calls read it anew.
  void declare_grad(const at::Tensor& of, const at::Tensor& grad);
  // A float that calls read anew: number `index` of those they give.
  c10::SymFloat live_number(uint32_t index, double now);
  at::Tensor live_tensor(uint32_t index, double now);  // the same as an operand
  // The program left this .grad on an input or declared source (undefined: None). Its new tensor goes to `outputs` of finish() after the results.
  void note_grad(const at::Tensor& of, const at::Tensor& grad);

  void note_unpacked(const torch::autograd::Node&);  // one of Python code takes what it has saved: all of it, whatever it reads of that

  void declare_generator(const at::Generator&);  // that the program can reach, besides the process's own. Before start()
  const std::vector<at::Generator>& declared_generators() const;
  void start();  // pushes the mode
  // Ends the capture. `outputs`: tensors the program returned (fakes, or reals it passed through), undefined ones allowed.
  Program finish(const std::vector<at::Tensor>& outputs);
  // The same with gradients: continues the trace through autograd's formulas for every result and input that needs them.
  JointProgram finish_joint(const std::vector<at::Tensor>& outputs);
  // Whether a program that is called without gradients has made some itself: results, or what it wrote, would lose them with finish().
  bool makes_gradients(const std::vector<at::Tensor>& outputs);
  // After finish_joint, any thread, one at a time: the gradients once more, for tangents as `how` says, recorded with what was learned since. Appends
  // to the graph of the joint program; the indices of the result count `outputs`. `tangents`: the inputs they became, null where there is none.
  // `needs`: which of JointProgram::given, and then of the results, need gradients by now, or do not, unlike in the forward: checkpoints compute
  // again with those as they are. `assigned`: of Tape::views, those whose .data is another tensor by now; the inputs that stand for that follow those
  // in `tangents`. `once`: for one backward: what functions find by then, and did not in the forward, is in it as it is.
  using Needs = std::vector<std::pair<uint32_t, bool>>;
  std::vector<Gradient> differentiate(const JointProgram&, const std::vector<TangentLayout>& how, std::vector<ir::Value>& tangents,
                                      std::vector<ir::Value>& outputs, const Needs& needs = {}, const std::vector<uint32_t>& assigned = {},
                                      bool once = false);
  // What a formula that looks at values finds in the call under way; the next level is then for calls in which it finds the same.
  struct Look {
    std::function<std::vector<std::pair<ir::Value, at::Tensor>>()> values;  // asked for once
    std::vector<at::Tensor> tangents;                                       // by place
    std::vector<std::pair<uint32_t, at::Tensor>> assigned;                  // the results whose .data is another tensor
  };
  // The program of the next level: the gradients for those tangents, none of which is expanded, differentiable. It is given what was `kept` for the
  // first derivative, too, and `snapshots`, of values as they were (JointProgram::Was, the last of them in this order).
  JointProgram deepen(const JointProgram&, const std::vector<TangentLayout>& how, const std::vector<ir::Value>& kept,
                      const std::vector<ir::Value>& snapshots, Look, const Needs& needs, const std::vector<uint32_t>& assigned);
  void abort();

  void note_saved(const std::vector<at::Tensor>& args);  // by a checkpoint, whose function is about to run
  // A selective one has cached what its function computed from node number `first` on; a backward has taken so much of it that another would raise.
  void note_cached(uintptr_t which, uint64_t first);
  void note_taken(uintptr_t which);
  bool takes_gradients() const;  // in a backward that is captured, and none of the program's own

  // The program reads of a tensor what no op says. What the capture can know holds in every call (Program::facts); else it fails.
  void note_fact(const at::Tensor&, Fact, std::string_view name);
  // The program is about to set the requires_grad of a tensor.
  void note_requires_grad(const at::Tensor&, bool);
  // The program is about to take gradients of its own; `to`: with respect to these and to what is at those edges; nothing: to all leaves.
  void note_gradients(const std::vector<torch::autograd::Edge>& of, const std::vector<at::Tensor>& to,
                      const std::vector<torch::autograd::Edge>& to_edges);

  // Why the capture failed, also when the exception itself was turned into another one on its way (a Python RuntimeError) or swallowed by the
  // program.
  const std::optional<std::string>& failure() const;
  // A size that follows from content was taken for 2 where it is less now: the capture may have gone where the call of now does not.
  bool takes_other_sizes() const;
  void note_failure(std::string);  // the exception that says so may become another one on its way
  // Called for each op: where the user wrote it ("file.py:12 in forward").
  void set_source_callback(std::function<std::string()>);

  bool state_holds() const;                                                   // TracerOptions::state_holds
  void warn_eager(const std::string& part, const std::string& why) const;     // "`part` of <name> run eagerly"; after the capture too
  std::string cannot(const std::string& part, const std::string& why) const;  // be compiled

  static Tracer* current();  // of this thread, or null
  static bool is_fake(const at::Tensor&);
  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

// Why a capture was given up, so that the door can run eagerly and say so: thrown as CaptureError through the user's frames
// (data-dependent read, unsupported tensor, foreign thread, resize_, set_).
//
// Runs a graph op by op through ATen: the oracle. `inputs` in graph order (arguments, then captured).
// check: every result's dtype, sizes and strides must be those recorded (InternalError if not).
std::vector<at::Tensor> interpret(const ir::Graph&, const std::vector<at::Tensor>& inputs, bool check = false);
// Runs a captured program as the compiled one would: graph, write-backs, results. `args`: the declared inputs.
std::vector<at::Tensor> interpret(const Program&, const std::vector<at::Tensor>& args, bool check = false);

}  // namespace vitrify
#pragma GCC visibility pop
