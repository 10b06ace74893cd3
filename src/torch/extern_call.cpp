#include "torch/extern_call.h"

#include <ATen/ScalarOps.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "runtime/extern_table.h"
#include "support/error.h"
#include "torch/deregistered.h"
#include "torch/effects.h"
#include "torch/learned.h"
#include "torch/versions.h"

namespace vitrify {

namespace {

c10::OperatorHandle operator_of(const ir::Node& n) {
  auto op = find_operator(n.op->name);
  VT_CHECK(op.has_value(), "no such op: {}", n.op->name);
  return *op;
}

bool is_symbolic(const ir::Arg& a) {
  if (auto* i = std::get_if<sym::Int>(&a)) return !i->is_const();
  if (auto* l = std::get_if<std::vector<sym::Int>>(&a)) return std::any_of(l->begin(), l->end(), [](sym::Int i) { return !i.is_const(); });
  return false;
}

std::optional<at::Scalar> constant_scalar(const ir::Arg& a) {
  if (auto* i = std::get_if<sym::Int>(&a); i && i->is_const()) return at::Scalar(i->value());
  if (auto* d = std::get_if<double>(&a)) return at::Scalar(*d);
  if (auto* b = std::get_if<bool>(&a)) return at::Scalar(*b);
  return std::nullopt;
}

at::Tensor copy_with(const at::Tensor& t, at::IntArrayRef strides) { return at::empty_strided(t.sizes(), strides, t.options()).copy_(t); }

at::Tensor no_tensor(const ir::Value&) { VT_UNREACHABLE("tensor argument"); }

at::Tensor copy_in_place_of(const at::Tensor& t) {
  if (!t.defined()) return t;
  std::optional<c10::InferenceMode> counts_versions;
  if (c10::InferenceMode::is_enabled()) counts_versions.emplace(false);
  const at::NoGradGuard no_grad;
  return at::empty_strided(t.sizes(), t.strides(), t.options()).copy_(t.detach());
}

}  // namespace

at::Tensor same_memory(const at::Tensor& t, bool inference) {
  std::optional<c10::InferenceMode> mode;
  if (c10::InferenceMode::is_enabled() != inference) mode.emplace(inference);
  const at::NoGradGuard no_grad;
  return at::empty({0}, t.options()).set_(t.storage(), t.storage_offset(), t.sizes(), t.strides());
}

void ask_for_first(c10::IValue& output_mask) {
  c10::List<bool> mask = output_mask.toBoolList().copy();
  mask.set(0, true);
  output_mask = std::move(mask);
}

bool writes_first(const c10::FunctionSchema& s) {
  return !s.arguments().empty() && s.arguments()[0].alias_info() && s.arguments()[0].alias_info()->isWrite();
}

void share_copy(const std::vector<ArgKind>& kinds, std::vector<c10::IValue>& stack) {
  for (size_t i = 1; i < kinds.size(); ++i)
    if (kinds[i] == ArgKind::Tensor && stack[i].isInt()) stack[i] = stack[static_cast<size_t>(stack[i].toInt())];
}

bool writes_copies(const ir::Node& n, const c10::FunctionSchema& s) {
  return s.is_mutable() && (n.op->name.starts_with("aten::") ? !writes_first(s) : (n.op->flags & ir::kEffect) != 0);
}

void call_on_copies(const ir::Node& n, const c10::OperatorHandle& op, std::vector<c10::IValue>& stack, std::vector<at::Tensor>& results) {
  std::vector<at::Tensor> copies;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].alias_info() || !arguments[i].alias_info()->isWrite()) continue;
    if (stack[i].isTensor()) {
      stack[i] = copies.emplace_back(copy_in_place_of(stack[i].toTensor()));
    } else if (stack[i].isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : stack[i].toTensorVector()) l.push_back(copies.emplace_back(copy_in_place_of(t)));
      stack[i] = std::move(l);
    }
  }
  results.clear();
  const auto& returns = op.schema().returns();
  const auto given_back = static_cast<size_t>(std::ranges::count_if(returns, [](const c10::Argument& r) { return !r.alias_info(); }));
  const bool counts = !copies.empty() && n.outs.size() == given_back + 2 * copies.size();
  std::vector<int64_t> before;
  for (const at::Tensor& t : copies) before.push_back(version_of(t));
  const auto add_counts = [&] {
    for (size_t i = 0; counts && i < copies.size(); ++i)
      results.push_back(at::detail::scalar_tensor_static(version_of(copies[i]) - before[i], at::kLong, at::kCPU));
  };
  try {
    counts ? call_counting(op, stack) : op.callBoxed(stack);
  } catch (...) {
    results = copies;  // what it has written by then
    add_counts();
    throw;
  }
  for (size_t i = 0; i < returns.size(); ++i)
    if (!returns[i].alias_info()) flatten_results({stack[i]}, results);
  for (const at::Tensor& t : copies) results.push_back(c10::InferenceMode::is_enabled() && t.defined() ? same_memory(t, true) : t);
  add_counts();
  stack.clear();
}

