// Reductions other families build on, and the shape rule of all of them.
#pragma once
#include "ops/rules.h"

namespace vitrify::ops {

// Sum of f(cast(x, acc)).
Tensor reduce_sum(Lowering&, const Tensor& x, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                  const std::function<Val(Val)>& f = {});

struct Moments {
  Tensor mean, m2;  // m2: sum of squared distances from the mean
  Int count;
};
Moments moments(Lowering&, const Tensor& x, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                loop::AccumKind = loop::AccumKind::Welford);

enum class ReductionDType : uint8_t {
  Sum,   // dtype argument, else integers to i64
  Mean,  // dtype argument; integers are an error
  Same,
  Float,      // dtype argument, else the operand's, which must be floating
  Bool,       // u8 stays u8
  BoolDims,   // the same, with an empty list meaning no dims
  Index,      // i64; dims None: over everything
  WithIndex,  // (values, i64 indices)
};
Shape reduction_shape(sym::Context&, ArgSpan, ReductionDType, size_t dims_at, size_t keep_at, size_t dtype_at, int results);

}  // namespace vitrify::ops
