#include "torch/extern_call.h"

#include "support/error.h"

namespace vitrify {

using ir::Arg;

at::ScalarType scalar_type_of(DType t) {
  switch (t) {
    case DType::Bool: return at::kBool;
    case DType::U8: return at::kByte;
    case DType::I8: return at::kChar;
    case DType::I16: return at::kShort;
    case DType::I32: return at::kInt;
    case DType::I64: return at::kLong;
    case DType::F16: return at::kHalf;
    case DType::BF16: return at::kBFloat16;
    case DType::F32: return at::kFloat;
    case DType::F64: return at::kDouble;
    case DType::C64: return at::kComplexFloat;
    case DType::C128: return at::kComplexDouble;
    case DType::Opaque: break;
  }
  VT_UNREACHABLE("opaque dtype");
}

at::ScalarType scalar_type_of(const ir::TensorType& t) {
  return t.dtype == DType::Opaque ? static_cast<at::ScalarType>(t.opaque_scalar_type) : scalar_type_of(t.dtype);
}

c10::OperatorHandle find_aten_op(const std::string& name) {
  auto dot = name.find('.', name.find("::") == std::string::npos ? 0 : name.find("::"));
  std::string base = name.substr(0, dot), overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  auto op = c10::Dispatcher::singleton().findSchema({base, overload});
  VT_CHECK(op.has_value(), "no such op: {}", name);
  return *op;
}

namespace {

c10::TypePtr strip(const c10::TypePtr& t) {
  if (auto o = t->cast<c10::OptionalType>()) return o->getElementType();
  return t;
}

at::MemoryFormat memory_format(ir::MemoryFormat f) {
  switch (f) {
    case ir::MemoryFormat::Contiguous: return at::MemoryFormat::Contiguous;
    case ir::MemoryFormat::Preserve: return at::MemoryFormat::Preserve;
    case ir::MemoryFormat::ChannelsLast: return at::MemoryFormat::ChannelsLast;
    case ir::MemoryFormat::ChannelsLast3d: return at::MemoryFormat::ChannelsLast3d;
  }
  VT_UNREACHABLE();
}

// Numbers of an argument list, as doubles or ints.
template <class T>
std::optional<std::vector<T>> numbers(const Arg& a) {
  std::vector<T> out;
  if (auto* v = std::get_if<std::vector<sym::Int>>(&a)) {
    for (auto i : *v) {
      if (!i.is_const()) return std::nullopt;
      out.push_back(static_cast<T>(i.value()));
    }
    return out;
  }
  if (auto* v = std::get_if<std::vector<double>>(&a)) return std::vector<T>(v->begin(), v->end());
  if (auto* v = std::get_if<std::vector<bool>>(&a)) return std::vector<T>(v->begin(), v->end());
  if (auto* v = std::get_if<std::vector<ir::Value>>(&a); v && v->empty()) return out;
  return std::nullopt;
}

std::optional<at::Scalar> scalar(const Arg& a) {
  if (auto* i = std::get_if<sym::Int>(&a); i && i->is_const()) return at::Scalar(i->value());
  if (auto* d = std::get_if<double>(&a)) return at::Scalar(*d);
  if (auto* b = std::get_if<bool>(&a)) return at::Scalar(*b);
  if (auto* c = std::get_if<ir::Complex>(&a)) return at::Scalar(c10::complex<double>(c->re, c->im));
  return std::nullopt;
}

}  // namespace

void NodeCall::push(const Arg& a, const c10::Argument& schema, const ir::Graph& g, uint32_t& operand) {
  const auto at = static_cast<uint32_t>(arguments_.size());
  c10::TypePtr type = strip(schema.type());
  auto list = type->cast<c10::ListType>();
  auto put = [&](c10::IValue v) { arguments_.push_back(std::move(v)); };

  if (auto* v = std::get_if<ir::Value>(&a)) {
    if (*v) holes_.push_back({at, operand++});
    // an undefined tensor where the schema demands one, else None
    return put(*v || schema.type()->kind() == c10::TypeKind::TensorType ? c10::IValue(at::Tensor()) : c10::IValue());
  }
  if (auto* v = std::get_if<std::vector<ir::Value>>(&a); v && list && !(v->empty() && list->getElementType()->kind() != c10::TypeKind::TensorType && list->getElementType()->kind() != c10::TypeKind::OptionalType)) {
    Hole h{at, operand, static_cast<int32_t>(v->size())};
    h.optional_list = list->getElementType()->kind() == c10::TypeKind::OptionalType;
    for (auto& x : *v) {
      h.present.push_back(static_cast<bool>(x));
      operand += static_cast<bool>(x);
    }
    holes_.push_back(std::move(h));
    return put({});
  }
  if (std::holds_alternative<ir::None>(a)) {
    if (schema.type()->kind() == c10::TypeKind::TensorType) return put(at::Tensor());
    return put({});
  }
  if (auto* o = std::get_if<ir::OpaqueArg>(&a)) {
    VT_CHECK(o->index < g.constants.size() && g.constants[o->index], "opaque argument without a payload");
    return put(*static_cast<c10::IValue*>(g.constants[o->index].get()));
  }
  if (auto* s = std::get_if<std::string>(&a)) return put(*s);
  if (auto* d = std::get_if<DType>(&a)) return put(static_cast<int64_t>(scalar_type_of(*d)));
  if (auto* f = std::get_if<ir::MemoryFormat>(&a)) return put(static_cast<int64_t>(memory_format(*f)));
  if (auto* l = std::get_if<ir::Layout>(&a)) {
    VT_CHECK(*l == ir::Layout::Strided, "layout");
    return put(static_cast<int64_t>(at::kStrided));
  }
  if (auto* d = std::get_if<Device>(&a)) {
    VT_CHECK(d->kind != DeviceKind::Other, "device");
    return put(at::Device(d->kind == DeviceKind::CPU ? at::kCPU : at::kCUDA, d->index));
  }
  if (list) {
    c10::TypePtr elem = list->getElementType();
    c10::TypeKind kind = strip(elem)->kind();
    if (elem->kind() == c10::TypeKind::OptionalType && kind == c10::TypeKind::NumberType) {
      c10::List<std::optional<at::Scalar>> out;
      for (double x : numbers<double>(a).value()) out.push_back(at::Scalar(x));
      return put(c10::IValue(out));
    }
    if (kind == c10::TypeKind::NumberType) {
      c10::List<at::Scalar> out;
      for (double x : numbers<double>(a).value()) out.push_back(at::Scalar(x));
      return put(c10::IValue(out));
    }
    if (kind == c10::TypeKind::FloatType) return put(c10::IValue(numbers<double>(a).value()));
    if (kind == c10::TypeKind::BoolType) {
      c10::List<bool> out;
      for (int64_t x : numbers<int64_t>(a).value()) out.push_back(x != 0);
      return put(c10::IValue(out));
    }
    if (auto* i = std::get_if<sym::Int>(&a)) {  // int[2] given as one number
      int64_t n = schema.N().value_or(1);
      if (!i->is_const()) {
        symbolic_.push_back({at, std::vector<sym::Int>(static_cast<size_t>(n), *i), true});
        return put({});
      }
      return put(c10::IValue(std::vector<int64_t>(static_cast<size_t>(n), i->value())));
    }
    if (auto n = numbers<int64_t>(a)) return put(c10::IValue(*n));
    symbolic_.push_back({at, std::get<std::vector<sym::Int>>(a), true});
    return put({});
  }
  if (auto* i = std::get_if<sym::Int>(&a)) {
    if (!i->is_const()) {
      symbolic_.push_back({at, {*i}, false});
      return put({});
    }
    if (type->kind() == c10::TypeKind::FloatType) return put(static_cast<double>(i->value()));
    if (type->kind() == c10::TypeKind::BoolType) return put(i->value() != 0);
    return put(i->value());
  }
  if (auto* d = std::get_if<double>(&a)) return put(*d);
  if (auto* b = std::get_if<bool>(&a)) return put(*b);
  if (auto* c = std::get_if<ir::Complex>(&a)) return put(c10::IValue(c10::complex<double>(c->re, c->im)));
  VT_UNREACHABLE("argument {} of {}", schema.name(), op_.schema().name());
}

NodeCall::NodeCall(const ir::Node& n, const ir::Graph& g) : op_(find_aten_op(n.op->name)) {
  const auto& schema = op_.schema();
  VT_CHECK(n.args.size() == schema.arguments().size(), "{} has {} arguments, its schema {}", n.op->name, n.args.size(), schema.arguments().size());
  uint32_t operand = 0;
  for (size_t i = 0; i < n.args.size(); ++i) push(n.args[i], schema.arguments()[i], g, operand);

  const std::string& name = n.op->name;
  if (name == "aten::mm") out_ = Out::Mm;
  if (name == "aten::bmm") out_ = Out::Bmm;
  if (name == "aten::addmm" || name == "aten::baddbmm") {
    auto beta = scalar(n.args[3]), alpha = scalar(n.args[4]);
    if (beta && alpha) {
      out_ = name == "aten::addmm" ? Out::Addmm : Out::Baddbmm;
      beta_ = *beta;
      alpha_ = *alpha;
    }
  }
}

void NodeCall::call(const at::Tensor* const* operands, const EvalInt& eval, std::vector<c10::IValue>& stack, std::vector<at::Tensor>& results) const {
  stack.assign(arguments_.begin(), arguments_.end());
  for (const Hole& h : holes_) {
    if (h.count < 0) {
      stack[h.arg] = *operands[h.operand];
    } else if (h.optional_list) {
      c10::List<std::optional<at::Tensor>> l;
      uint32_t k = h.operand;
      for (char p : h.present) l.push_back(p ? std::optional<at::Tensor>(*operands[k++]) : std::nullopt);
      stack[h.arg] = std::move(l);
    } else {
      c10::List<at::Tensor> l;
      uint32_t k = h.operand;
      for (char p : h.present) l.push_back(p ? *operands[k++] : at::Tensor());
      stack[h.arg] = std::move(l);
    }
  }
  for (const Symbolic& s : symbolic_) {
    if (!s.list) {
      stack[s.arg] = eval(s.ints[0]);
      continue;
    }
    std::vector<int64_t> v;
    for (auto i : s.ints) v.push_back(i.is_const() ? i.value() : eval(i));
    stack[s.arg] = c10::IValue(v);
  }
  op_.callBoxed(stack);
  results.clear();
  for (c10::IValue& v : stack) {
    if (v.isTensor()) {
      results.push_back(std::move(v).toTensor());
    } else if (v.isTensorList()) {
      for (at::Tensor t : v.toTensorList()) results.push_back(std::move(t));
    } else if (v.isNone()) {
      results.emplace_back();
    }
  }
  stack.clear();
}

void NodeCall::call_out(at::Tensor& out, const at::Tensor* const* o) const {
  switch (out_) {
    case Out::Mm: at::mm_out(out, *o[0], *o[1]); return;
    case Out::Bmm: at::bmm_out(out, *o[0], *o[1]); return;
    case Out::Addmm: at::addmm_out(out, *o[0], *o[1], *o[2], beta_, alpha_); return;
    case Out::Baddbmm: at::baddbmm_out(out, *o[0], *o[1], *o[2], beta_, alpha_); return;
    case Out::None: break;
  }
  VT_UNREACHABLE();
}

}  // namespace vitrify