NodeCall::NodeCall(const ir::Node& n, const ir::Graph& g)
    : node_(n), graph_(g), deregistrations_(deregistrations()), op_(operator_of(n)), kinds_(arg_kinds(op_.schema())) {
  VT_CHECK(n.args.size() == kinds_.size(), "{} has {} arguments, its schema {}", n.op->name, n.args.size(), kinds_.size());
  uint32_t operand = 0;
  arguments_.resize(n.args.size());
  for (uint32_t i = 0; i < n.args.size(); ++i) {
    const ir::Arg& a = n.args[i];
    if (auto* v = std::get_if<ir::Value>(&a)) {
      if (!*v) {
        if (kinds_[i] == ArgKind::Tensor && op_.schema().arguments()[i].type()->kind() == c10::TypeKind::TensorType) arguments_[i] = at::Tensor();
        continue;
      }
      tensors_.push_back({i, operand++});
    } else if (auto* l = std::get_if<std::vector<ir::Value>>(&a);
               l && (kinds_[i] == ArgKind::TensorList || kinds_[i] == ArgKind::OptionalTensorList)) {
      tensors_.push_back({i, operand});
      for (auto& x : *l) operand += static_cast<bool>(x);
    } else if (is_symbolic(a)) {
      symbolic_.push_back(i);
    } else {
      arguments_[i] = to_ivalue(g, a, kinds_[i], no_tensor);
    }
  }

  writes_ = writes_first(op_.schema());
  const std::string& name = n.op->name;
  if (runtime::writes_what_is_left_out(name)) ask_for_first(arguments_.back());
  if (runtime::writes_into_operand(name) && symbolic_.empty()) in_place_ = find_operator("mkldnn::_convolution_pointwise_.binary");
  on_copies_ = writes_copies(n, op_.schema());
  keeps_for_backward_ = name == "aten::mkldnn_rnn_layer" && !is_undefined(n.outs[3]);
  if (!n.outs.empty() && n.outs[0].dtype == DType::Opaque) return;  // what holds such elements, the kernel makes
  if (name == "aten::mm") out_ = Out::Mm;
  if (name == "aten::bmm") out_ = Out::Bmm;
  if (name == "aten::addmm" || name == "aten::baddbmm") {
    auto beta = constant_scalar(n.args[3]), alpha = constant_scalar(n.args[4]);
    if (beta && alpha) {
      out_ = name == "aten::addmm" ? Out::Addmm : Out::Baddbmm;
      beta_ = *beta;
      alpha_ = *alpha;
    }
  }
}

void NodeCall::fill(const at::Tensor* const* operands, std::vector<c10::IValue>& stack) const {
  stack.assign(arguments_.begin(), arguments_.end());
  for (const TensorArg& t : tensors_) {
    if (kinds_[t.arg] == ArgKind::Tensor) {
      stack[t.arg] = *operands[t.operand];
      continue;
    }
    uint32_t k = t.operand;
    stack[t.arg] = to_ivalue(graph_, node_.args[t.arg], kinds_[t.arg], [&](const ir::Value&) { return *operands[k++]; });
  }
}

void NodeCall::check_registered() const {
  if (is_deregistered_since(node_.op->name, deregistrations_))
    throw capture::PlanRefused(node_.op->name + " is no longer registered, or another op of that name");
}

void NodeCall::call_in_place(const at::Tensor* const* operands, std::vector<c10::IValue>& stack) const {
  fill(operands, stack);
  std::swap(stack[0], stack[1]);  // (self, other, ...) becomes (other!, self, ...)
  in_place_->callBoxed(stack);
  stack.clear();
}

void NodeCall::call(const at::Tensor* const* operands, const EvalInt& eval, std::vector<c10::IValue>& stack, std::vector<at::Tensor>& results) const {
  fill(operands, stack);
  const c10::AutoGradMode grad(keeps_for_backward_ || c10::GradMode::is_enabled());
  for (uint32_t i : symbolic_) stack[i] = to_ivalue(graph_, node_.args[i], kinds_[i], no_tensor, eval);
  if (on_copies_) return call_on_copies(node_, op_, stack, results);
  if (writes_) {
    const ir::TensorType& type = std::get<ir::Value>(node_.args[0]).type();
    std::vector<int64_t> strides;
    for (sym::Int s : type.strides) strides.push_back(s.is_const() ? s.value() : eval(s));
    stack[0] = copy_with(operands[0][0], strides);
    share_copy(kinds_, stack);
  }
  op_.callBoxed(stack);
  results.clear();
  flatten_results(stack, results);
  if (writes_ && !results[0].unsafeGetTensorImpl()->is_non_overlapping_and_dense()) results[0] = results[0].clone();
  stack.clear();
}

void NodeCall::call_out(at::Tensor& out, const at::Tensor* const* o) const {
  switch (out_) {
    case Out::Mm:
      at::mm_out(out, *o[0], *o[1]);
      return;
    case Out::Bmm:
      at::bmm_out(out, *o[0], *o[1]);
      return;
    case Out::Addmm:
      at::addmm_out(out, *o[0], *o[1], *o[2], beta_, alpha_);
      return;
    case Out::Baddbmm:
      at::baddbmm_out(out, *o[0], *o[1], *o[2], beta_, alpha_);
      return;
    case Out::None:
      break;
  }
  VT_UNREACHABLE();
}

}  // namespace vitrify
