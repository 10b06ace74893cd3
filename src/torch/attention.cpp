// Attention by src/runtime/attention.h, with the schema and the results of ATen's op for the CPU.
#include "runtime/attention.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

#include "torch/team.h"

namespace vitrify {

namespace {

runtime::DotProductAttention::Strides strides_of(const at::Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

// Rows of operands are read as dense, here and by ATen's kernel, whose callers see to it.
at::Tensor with_dense_rows(const at::Tensor& t) { return t.dim() && t.size(-1) > 1 && t.stride(-1) != 1 ? t.contiguous() : t; }

// ATen's kernel also writes rows as dense, into what is laid out like the query: of one whose rows overlap (windows of a signal) that may have
// others.
at::Tensor query_with_dense_rows(const at::Tensor& t) {
  const at::Tensor q = with_dense_rows(t);
  return q.dim() && q.size(-1) > 1 && !q.is_non_overlapping_and_dense() && at::infer_dense_strides(q.sizes(), q.strides()).back() != 1
             ? q.contiguous()
             : q;
}

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout_p,
                                             bool is_causal, const std::optional<at::Tensor>& attn_mask, std::optional<double> scale) {
  const at::Tensor q = query_with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  const auto suits = [](const at::Tensor& t) { return t.dim() == 4 && t.scalar_type() == at::kFloat && t.is_cpu() && t.stride(3) == 1; };
  const bool same =
      suits(q) && suits(k) && suits(v) && q.size(0) == k.size(0) && q.size(1) == k.size(1) && q.size(3) == k.size(3) && k.sizes() == v.sizes();
  // What of a mask is read at a time is dense or one element.
  const bool masked = attn_mask && attn_mask->scalar_type() == at::kFloat && (attn_mask->size(-1) == 1 || attn_mask->stride(-1) == 1);
  // Each thread copies the keys and values of its heads, which few queries do not repay.
  const bool repays = q.dim() == 4 && k.dim() == 4 && (q.size(2) >= 48 || k.size(2) <= 2 * q.size(2));
  const double factor = scale.value_or(q.dim() ? 1 / std::sqrt(static_cast<double>(q.size(-1))) : 1);
  const bool hides = !is_causal || factor > 0;  // ATen's scores are of -inf before they are scaled
  if (same && repays && dropout_p == 0 && (!attn_mask || masked) && hides) {
    const at::Tensor mask = attn_mask ? attn_mask->expand({q.size(0), q.size(1), q.size(2), k.size(2)}) : at::Tensor();
    at::Tensor out = at::empty_like(q), lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options()).transpose(1, 2);
    runtime::DotProductAttention a{q.const_data_ptr<float>(),
                                   k.const_data_ptr<float>(),
                                   v.const_data_ptr<float>(),
                                   strides_of(q),
                                   strides_of(k),
                                   strides_of(v),
                                   mask.defined() ? mask.const_data_ptr<float>() : nullptr,
                                   {},
                                   is_causal,
                                   static_cast<float>(factor),
                                   out.data_ptr<float>(),
                                   strides_of(out),
                                   lse.data_ptr<float>(),
                                   strides_of(lse),
                                   q.size(0),
                                   q.size(1),
                                   q.size(2),
                                   k.size(2),
                                   q.size(3)};
    if (mask.defined()) std::copy_n(mask.strides().begin(), 4, a.mask_strides.begin());
    if (out.stride(3) == 1 && runtime::can_attend(a)) {
      const auto parts = static_cast<int>(team_size());
      std::atomic<bool> finite{true};
      for_parts(parts, [&](int64_t part) {
        if (!runtime::attend(a, static_cast<int>(part), parts)) finite = false;
      });
      if (finite) return {out, lse};
    }
  }
  return at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, attn_mask, scale);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(vitrify, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> "
      "(Tensor, Tensor)",
      attention);
}

}  // namespace vitrify
