// Scalars of the loop interpreter: storage conversion and the meaning of every operation on one element.
#pragma once
#include <cstdint>

#include "loop/loop.h"

namespace vitrify::codegen::interp {

// A value of a compute type: floats in f (f32 as a double that a float can hold), all else in i, sign- or zero-extended by type.
struct Scalar {
  double f = 0;
  int64_t i = 0;
};

float half_to_float(uint16_t);
uint16_t float_to_half(float);  // nearest even
float bfloat_to_float(uint16_t);
uint16_t float_to_bfloat(float);  // nearest even, NaN as 0x7fc0

Scalar load(const void* base, int64_t index, DType storage);
void store(void* base, int64_t index, DType storage, Scalar);
Scalar wrap(Scalar, DType);                 // brings an integer or f32 result back into its type
Scalar cast(Scalar, DType from, DType to);  // `to` may be a half type: rounds
Scalar bitcast(Scalar, DType from, DType to);
bool compare(loop::Op, DType, Scalar a, Scalar b);
// Unary, binary, logical and shift operations. Sets `fault` on integer division by zero and yields 0.
Scalar apply(loop::Op, DType, Scalar a, Scalar b, KernelFault& fault);

}  // namespace vitrify::codegen::interp
