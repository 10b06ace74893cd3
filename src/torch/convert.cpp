#include "torch/convert.h"

#include "torch/sym_node.h"

namespace vitrify {

DType to_dtype(at::ScalarType t) {
  switch (t) {
    case at::kBool:
      return DType::Bool;
    case at::kByte:
      return DType::U8;
    case at::kChar:
      return DType::I8;
    case at::kShort:
      return DType::I16;
    case at::kInt:
      return DType::I32;
    case at::kLong:
      return DType::I64;
    case at::kHalf:
      return DType::F16;
    case at::kBFloat16:
      return DType::BF16;
    case at::kFloat:
      return DType::F32;
    case at::kDouble:
      return DType::F64;
    case at::kComplexFloat:
      return DType::C64;
    case at::kComplexDouble:
      return DType::C128;
    default:
      return DType::Opaque;
  }
}

at::ScalarType to_scalar_type(DType t, uint8_t opaque) {
  switch (t) {
    case DType::Bool:
      return at::kBool;
    case DType::U8:
      return at::kByte;
    case DType::I8:
      return at::kChar;
    case DType::I16:
      return at::kShort;
    case DType::I32:
      return at::kInt;
    case DType::I64:
      return at::kLong;
    case DType::F16:
      return at::kHalf;
    case DType::BF16:
      return at::kBFloat16;
    case DType::F32:
      return at::kFloat;
    case DType::F64:
      return at::kDouble;
    case DType::C64:
      return at::kComplexFloat;
    case DType::C128:
      return at::kComplexDouble;
    case DType::Opaque:
      return static_cast<at::ScalarType>(opaque);
  }
  VT_UNREACHABLE("dtype {}", int(t));
}

at::ScalarType scalar_type_of(const ir::TensorType& t) { return to_scalar_type(t.dtype, t.opaque_scalar_type); }

Device to_device(c10::Device d) {
  DeviceKind kind = d.is_cpu() ? DeviceKind::CPU : d.is_cuda() ? DeviceKind::CUDA : DeviceKind::Other;
  return {kind, kind == DeviceKind::CPU ? int8_t(-1) : static_cast<int8_t>(d.index())};
}

c10::Device to_torch_device(Device d) {
  VT_CHECK(d.kind != DeviceKind::Other);
  return d.kind == DeviceKind::CPU ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, d.index);
}

ir::TensorType type_of(const at::Tensor& t) {
  ir::TensorType r;
  r.dtype = to_dtype(t.scalar_type());
  if (r.dtype == DType::Opaque) r.opaque_scalar_type = static_cast<uint8_t>(t.scalar_type());
  r.device = to_device(t.device());
  for (int64_t s : t.sizes()) r.sizes.push_back(s);
  for (int64_t s : t.strides()) r.strides.push_back(s);
  r.wrapped_number = t.unsafeGetTensorImpl()->is_wrapped_number();
  return r;
}

int64_t value_of(sym::Int i) { return i.is_const() ? i.value() : sym::hint(i); }

std::vector<int64_t> values_of(const ir::Dims& d) {
  std::vector<int64_t> r;
  r.reserve(d.size());
  for (const sym::Int& i : d) r.push_back(value_of(i));
  return r;
}

ir::TensorType undefined_type() {
  ir::TensorType t;
  t.dtype = DType::Opaque;
  t.opaque_scalar_type = static_cast<uint8_t>(at::ScalarType::Undefined);
  return t;
}

bool is_undefined(const ir::TensorType& t) {
  return t.dtype == DType::Opaque && t.opaque_scalar_type == static_cast<uint8_t>(at::ScalarType::Undefined);
}

ArgKind kind_of(const c10::Argument& a) {
  c10::TypePtr t = a.real_type();
  if (auto o = t->cast<c10::OptionalType>()) t = o->getElementType();
  if (auto l = t->cast<c10::ListType>()) {
    c10::TypePtr e = l->getElementType();
    switch (e->kind()) {
      case c10::TypeKind::TensorType:
        return ArgKind::TensorList;
      case c10::TypeKind::OptionalType:
        return e->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::TensorType ? ArgKind::OptionalTensorList
                                                                                                       : ArgKind::Opaque;
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType:
        return ArgKind::IntList;
      case c10::TypeKind::FloatType:
        return ArgKind::FloatList;
      case c10::TypeKind::BoolType:
        return ArgKind::BoolList;
      case c10::TypeKind::NumberType:
        return ArgKind::ScalarList;
      default:
        return ArgKind::Opaque;
    }
  }
  switch (t->kind()) {
    case c10::TypeKind::TensorType:
      return ArgKind::Tensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return ArgKind::Int;
    case c10::TypeKind::NumberType:
      return ArgKind::Scalar;
    case c10::TypeKind::FloatType:
      return ArgKind::Float;
    case c10::TypeKind::BoolType:
      return ArgKind::Bool;
    case c10::TypeKind::StringType:
      return ArgKind::String;
    case c10::TypeKind::ScalarTypeType:
      return ArgKind::ScalarType;
    case c10::TypeKind::DeviceObjType:
      return ArgKind::Device;
    case c10::TypeKind::LayoutType:
      return ArgKind::Layout;
    case c10::TypeKind::MemoryFormatType:
      return ArgKind::MemoryFormat;
    default:
      return ArgKind::Opaque;
  }
}

