// Numbers that change from call to call, as ops meet them: an op takes a tensor in place of such a number; foreach ops become one op per tensor.
#include <ATen/Dispatch_v2.h>
#include <ATen/OpMathType.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <limits>

#include "torch/convert.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"
#include "torch/versions.h"

namespace vitrify {

using c10::IValue;
using capture::as_fake;
using capture::fail;
using capture::OpInfo;
using compat::Stack;
using ir::TensorType;
using ir::Value;

namespace {

bool is_live(const IValue& v) { return v.isSymFloat() && capture::step_of(v.toSymFloat()).has_value(); }

// The numbers that ATen converts to that type without an error (c10::overflows, but for negative ones that it wraps): besides these, infinities and
// NaN if it has them.
std::pair<double, double> finite_range(at::ScalarType t) {
  return AT_DISPATCH_V2(t, "finite_range", AT_WRAP([] {
                          return std::pair(static_cast<double>(std::numeric_limits<scalar_t>::lowest()),
                                           static_cast<double>(std::numeric_limits<scalar_t>::max()));
                        }),
                        AT_EXPAND(AT_ALL_TYPES), at::kHalf, at::kBFloat16);
}

TensorType number_type() {
  TensorType t;
  t.dtype = DType::F64;
  return t;
}

// Eager of 2.11 ignores a bound that is NaN, where it is the only one of aten::clamp's.
bool ignores_nan_bound() {
  static const bool ignores = [] {
    const capture::Paused paused;
    const c10::InferenceMode ordinary(false);
    const c10::impl::ExcludeDispatchKeyGuard below(compat::above_backend_keys());
    return at::zeros({1}, at::kFloat).clamp(at::Scalar(std::numeric_limits<double>::quiet_NaN()), std::nullopt).eq(0).item<bool>();
  }();
  return ignores;
}

// Where two ops compute the same, the one that takes tensors: "aten::mul.Scalar" and "aten::mul.Tensor".
std::optional<c10::OperatorHandle> tensor_form(const c10::FunctionSchema& s) {
  if (!s.name().starts_with("aten::")) return std::nullopt;  // an overload of another's may be another op
  static const std::unordered_map<std::string, std::string> others = {{"Tensor_Scalar", "Tensor_Tensor"}, {"", "Tensor"}};
  std::vector<std::string> overloads{"Tensor"};
  if (auto it = others.find(s.overload_name()); it != others.end()) overloads.insert(overloads.begin(), it->second);
  for (const std::string& overload : overloads) {
    auto h = c10::Dispatcher::singleton().findSchema({s.name(), overload});
    if (!h || h->schema().arguments().size() < s.arguments().size()) continue;
    bool same = true;
    const auto &a = s.arguments(), &b = h->schema().arguments();
    for (size_t i = 0; i < b.size(); ++i) same = same && (i < a.size() ? a[i].name() == b[i].name() : b[i].default_value().has_value());
    if (same) return h;
  }
  return std::nullopt;
}

bool is_power(const c10::FunctionSchema& s) { return s.name() == "aten::pow" || s.name() == "aten::pow_"; }

// Of two operands, in which ops take a quotient of sizes as a tensor too; others take its value, of these sizes.
bool takes_quotient(const c10::FunctionSchema& s, const IValue& v) {
  return v.isSymFloat() && s.arguments().size() == 2 && !s.overload_name().empty() && !is_power(s) && capture::quotient_of(v.toSymFloat()) &&
         tensor_form(s);
}

// What ATen's kernels make of operands: they convert them to their common type, and compute in one in which halves are rounded once, at the end.
struct Computed {
  at::ScalarType type, in = at::toOpMathType(type);

