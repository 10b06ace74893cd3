// Tensors of which all elements are one number, and memory that nobody has written.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "torch/convert.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using capture::OpInfo;
using ir::Arg;
using ir::TensorType;
using ir::Value;

namespace {

// In deterministic mode eager fills what nobody has written.
std::optional<Arg> fill_of_empty(std::string_view name, const TensorType& type) {
  const at::Context& c = at::globalContext();
  if (!c.deterministicAlgorithms() || !c.deterministicFillUninitializedMemory()) return std::nullopt;
  const ops::OpRow* row = ops::find_op(name);
  if (!row || row->filled != ops::kNothing) return std::nullopt;
  const at::ScalarType t = scalar_type_of(type);
  if (at::isFloatingType(t) || at::isComplexType(t)) return Arg(std::numeric_limits<double>::quiet_NaN());
  if (t == at::kBool || t > at::kLong) return t == at::kBool ? std::optional(Arg(true)) : std::nullopt;
  return Arg(sym::Int(static_cast<int64_t>(~uint64_t{0} >> (64 - 8 * c10::elementSize(t) + (t == at::kByte ? 0 : 1)))));
}

}  // namespace

Value Tracer::Impl::filled(ir::Node* empty) {
  const auto fill = fill_of_empty(empty->op->name, empty->outs[0]);
  return fill ? append("aten::fill.Scalar", {empty->out(), *fill}, empty->outs)->out() : empty->out();
}

// What reads of a tensor how it lies, and no numbers, is made of its sizes: then nothing (what a backward frees, compares or keeps) takes it for a
// reader. Not in derivatives: what eager's formulas read the sizes of they save, and a batch of gradients is written into what is as large as the
// batch. Null where it is no such op.
ir::Node* Tracer::Impl::made_of_sizes(const OpInfo& info, const std::vector<Arg>& args, const Types& types) {
  if (in_backward || !info.row || !info.row->filled || args.empty() || !std::holds_alternative<Value>(args[0]) || types.size() != 1) return nullptr;
  const TensorType& type = types[0];
  if (!is_native(type.dtype) || type.device.kind != DeviceKind::CPU) return nullptr;
  const int filled = info.row->filled;
  const std::vector<sym::Int> sizes(type.sizes.begin(), type.sizes.end()), strides(type.strides.begin(), type.strides.end());
  // Each list by itself, as in draw_in_bulk().
  const auto call = [&](std::string_view name, auto&&... given) {
    std::vector<Arg> list;
    list.reserve(sizeof...(given) + 4);
    (list.emplace_back(given), ...);
    list.emplace_back(type.dtype);
    for (int i = 0; i < 3; ++i) list.emplace_back(ir::None{});  // layout, device, pin_memory
    Types one(1, type);
    return append(name, std::move(list), std::move(one));
  };
  const bool as_made =
      std::ranges::equal(type.strides, ir::contiguous_strides(type.sizes), [](auto a, auto b) { return sym::known_eq(a, b) == true; });
  if (filled != ops::kNothing && as_made) {
    if (filled == ops::kZeros) return call("aten::zeros", sizes);
    if (filled == ops::kOnes) return call("aten::ones", sizes);
    return call("aten::full", sizes, args[static_cast<size_t>(filled)]);
  }
  ir::Node* empty = call("aten::empty_strided", sizes, strides);
  if (filled == ops::kNothing) return empty;
  const Arg value = filled == ops::kZeros ? Arg(sym::Int(0)) : filled == ops::kOnes ? Arg(sym::Int(1)) : args[static_cast<size_t>(filled)];
  return append("aten::fill.Scalar", {empty->out(), value}, types);
}

}  // namespace vitrify
