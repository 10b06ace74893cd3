// A matrix product by src/runtime/gemm.h, as an op that graphs name.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "runtime/gemm.h"
#include "torch/team.h"

namespace vitrify {

namespace {

// Its rows, or columns, lie one after the other and do not overlap.
bool has_dense_rows(const at::Tensor& t) { return t.stride(1) == 1 && t.stride(0) >= t.size(1); }
bool has_dense_columns(const at::Tensor& t) { return t.stride(0) == 1 && t.stride(1) >= t.size(0); }

at::Tensor product(const at::Tensor& a_, const at::Tensor& b_, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(a_.dim() == 2 && b_.dim() == 2 && a_.size(1) == b_.size(0), "vitrify::product: cannot multiply ", a_.sizes(), " and ", b_.sizes());
  for (const at::Tensor* t : {&a_, &b_}) TORCH_CHECK(t->scalar_type() == at::kFloat && t->is_cpu(), "vitrify::product takes float32 on the CPU");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == b_.size(1) && bias->scalar_type() == at::kFloat),
              "vitrify::product: bias must be float32 [", b_.size(1), "]");
  if (!runtime::can_multiply() || a_.numel() == 0 || b_.numel() == 0) return bias ? at::addmm(*bias, a_, b_) : at::mm(a_, b_);
  const at::Tensor a = has_dense_rows(a_) ? a_ : a_.contiguous();
  const bool transposed = !has_dense_rows(b_) && has_dense_columns(b_);
  const at::Tensor b = transposed || has_dense_rows(b_) ? b_ : b_.contiguous();
  const at::Tensor dense_bias = bias ? bias->contiguous() : at::Tensor();
  at::Tensor c = at::empty({a.size(0), b_.size(1)}, a.options());
  const runtime::Product p{a.const_data_ptr<float>(),
                           a.stride(0),
                           b.const_data_ptr<float>(),
                           b.stride(transposed ? 1 : 0),
                           transposed,
                           bias ? dense_bias.const_data_ptr<float>() : nullptr,
                           c.data_ptr<float>(),
                           c.stride(0),
                           a.size(0),
                           b_.size(1),
                           a.size(1)};
  const auto parts = static_cast<int>(team_size());
  for_parts(parts, [&](int64_t part) { runtime::multiply(p, static_cast<int>(part), parts); });
  return c;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(vitrify, m) { m.def("product(Tensor a, Tensor b, Tensor? bias) -> Tensor", product); }

}  // namespace vitrify
