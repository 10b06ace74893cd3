// Quantiles of what has symbols for sizes: ATen's steps.
#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

#include "torch/composites.h"

namespace vitrify::capture {
namespace {

using at::Tensor;
using c10::SymInt;
using Sizes = std::vector<SymInt>;
using Dim = std::optional<int64_t>;

// What ATen refuses is left to it.
bool takes(const Tensor& x, const Tensor& q, Dim dim, c10::string_view interpolation) {
  static constexpr std::array<c10::string_view, 5> kWays{"linear", "lower", "higher", "midpoint", "nearest"};
  constexpr int64_t kMost = int64_t{1} << 24;
  if (!has_symbols(x) || x.dim() == 0 || q.dim() > 1 || q.scalar_type() != x.scalar_type() || !x.device().is_cpu() || !q.device().is_cpu())
    return false;
  if ((x.scalar_type() != at::kFloat && x.scalar_type() != at::kDouble) || std::ranges::find(kWays, interpolation) == kWays.end()) return false;
  if (dim && (*dim < -x.dim() || *dim >= x.dim())) return false;
  return x.sym_numel() != 0 && (dim ? x.sym_size(*dim) : x.sym_numel()) <= kMost;
}

Tensor quantile_of(const Tensor& x, const Tensor& q, Dim given, bool keepdim, c10::string_view interpolation, bool ignore_nan) {
  const int64_t dim = given ? c10::maybe_wrap_dim(*given, x.dim()) : 0;
  const bool several = q.dim() > 0;
  Sizes rows;  // of the result, less the quantiles
  if (given) {
    rows.assign(x.sym_sizes().begin(), x.sym_sizes().end());
    if (keepdim)
      rows[static_cast<size_t>(dim)] = 1;
    else
      rows.erase(rows.begin() + dim);
  } else if (keepdim) {
    rows.assign(static_cast<size_t>(x.dim()), 1);
  }
  TORCH_CHECK(at::is_scalar_tensor_true(q.ge(0).logical_and_(q.le(1)).all()), "quantile() q values must be in the range [0, 1]");
  Tensor sorted = std::get<0>(!given ? x.flatten().sort() : dim == x.dim() - 1 ? x.sort() : x.unsqueeze(-1).transpose(dim, -1).sort());
  const SymInt count = sorted.sym_size(-1);
  rows.push_back(count);
  sorted = sorted.view_symint(rows);
  Tensor ranks;
  if (ignore_nan) {
    ranks = q * (sorted.isnan().logical_not_().sum(-1, true) - 1);
    ranks.masked_fill_(ranks < 0, 0);
  } else {
    const c10::Scalar last(count - 1);
    const std::vector<Tensor> both = at::broadcast_tensors({q * last, sorted.isnan().any(-1, true)});
    ranks = at::masked_fill(both[0], both[1], last);
  }
  if (interpolation == "lower") ranks.floor_();
  if (interpolation == "higher") ranks.ceil_();
  if (interpolation == "nearest") ranks.round_();
  const Tensor below = ranks.toType(at::kLong);
  Tensor r = sorted.gather(-1, below);
  if (interpolation == "linear" || interpolation == "midpoint") {
    const Tensor weights = interpolation == "midpoint" ? at::full_like(ranks, 0.5) : ranks - below;
    const Tensor above = ranks.ceil_().toType(at::kLong);
    r.lerp_(sorted.gather(-1, above), weights);
  }
  return several ? r.unsqueeze_(0).transpose_(0, -1).squeeze_(-1) : r.squeeze_(-1);
}

template <class Op, bool ignore_nan>
Tensor of_tensor(c10::DispatchKeySet keys, const Tensor& x, const Tensor& q, Dim dim, bool keepdim, c10::string_view interpolation) {
  if (casts_first(keys) || !takes(x, q, dim, interpolation)) return Op::redispatch(below_composites(keys), x, q, dim, keepdim, interpolation);
  return quantile_of(x, q, dim, keepdim, interpolation, ignore_nan);
}
template <class Op, bool ignore_nan>
Tensor of_number(c10::DispatchKeySet keys, const Tensor& x, double q, Dim dim, bool keepdim, c10::string_view interpolation) {
  if (casts_first(keys) || !(q >= 0 && q <= 1) || !has_symbols(x) || !at::isFloatingType(x.scalar_type()))
    return Op::redispatch(below_composites(keys), x, q, dim, keepdim, interpolation);
  const Tensor number = at::scalar_tensor(q, x.options());
  if (!takes(x, number, dim, interpolation)) return Op::redispatch(below_composites(keys), x, q, dim, keepdim, interpolation);
  return quantile_of(x, number, dim, keepdim, interpolation, ignore_nan);
}

}  // namespace

void register_quantiles(torch::Library& ours) {
  ours.impl("quantile", TORCH_FN((of_tensor<at::_ops::quantile, false>)));
  ours.impl("nanquantile", TORCH_FN((of_tensor<at::_ops::nanquantile, true>)));
  ours.impl("quantile.scalar", TORCH_FN((of_number<at::_ops::quantile_scalar, false>)));
  ours.impl("nanquantile.scalar", TORCH_FN((of_number<at::_ops::nanquantile_scalar, true>)));
}

}  // namespace vitrify::capture