  // A copy of a number is none, to which types would yield.
  at::Tensor operator()(const at::Tensor& t) const { return t.to(type, false, t.unsafeGetTensorImpl()->is_wrapped_number()).to(in); }
};

}  // namespace

// As c10::scalar_to_tensor gives it to ops.
at::Tensor Tracer::Impl::number_tensor(const IValue& v) {
  if (const auto q = v.isSymFloat() ? capture::quotient_of(v.toSymFloat()) : std::nullopt) {
    const TensorType type = number_type();
    const auto number = [&](sym::Int i) { return append("aten::scalar_tensor", {i, type.dtype, ir::None{}, ir::None{}, ir::None{}}, {type})->out(); };
    TensorType wrapped = type;
    wrapped.wrapped_number = true;
    const Value r = q->second.is(1) ? number(q->first) : append("aten::div.Tensor", {number(q->first), number(q->second)}, {type})->out();
    return new_tensor(append("aten::clone", {r, ir::MemoryFormat::Contiguous}, {wrapped})->out());
  }
  if (is_live(v)) return new_tensor(number_value(*capture::step_of(v.toSymFloat())));
  const c10::Scalar s = v.toScalar();
  at::Tensor t = at::detail::scalar_tensor_static(s, s.isFloatingPoint() ? at::kDouble : s.isBoolean() ? at::kBool : at::kLong, at::kCPU);
  t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

// In double, without being the number to which type promotion yields: that is what Python computes with.
Value Tracer::Impl::traced_value(uint32_t step) {
  using Op = Numbers::Op;
  const Numbers::Step s = numbers->steps[step];
  if (s.op == Op::Constant) {
    capture::Paused paused;
    return scalar_value(vitrify::number_tensor(s.constant), true);
  }
  if (!s.traced) return number_value(step);
  if (auto known = traced_values.find(step); known != traced_values.end()) return known->second;
  const TensorType type = number_type();
  auto op = [&](std::string_view name, std::vector<ir::Arg> args) { return append(name, std::move(args), {type})->out(); };
  Value r;
  if (s.op == Op::Traced) {
    r = cast(traced[s.a], type);
  } else {
    const Value a = traced_value(s.a);
    if (s.op == Op::Neg) {
      r = op("aten::neg", {a});
    } else if (const Value b = traced_value(s.b); s.op == Op::Add || s.op == Op::Sub) {
      r = op(s.op == Op::Add ? "aten::add.Tensor" : "aten::sub.Tensor", {a, b, sym::Int(1)});
    } else if (s.op == Op::Mul || s.op == Op::Div) {
      r = op(s.op == Op::Mul ? "aten::mul.Tensor" : "aten::div.Tensor", {a, b});
    } else {
      TensorType answer = type;
      answer.dtype = DType::Bool;
      const Value other = append(s.op == Op::Max ? "aten::gt.Tensor" : "aten::lt.Tensor", {b, a}, {answer})->out();
      r = op("aten::where.self", {other, b, a});
    }
  }
  return traced_values[step] = r;
}

Value Tracer::Impl::number_value(uint32_t step) {
  Value& v = number_values[step];
  if (v) return v;
  TensorType type = number_type();
  type.wrapped_number = true;
  if (numbers->steps[step].traced) return v = append("aten::clone", {traced_value(step), ir::MemoryFormat::Contiguous}, {type})->out();
  sources.push_back({{}, {}, ir::InputKind::Captured, fmt::format("number{}", number_values.size() - 1)});
  sources.back().input = static_cast<int32_t>(inputs.size());
  sources.back().number = step;
  inputs.push_back(&sources.back());
  return v = graph->add_input(ir::InputKind::Captured, sources.back().name, type);
}

// What item() gives: a number that the host knows before the call, or one that the graph will know.
std::optional<uint32_t> Tracer::Impl::step_of_item(Value v) {
  const size_t before = numbers->steps.size();
  steps_of.clear();
  if (auto step = step_of_value(v)) return step;
  numbers->steps.resize(before);
  numbers->seen.resize(before);
  const TensorType& type = v.type();
  if (type.dim() || type.device.kind != DeviceKind::CPU || (type.dtype != DType::F32 && type.dtype != DType::F64) || in_backward) return std::nullopt;
  traced.push_back(v);
  return numbers->add({Numbers::Op::Traced, static_cast<uint32_t>(traced.size() - 1)});
}

// Whether a number that only the graph knows is one of float32, or infinite or NaN.
bool Tracer::Impl::always_float(uint32_t step) const {
  using Op = Numbers::Op;
  std::vector<uint32_t> open{step};
  std::unordered_set<uint32_t> seen{step};
  while (!open.empty()) {
    const Numbers::Step& s = numbers->steps[open.back()];
    open.pop_back();
    if (s.op == Op::Traced) {
      if (traced[s.a].type().dtype != DType::F32) return false;
    } else if (s.op == Op::Constant) {
      if (static_cast<double>(static_cast<float>(s.constant)) != s.constant) return false;
    } else if (s.op == Op::Neg || s.op == Op::Min || s.op == Op::Max) {
      if (seen.insert(s.a).second) open.push_back(s.a);
      if (s.op != Op::Neg && seen.insert(s.b).second) open.push_back(s.b);
    } else {
      return false;
    }
  }
  return true;
}

// What a 0-d value of the graph will be, if it follows from inputs by arithmetic that rounds as ATen's does.
std::optional<uint32_t> Tracer::Impl::step_of_value(Value v) {
  if (const auto known = steps_of.find(v); known != steps_of.end()) return known->second;
  const std::optional<uint32_t> step = find_step(v);
  return steps_of[v] = step;
}

std::optional<uint32_t> Tracer::Impl::find_step(Value v) {
  using Op = Numbers::Op;
  const TensorType& type = v.type();
  if (type.dim() || type.device.kind != DeviceKind::CPU || !is_float(type.dtype)) return std::nullopt;
  const at::ScalarType scalar_type = scalar_type_of(type);
  const bool exact = type.dtype == DType::F64 || type.dtype == DType::F32;
  const ir::Node& n = *v.node;
  const std::string& name = n.op->name;
  auto rounded = [&](std::optional<uint32_t> s) { return s && type.dtype != DType::F64 ? numbers->add({Op::Round, *s, 0, 0, scalar_type}) : s; };
  auto literal = [&](const ir::Arg& a) -> std::optional<double> {
    if (auto* d = std::get_if<double>(&a)) return *d;
    if (auto* b = std::get_if<bool>(&a)) return *b;
    auto* i = std::get_if<sym::Int>(&a);
    constexpr int64_t kExact = int64_t{1} << 53;
    return i && i->is_const() && std::abs(i->value()) <= kExact ? std::optional(double(i->value())) : std::nullopt;
  };
  auto operand = [&](const ir::Arg& a) -> std::optional<uint32_t> {
    if (auto* x = std::get_if<Value>(&a)) {
      if (x->node->op->name != "aten::scalar_tensor") return rounded(step_of_value(*x));
      const std::optional<double> d = literal(x->node->args[0]);
      return d ? rounded(numbers->add({Op::Constant, 0, 0, *d})) : std::nullopt;
    }
    const std::optional<double> d = literal(a);
    return d ? rounded(numbers->add({Op::Constant, 0, 0, *d})) : std::nullopt;
  };
  if (name == "graph::input") {
    const Source& s = *inputs[static_cast<size_t>(std::get<sym::Int>(n.args[0]).value())];
    if (s.number) return s.number;
    if (!s.real.defined() || !s.real.device().is_cpu() || s.grad_of) return std::nullopt;
    for (uint32_t i = 0; i < numbers->steps.size(); ++i)
      if (numbers->steps[i].op == Op::Item && numbers->steps[i].a == static_cast<uint32_t>(s.input)) return i;
    const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKeySet(c10::DispatchKey::Python));
    return numbers->add({Op::Item, static_cast<uint32_t>(s.input)}, number_in(s.real.detach()));
  }
  if (name == "aten::scalar_tensor") return operand(Value(v));
  if (name == "aten::clone" || name == "aten::_to_copy") {
    auto* from = std::get_if<Value>(&n.args[0]);
    return from && is_float(from->type().dtype) ? operand(n.args[0]) : std::nullopt;
  }
  if (!exact) return std::nullopt;
  if (name == "aten::neg") {
    auto a = operand(n.args[0]);
    return a ? numbers->add({Op::Neg, *a}) : std::nullopt;
  }
  if (name == "aten::sqrt") {
    auto a = operand(n.args[0]);
    return a ? rounded(numbers->add({Op::Sqrt, *a})) : std::nullopt;
  }
  static const std::unordered_map<std::string_view, Op> binary = {
      {"aten::add.Tensor", Op::Add}, {"aten::sub.Tensor", Op::Sub}, {"aten::mul.Tensor", Op::Mul}, {"aten::div.Tensor", Op::Div}};
  auto it = binary.find(name);
  if (it == binary.end()) return std::nullopt;
  if (n.args.size() > 2) {  // a factor is another rounding
    auto* d = std::get_if<double>(&n.args[2]);
    auto* i = std::get_if<sym::Int>(&n.args[2]);
    if (!(d && *d == 1) && !(i && i->is(1))) return std::nullopt;
  }
  auto a = operand(n.args[0]), b = operand(n.args[1]);
  return a && b ? rounded(numbers->add({it->second, *a, *b})) : std::nullopt;
}

bool Tracer::Impl::has_live_number(const OpInfo& info, const Stack& stack) const {
  const size_t n = info.args.size();
  for (size_t i = 0; i < n; ++i) {
    const IValue& v = stack[stack.size() - n + i];
    if (takes_quotient(info.op.schema(), v)) return true;
    if (numbers->steps.empty()) continue;
    if (is_live(v)) return true;
    if (info.args[i] == ArgKind::ScalarList && v.isList())
      for (const IValue& e : v.toListRef())
        if (is_live(e)) return true;
  }
  return false;
}

// The mode is on the stack: what is called here arrives as ops of its own.
void Tracer::Impl::decompose_numbers(const OpInfo& info, Stack* stack) {
  const c10::FunctionSchema& schema = info.op.schema();
  const size_t n = info.args.size();
  Stack a(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
  const std::string& base = schema.name();
  const bool in_place = base.ends_with("_");
  const std::string op = in_place ? base.substr(0, base.size() - 1) : base;
  auto finish = [&](const at::Tensor& t) {
    stack->erase(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
    stack->emplace_back(in_place ? a[0].toTensor() : t);
  };
  auto refuse = [&]() { fail(fmt::format("{} takes a number that changes from call to call", info.name)); };
  auto T = [&](size_t i) { return number_tensor(a[i]); };
  auto constant = [&](double v) { return *numbers->add({Numbers::Op::Constant, 0, 0, v}); };
  auto number = [&](uint32_t step) { return number_tensor(capture::to_sym_float(numbers, step)); };
  // Where ATen converts the number to the type that it computes in, and raises if that has no such value: eager does that.
  auto fitting = [&](size_t i, at::ScalarType type) {
    type = at::toRealValueType(type);
    if (!is_live(a[i]) || type == at::kDouble || type == at::kBool) return T(i);
    const uint32_t w = *capture::step_of(a[i].toSymFloat());
    const Numbers::Step s = numbers->steps[w];
    if (s.traced) {  // only the graph knows it, and raises
      if (type != at::kFloat) refuse();
      if (!always_float(w)) {
        const at::Tensor v = new_tensor(traced_value(w));
        const at::Tensor fits = v.abs().le(finite_range(type).second).logical_or(v.isfinite().logical_not());
        at::_assert_async(fits, "value cannot be converted to type float without overflow");
      }
      return T(i);
    }
    using enum Numbers::Compare;
    constexpr double kInf = std::numeric_limits<double>::infinity();
    const auto [lowest, highest] = finite_range(type);
    if (numbers->compare(Le, constant(lowest), w) && numbers->compare(Le, w, constant(highest))) return T(i);
    if (!at::isFloatingType(type)) refuse();
    if (!numbers->compare(Ne, w, w) && !numbers->compare(Eq, w, constant(kInf)) && !numbers->compare(Eq, w, constant(-kInf))) refuse();
    return T(i);
  };
  // Of a sum in which one operand, or a product, is multiplied by number i: the types, where they are of those that take any number.
  auto types_of = [&](at::TensorList operands) {
    const Computed c{at::native::result_type(operands)};
    if (!at::isFloatingType(c.type)) refuse();  // of complex infinities it depends on the kernel which parts become NaN
    return c;
  };
  auto give = [&](const Computed& c, const at::Tensor& r) {
    if (in_place && !at::can_cast(c.type, a[0].toTensor().scalar_type())) refuse();
    return finish(in_place ? a[0].toTensor().copy_(r) : r.to(c.type));
  };
  const bool out = schema.is_mutable() && !in_place;
  if (out) refuse();
  if (in_place) {  // by ops that read nothing of what they write
    Stack met;
    for (const IValue& v : a) met.push_back(v.isTensor() ? IValue(fake_of(v.toTensor())) : v);
    check_write(met[0].toTensor(), met, info.name);
  }

  if (op == "aten::add" || op == "aten::sub" || op == "aten::rsub") {  // self, other, alpha
    at::Tensor self = a[0].toTensor(), other = a[1].isTensor() ? a[1].toTensor() : T(1);
    if (op == "aten::rsub") std::swap(self, other);
    if (!is_live(a[2])) {
      const c10::Scalar alpha = a[2].toScalar();
      if (op == "aten::add") return finish(in_place ? self.add_(other, alpha) : self.add(other, alpha));
      return finish(in_place ? self.sub_(other, alpha) : self.sub(other, alpha));
    }
    if (op != "aten::add" && (self.scalar_type() == at::kBool || other.scalar_type() == at::kBool)) refuse();
    const Computed c = types_of({self, other});
    const at::Tensor term = c(other).mul(c(fitting(2, c.type)));
    return give(c, op == "aten::add" ? c(self).add(term) : c(self).sub(term));
  }
  if (op == "aten::addcmul" || op == "aten::addcdiv") {  // self, tensor1, tensor2, value
    const at::Tensor self = a[0].toTensor(), x = a[1].toTensor(), y = a[2].toTensor();
    const Computed c = types_of({self, x, y});
    if (op == "aten::addcdiv" && at::isIntegralType(x.scalar_type(), true) && at::isIntegralType(y.scalar_type(), true)) refuse();
    const at::Tensor scaled = c(x).mul(fitting(3, c.in).to(c.in));
    return give(c, c(self).add(op == "aten::addcmul" ? scaled.mul(c(y)) : scaled.div(c(y))));
  }
  if (op == "aten::lerp") {  // self, end, weight; which of two forms eager takes depends on the weight
    const at::Tensor self = a[0].toTensor(), end = a[1].toTensor();
    if (!self.is_floating_point() || self.scalar_type() != end.scalar_type()) refuse();
    const Computed c{self.scalar_type()};
    uint32_t w = *capture::step_of(a[2].toSymFloat());
    if (numbers->steps[w].traced) refuse();  // only the graph knows which form it is
    if (c.in != at::kDouble) w = *numbers->add({Numbers::Op::Round, w, 0, 0, c.in});
    const bool small = numbers->compare(Numbers::Compare::Lt, w, constant(0.5)) && numbers->compare(Numbers::Compare::Lt, constant(-0.5), w);
    const at::Tensor distance = c(end).sub(c(self));
    if (small) return give(c, c(self).add(distance.mul(number(w))));
    return give(c, c(end).sub(distance.mul(number(*numbers->add({Numbers::Op::Sub, constant(1), w})))));
  }
  if (op == "aten::clamp" || op == "aten::clamp_min" || op == "aten::clamp_max") {
    const at::Tensor self = a[0].toTensor();
    auto bound = [&](size_t i) {
      const at::ScalarType type = at::result_type(self, T(i));
      return fitting(i, type).to(type);
    };
    std::optional<at::Tensor> low, high;
    if (op == "aten::clamp_max") {
      high = bound(1);
    } else {
      if (!a[1].isNone()) low = bound(1);
      if (n > 2 && !a[2].isNone()) high = bound(2);
    }
    if (op == "aten::clamp" && low.has_value() != high.has_value() && ignores_nan_bound()) {
      constexpr double kInf = std::numeric_limits<double>::infinity();
      (low ? low : high) = (low ? low : high)->nan_to_num(low ? -kInf : kInf, kInf, -kInf);
    }
    const at::Tensor r = self.clamp(low, high);
    return give({r.scalar_type()}, r);
  }
  if (op == "aten::fill") {
    const at::Tensor self = a[0].toTensor();
    const at::Tensor value = fitting(1, self.scalar_type());
    return finish(in_place ? self.copy_(value) : at::empty_like(self).copy_(value));
  }
  if (op == "aten::full" || op == "aten::full_like" || op == "aten::new_full" || op == "aten::scalar_tensor") {
    Stack plain = a;
    const size_t value = static_cast<size_t>(std::ranges::find_if(a, is_live) - a.begin());
    plain[value] = 0.0;
    info.op.callBoxed(&plain);
    const at::Tensor t = plain[0].toTensor();
    return finish(t.copy_(fitting(value, t.scalar_type())));
  }
  auto form = tensor_form(schema);
  if (is_power(schema)) {
    const size_t live = is_live(a[0]) ? 0 : 1;
    const at::ScalarType type = at::result_type(live ? a[0].toTensor() : T(0), live ? T(1) : a[1].toTensor());
    if (!at::isFloatingType(type)) refuse();  // of complex ones ATen computes many powers otherwise
    if (!live || in_place) form = c10::Dispatcher::singleton().findSchema({base, in_place ? "Tensor" : "Tensor_Tensor"});
    if (live) {
      // Square roots differ from powers at zeros and infinities; of float16 ATen takes none.
      const at::Tensor self = a[0].toTensor(), exponent = fitting(1, type).to(type);
      const uint32_t w = *capture::step_of(a[1].toSymFloat());
      const bool traced = numbers->steps[w].traced, roots = type != at::kHalf;
      if (traced && roots) {
        if (self.requires_grad() && c10::GradMode::is_enabled()) refuse();  // the gradient of what is not taken may be NaN
        const at::Tensor x = self.to(type), v = new_tensor(traced_value(w));
        return give({type}, at::where(v.eq(0.5), x.sqrt(), at::where(v.eq(-0.5), x.rsqrt(), x.pow(exponent))));
      }
      const auto is = [&](double root) { return roots && numbers->compare(Numbers::Compare::Eq, w, constant(root)); };
      const std::optional<double> root = is(0.5) ? std::optional(0.5) : is(-0.5) ? std::optional(-0.5) : std::nullopt;
      Stack call = a;
      call[1] = root ? IValue(*root) : IValue(exponent);
      (root ? info.op : *form).callBoxed(&call);
      return finish(call[0].toTensor());
    }
  }
  // The rest computes with a tensor in the number's place what it computes with the number.
  const bool fills = op == "aten::masked_fill";
  if (fills) form = c10::Dispatcher::singleton().findSchema({base, "Tensor"});
  if (!form) refuse();
  Stack call = a;
  for (size_t i = 0; i < n; ++i)
    if (is_live(call[i]) || takes_quotient(schema, call[i])) call[i] = fills ? fitting(i, a[0].toTensor().scalar_type()) : T(i);
  form->callBoxed(&call);
  finish(call[0].toTensor());
}

// ATen's own loops over the lists.
void Tracer::Impl::decompose_list(const OpInfo& info, Stack* stack) {
  if (!info.op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
    fail(fmt::format("calls {}, which cannot be captured", info.name));
  const size_t n = info.args.size();
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < n; ++i) {
    const IValue& v = (*stack)[stack->size() - n + i];
    auto* alias = info.op.schema().arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    if (!v.isTensorList()) fail(fmt::format("calls {}, which cannot be captured", info.name));
    for (const at::Tensor& t : v.toTensorVector()) written.push_back(t);
  }
  check_inference(written, info);
  info.op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
  // Eager's kernels count one write, however many ops they are here; for other ops the layer above does.
  for (const at::Tensor& t : written)
    if (counts_versions(t)) t.unsafeGetTensorImpl()->bump_version();
}

}  // namespace vitrify
