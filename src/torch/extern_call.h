// One ATen call of a graph node: schema resolved and constant arguments boxed once, tensors filled in per call.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <vector>

#include "torch/convert.h"

namespace vitrify {

// Below autograd, outside autocast, gradients off: what a plan runs under.
struct PlanGuard {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  at::NoGradGuard no_grad;
};

void ask_for_first(c10::IValue& output_mask);
bool writes_first(const c10::FunctionSchema&);                    // argument 0 in place
bool writes_copies(const ir::Node&, const c10::FunctionSchema&);  // call_on_copies is how it is called
// A tensor that is the written argument 0 too is recorded as that number: the call gets the same copy for both, and reads there what it has written.
void share_copy(const std::vector<ArgKind>&, std::vector<c10::IValue>& stack);
// Calls an op on copies of the arguments that it writes, in the layout they have; `results`: what it returns, then the copies, then how often each
// was written, where the node has results for that: in eager nothing else counts those writes.
void call_on_copies(const ir::Node&, const c10::OperatorHandle&, std::vector<c10::IValue>& stack, std::vector<at::Tensor>& results);

// Of a strided tensor, as one that is made in inference mode, or outside of it.
at::Tensor same_memory(const at::Tensor&, bool inference);

class NodeCall {
 public:
  using EvalInt = std::function<int64_t(sym::Int)>;

  NodeCall(const ir::Node&, const ir::Graph&);

  // Results flattened, one per n.outs. Operands in for_each_input order. `eval` is asked for symbolic arguments only.
  void call(const at::Tensor* const* operands, const EvalInt& eval, std::vector<c10::IValue>& stack, std::vector<at::Tensor>& results) const;

  // Ops with an out= kernel the executor calls directly, without boxing (they are among runtime::writes_into_slot).
  bool has_out() const { return out_ != Out::None; }
  void call_out(at::Tensor& out, const at::Tensor* const* operands) const;

  // runtime::writes_into_operand lists them.
  bool has_in_place() const { return in_place_.has_value(); }
  void check_registered() const;  // PlanRefused: a library has taken the op back
  void call_in_place(const at::Tensor* const* operands, std::vector<c10::IValue>& stack) const;

 private:
  enum class Out : uint8_t { None, Mm, Addmm, Bmm, Baddbmm };
  struct TensorArg {
    uint32_t arg;
    uint32_t operand;  // first operand number
  };

  const ir::Node& node_;
  const ir::Graph& graph_;
  void fill(const at::Tensor* const* operands, std::vector<c10::IValue>& stack) const;
  uint64_t deregistrations_;  // before the op was looked up
  c10::OperatorHandle op_;
  std::optional<c10::OperatorHandle> in_place_;
  std::vector<ArgKind> kinds_;
  std::vector<c10::IValue> arguments_;  // tensors and symbolic ones empty
  std::vector<TensorArg> tensors_;
  std::vector<uint32_t> symbolic_;   // arguments with symbolic numbers
  bool writes_ = false;              // an op in place, which gets a copy of its first operand, in the recorded strides
  bool on_copies_ = false;           // a custom op that writes its arguments
  bool keeps_for_backward_ = false;  // the kernel asks the grad mode whether to
  Out out_ = Out::None;
  at::Scalar beta_ = 1, alpha_ = 1;
};

}  // namespace vitrify