std::vector<ArgKind> arg_kinds(const c10::FunctionSchema& s) {
  std::vector<ArgKind> r;
  for (const auto& a : s.arguments()) r.push_back(kind_of(a));
  return r;
}

namespace {

ir::Arg opaque(ir::Graph& g, const c10::IValue& v) {
  g.constants.push_back(std::make_shared<c10::IValue>(v));
  return ir::OpaqueArg{static_cast<uint32_t>(g.constants.size() - 1)};
}

ir::Arg number(const c10::IValue& v) {
  if (v.isBool()) return v.toBool();
  if (v.isDouble()) return v.toDouble();
  if (v.isComplexDouble()) {
    auto c = v.toComplexDouble();
    return ir::Complex{c.real(), c.imag()};
  }
  if (v.isSymBool()) return v.toSymBool().guard_bool(__FILE__, __LINE__);
  if (v.isSymFloat()) return v.toSymFloat().guard_float(__FILE__, __LINE__);
  return v.isSymInt() ? capture::from_sym_int(v.toSymInt()) : sym::Int(v.toInt());
}

c10::IValue number(const ir::Arg& a, const std::function<int64_t(sym::Int)>& int_of) {
  if (auto* b = std::get_if<bool>(&a)) return *b;
  if (auto* d = std::get_if<double>(&a)) return *d;
  if (auto* c = std::get_if<ir::Complex>(&a)) return c10::complex<double>(c->re, c->im);
  return int_of(std::get<sym::Int>(a));
}

}  // namespace

ir::Arg to_arg(ir::Graph& g, const c10::IValue& v, ArgKind kind, const std::function<ir::Value(const at::Tensor&)>& resolve) {
  if (v.isNone()) return ir::None{};
  auto value = [&](const at::Tensor& t) { return t.defined() ? resolve(t) : ir::Value{}; };
  switch (kind) {
    case ArgKind::Tensor: {
      ir::Value r = value(v.toTensor());
      return r ? ir::Arg(r) : ir::Arg(ir::None{});
    }
    case ArgKind::TensorList: {
      std::vector<ir::Value> r;
      for (const at::Tensor& t : v.toTensorVector()) r.push_back(value(t));
      return r;
    }
    case ArgKind::OptionalTensorList: {
      std::vector<ir::Value> r;
      for (const c10::IValue& e : v.toListRef()) r.push_back(e.isNone() ? ir::Value{} : value(e.toTensor()));
      return r;
    }
    case ArgKind::IntList:
      return capture::ints_of(v);
    case ArgKind::FloatList:
      return v.toDoubleVector();
    case ArgKind::BoolList: {
      std::vector<bool> r;
      for (bool b : v.toBoolList()) r.push_back(b);
      return r;
    }
    case ArgKind::Int:
      return v.isBool() ? ir::Arg(sym::Int(int64_t(v.toBool()))) : number(v);
    case ArgKind::Float:
      return v.isInt() || v.isSymInt() ? double(v.toInt()) : number(v);
    case ArgKind::Bool:
      return v.isInt() ? ir::Arg(v.toInt() != 0) : number(v);
    case ArgKind::Scalar:
      return number(v);
    case ArgKind::String:
      return std::string(v.toStringRef());
    case ArgKind::ScalarType: {
      DType d = to_dtype(v.toScalarType());
      return d == DType::Opaque ? opaque(g, v) : ir::Arg(d);
    }
    case ArgKind::Device:
      return to_device(v.toDevice());
    case ArgKind::Layout:
      return v.toLayout() == at::kStrided ? ir::Layout::Strided : ir::Layout::Other;
    case ArgKind::MemoryFormat:
      switch (v.toMemoryFormat()) {
        case at::MemoryFormat::Contiguous:
          return ir::MemoryFormat::Contiguous;
        case at::MemoryFormat::Preserve:
          return ir::MemoryFormat::Preserve;
        case at::MemoryFormat::ChannelsLast:
          return ir::MemoryFormat::ChannelsLast;
        case at::MemoryFormat::ChannelsLast3d:
          return ir::MemoryFormat::ChannelsLast3d;
        default:
          VT_UNREACHABLE("memory format");
      }
    case ArgKind::ScalarList:
    case ArgKind::Opaque:
      return opaque(g, v);
  }
  VT_UNREACHABLE("argument kind {}", int(kind));
}

