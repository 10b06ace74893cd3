// Between ATen's types and arguments and the IR's.
#pragma once
#include <ATen/core/function_schema.h>
#include <fmt/ranges.h>

#include <functional>

#include "ir/graph.h"
#include "torch/compat.h"

namespace vitrify {

DType to_dtype(at::ScalarType);
at::ScalarType to_scalar_type(DType, uint8_t opaque_scalar_type = 0);
at::ScalarType scalar_type_of(const ir::TensorType&);
Device to_device(c10::Device);
c10::Device to_torch_device(Device);
ir::TensorType type_of(const at::Tensor&);
int64_t value_of(sym::Int);  // constant, or the hint
std::vector<int64_t> values_of(const ir::Dims&);

// What a schema argument holds, looked up once per op. ATen passes dtypes, layouts and memory formats as ints: only the schema tells them apart.
enum class ArgKind : uint8_t {
  Tensor,
  TensorList,
  OptionalTensorList,
  Int,
  IntList,
  Scalar,
  ScalarList,
  Float,
  FloatList,
  Bool,
  BoolList,
  String,
  ScalarType,
  Device,
  Layout,
  MemoryFormat,
  Opaque,  // generators, streams, script objects, string lists: kept in Graph::constants as std::shared_ptr<c10::IValue>
};
ArgKind kind_of(const c10::Argument&);
std::vector<ArgKind> arg_kinds(const c10::FunctionSchema&);

// `resolve` gives the value of a defined tensor.
ir::Arg to_arg(ir::Graph&, const c10::IValue&, ArgKind, const std::function<ir::Value(const at::Tensor&)>& resolve);
c10::IValue to_ivalue(const ir::Graph&, const ir::Arg&, ArgKind, const std::function<at::Tensor(const ir::Value&)>& tensor_of,
                      const std::function<int64_t(sym::Int)>& int_of = value_of);

// Tensor results of a boxed call in order, lists flattened; undefined ones kept.
void flatten_results(const compat::Stack&, std::vector<at::Tensor>& out);
// Type recorded for an undefined result.
ir::TensorType undefined_type();
bool is_undefined(const ir::TensorType&);

// "aten::add.Tensor"
std::string op_name(const c10::OperatorName&);
std::optional<c10::OperatorHandle> find_operator(std::string_view name);

}  // namespace vitrify
