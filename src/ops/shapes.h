// Sizes, strides and dtypes of results: the algorithms ATen uses for whole families of ops, on symbolic sizes.
#pragma once
#include <optional>
#include <span>

#include "ops/lowering.h"

namespace vitrify::ops {

using Types = boost::container::small_vector<ir::TensorType, 1>;
using Shape = std::optional<Types>;
using ArgSpan = std::span<const ir::Arg>;
using ir::TensorType;

DType promote_types(DType, DType);
// As at::result_type: tensors with dims win over 0-d tensors, those over numbers, within a category (bool, int, float, complex).
// `args`: tensors (one or a list) and numbers; anything else is ignored.
DType result_type(std::span<const ir::Arg* const> args);
DType result_type(std::initializer_list<const ir::Arg*> args);
DType to_float(DType);   // ints and bool: the default float type
DType& default_float();  // of this thread; whoever asks for shapes keeps it equal to torch.get_default_dtype()

bool broadcast_sizes(sym::Context&, const Dims& a, const Dims& b, Dims& out);  // false: not broadcastable
bool is_contiguous(sym::Context&, const TensorType&, ir::MemoryFormat = ir::MemoryFormat::Contiguous);
bool is_dense(sym::Context&, const TensorType&);  // non-overlapping and dense
Dims strides_for(ir::MemoryFormat, const Dims& sizes);
ir::MemoryFormat suggest_memory_format(sym::Context&, const TensorType&);

// Sizes and strides of the result of an elementwise op over these operands, as eager's iterator allocates it. Device: of the first operand with dims.
// `common`: the type operands are converted to first, if they are.
std::optional<TensorType> elementwise_type(sym::Context&, std::span<const TensorType* const> operands, DType out, DType common = DType::Opaque);
// Strides empty_like(preserve_format) gives.
Dims preserved_strides(sym::Context&, const TensorType&);
Dims likely_preserved_strides(sym::Context&, const TensorType&);  // the same where nothing may be assumed any more: in the order that hints say
TensorType contiguous_type(DType, Device, Dims sizes);
Shape like_image(sym::Context&, const TensorType& x, Dims sizes);  // what kernels for images make of x: channels-last memory stays so

// Argument access in shape rules; all return null or nullopt instead of failing.
const TensorType* tensor_arg(ArgSpan, size_t i);
std::optional<int64_t> int_arg(sym::Context&, ArgSpan, size_t i);                                                       // constant or specialised
std::optional<std::vector<int64_t>> dims_arg(sym::Context&, ArgSpan, size_t i, size_t rank, bool empty_is_all = true);  // wrapped
bool bool_arg(ArgSpan, size_t i);
Int size_of_slice(sym::Context&, Int size, Int& start, Int end, Int step);  // normalises start

inline Shape one(std::optional<TensorType> t) {
  if (!t) return std::nullopt;
  return Types{std::move(*t)};
}

}  // namespace vitrify::ops