c10::IValue to_ivalue(const ir::Graph& g, const ir::Arg& a, ArgKind kind, const std::function<at::Tensor(const ir::Value&)>& tensor_of,
                      const std::function<int64_t(sym::Int)>& int_of) {
  if (std::holds_alternative<ir::None>(a)) return {};
  if (auto* o = std::get_if<ir::OpaqueArg>(&a)) return *std::static_pointer_cast<c10::IValue>(g.constants.at(o->index));
  switch (kind) {
    case ArgKind::Tensor:
      if (auto* i = std::get_if<sym::Int>(&a)) return int_of(*i);  // as that argument, which is written (share_copy)
      return tensor_of(std::get<ir::Value>(a));
    case ArgKind::TensorList: {
      c10::List<at::Tensor> l;
      for (const ir::Value& v : std::get<std::vector<ir::Value>>(a)) l.push_back(v ? tensor_of(v) : at::Tensor());
      return l;
    }
    case ArgKind::OptionalTensorList: {
      c10::List<std::optional<at::Tensor>> l;
      for (const ir::Value& v : std::get<std::vector<ir::Value>>(a)) l.push_back(v ? std::optional<at::Tensor>(tensor_of(v)) : std::nullopt);
      return l;
    }
    case ArgKind::IntList: {
      std::vector<int64_t> l;
      for (const sym::Int& i : std::get<std::vector<sym::Int>>(a)) l.push_back(int_of(i));
      return l;
    }
    case ArgKind::FloatList:
      return std::get<std::vector<double>>(a);
    case ArgKind::BoolList: {
      c10::List<bool> l;
      for (bool b : std::get<std::vector<bool>>(a)) l.push_back(b);
      return l;
    }
    case ArgKind::Float:
      if (auto* i = std::get_if<sym::Int>(&a)) return double(int_of(*i));
      return number(a, int_of);
    case ArgKind::Int:
    case ArgKind::Bool:
    case ArgKind::Scalar:
      return number(a, int_of);
    case ArgKind::String:
      return std::get<std::string>(a);
    case ArgKind::ScalarType:
      return to_scalar_type(std::get<DType>(a));
    case ArgKind::Device:
      return to_torch_device(std::get<Device>(a));
    case ArgKind::Layout:
      VT_CHECK(std::get<ir::Layout>(a) == ir::Layout::Strided, "only strided layouts are recorded");
      return at::kStrided;
    case ArgKind::MemoryFormat:
      switch (std::get<ir::MemoryFormat>(a)) {
        case ir::MemoryFormat::Contiguous:
          return at::MemoryFormat::Contiguous;
        case ir::MemoryFormat::Preserve:
          return at::MemoryFormat::Preserve;
        case ir::MemoryFormat::ChannelsLast:
          return at::MemoryFormat::ChannelsLast;
        case ir::MemoryFormat::ChannelsLast3d:
          return at::MemoryFormat::ChannelsLast3d;
      }
      [[fallthrough]];
    default:
      VT_UNREACHABLE("argument kind {}", int(kind));
  }
}

void flatten_results(const compat::Stack& stack, std::vector<at::Tensor>& out) {
  for (const c10::IValue& v : stack) {
    if (v.isTensor()) {
      out.push_back(v.toTensor());
    } else if (v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorVector()) out.push_back(t);
    }
  }
}

std::string op_name(const c10::OperatorName& n) { return n.overload_name.empty() ? n.name : n.name + "." + n.overload_name; }

std::optional<c10::OperatorHandle> find_operator(std::string_view name) {
  size_t dot = name.find('.', name.find("::"));
  c10::OperatorName n(std::string(name.substr(0, dot)), dot == std::string_view::npos ? "" : std::string(name.substr(dot + 1)));
  return c10::Dispatcher::singleton().findSchema(n);
}

}  // namespace vitrify
