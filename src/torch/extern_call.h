// One ATen call of a graph node: schema resolved and constant arguments boxed once, tensors filled in per call.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <vector>

#include "ir/graph.h"

namespace vitrify {

at::ScalarType scalar_type_of(const ir::TensorType&);
at::ScalarType scalar_type_of(DType);  // not Opaque

// Below autograd, outside autocast, gradients off: what kernels of a plan run under.
struct PlanGuard {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  at::NoGradGuard no_grad;
};

class NodeCall {
 public:
  using EvalInt = std::function<int64_t(sym::Int)>;

  NodeCall(const ir::Node&, const ir::Graph&);

  // Results flattened, one per n.outs. Operands in for_each_input order. `eval` is asked for symbolic arguments only.
  void call(const at::Tensor* const* operands, const EvalInt& eval, std::vector<c10::IValue>& stack, std::vector<at::Tensor>& results) const;

  // Ops with an out= kernel the executor calls directly, without boxing.
  bool has_out() const { return out_ != Out::None; }
  void call_out(at::Tensor& out, const at::Tensor* const* operands) const;

 private:
  enum class Out : uint8_t { None, Mm, Addmm, Bmm, Baddbmm };
  struct Hole {
    uint32_t arg;            // stack position
    uint32_t operand = 0;    // first operand number
    int32_t count = -1;      // -1: one tensor; otherwise a list of that many
    bool optional_list = false;
    std::vector<char> present;
  };
  struct Symbolic {
    uint32_t arg;
    std::vector<sym::Int> ints;
    bool list;
  };
  void push(const ir::Arg&, const c10::Argument&, const ir::Graph&, uint32_t& operand);

  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;
  std::vector<Hole> holes_;
  std::vector<Symbolic> symbolic_;
  Out out_ = Out::None;
  at::Scalar beta_ = 1, alpha_ = 1;
};

// The dispatcher's handle of "aten::add.Tensor"; CaptureError-free: throws InternalError when torch has no such op.
c10::OperatorHandle find_aten_op(const std::string& name);

}  // namespace vitrify
