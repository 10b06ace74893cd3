#include "torch/bits.h"

#include <torch/library.h>

#include "loop/loop.h"
#include "runtime/bits.h"
#include "torch/executor.h"

namespace vitrify {

at::Tensor new_bits(int64_t elements) { return new_result({loop::bytes_of_bits(elements).value()}, {1}, at::kByte, true); }

ir::TensorType bits_of(const ir::TensorType& mask) {
  ir::TensorType bits = mask;
  bits.dtype = DType::U8;
  bits.wrapped_number = false;
  bits.sizes = {loop::bytes_of_bits(mask.numel())};
  bits.strides = {1};
  return bits;
}

namespace {

at::Tensor pack(const at::Tensor& mask, at::IntArrayRef stride) {
  at::Tensor dense = mask;
  if (mask.strides() != stride) dense = at::empty_strided(mask.sizes(), stride, mask.options()).copy_(mask);
  at::Tensor bits = new_bits(mask.numel());
  runtime::pack_bits(dense.const_data_ptr<bool>(), bits.data_ptr<uint8_t>(), mask.numel());
  return bits;
}

}  // namespace

at::Tensor unpacked(const at::Tensor& bits, at::IntArrayRef size, at::IntArrayRef stride) {
  at::Tensor mask = at::empty_strided(size, stride, bits.options().dtype(at::kBool));
  TORCH_CHECK(bits.scalar_type() == at::kByte && bits.is_contiguous() && bits.numel() * 8 >= mask.numel(),
              "vitrify::unpack_bits: bits must be a contiguous uint8 tensor with a bit for each element, not ", bits.sizes(), " for ", size);
  runtime::unpack_bits(bits.const_data_ptr<uint8_t>(), mask.data_ptr<bool>(), mask.numel());
  return mask;
}

TORCH_LIBRARY_FRAGMENT(vitrify, m) {
  m.def("pack_bits(Tensor mask, int[] stride) -> Tensor", pack);
  m.def("unpack_bits(Tensor bits, int[] size, int[] stride) -> Tensor", unpacked);
}

}  // namespace vitrify
