// Convolutions that eager has none of.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>

#include "runtime/winograd.h"
#include "torch/originals.h"
#include "torch/team.h"

namespace vitrify {

namespace {

using Optional = std::optional<at::Tensor>;
using Scalar = std::optional<at::Scalar>;
using Ints = at::IntArrayRef;
using Name = std::optional<std::string_view>;

template <class F>
c10::TypedOperatorHandle<F> find(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<F>();
}

// relu(conv(x, weights, bias) + other), with long sums added up in parts: each weight is packed, for its share of the channels. oneDNN adds the
// products of one result of a channels-last convolution in a single chain, whose error grows with the root of its length; eager's layout gives it
// several.
at::Tensor convolution_in_chains(const at::Tensor& x, const Optional& other, at::TensorList weights, const Optional& bias, Ints padding, Ints stride,
                                 Ints dilation, bool relu) {
  static const auto plain =
      find<at::Tensor(const at::Tensor&, const at::Tensor&, const Optional&, Ints, Ints, Ints, int64_t, std::string_view, torch::List<Scalar>, Name)>(
          "mkldnn::_convolution_pointwise", "");
  static const auto add = find<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const Optional&, Ints, Ints, Ints, int64_t,
                                          std::string_view, Scalar, Name, torch::List<Scalar>, Name)>("mkldnn::_convolution_pointwise", "binary");
  static const auto add_to =
      find<at::Tensor&(at::Tensor&, const at::Tensor&, const at::Tensor&, const Optional&, Ints, Ints, Ints, int64_t, std::string_view, Scalar, Name,
                       torch::List<Scalar>, Name)>("mkldnn::_convolution_pointwise_", "binary");
  const torch::List<Scalar> none;
  const auto parts = static_cast<int64_t>(weights.size()), channels = x.size(1) / std::max<int64_t>(parts, 1);
  TORCH_CHECK(parts >= 2 && channels * parts == x.size(1), "vitrify::convolution_in_chains: ", parts, " weights for ", x.size(1), " channels");
  auto part = [&](int64_t i) { return x.narrow(1, i * channels, channels); };
  at::Tensor sum = other ? add.call(part(0), *other, weights[0], bias, padding, stride, dilation, 1, "add", {}, {}, none, {})
                         : plain.call(part(0), weights[0], bias, padding, stride, dilation, 1, "none", none, "");
  for (int64_t i = 1; i < parts; ++i)
    add_to.call(sum, part(i), weights[static_cast<size_t>(i)], {}, padding, stride, dilation, 1, "add", {},
                relu && i + 1 == parts ? Name("relu") : Name(), none, {});
  return sum;
}

bool is_float_on_cpu(const at::Tensor& t) { return t.scalar_type() == at::kFloat && t.is_cpu(); }

// Weights [k, c, 3, 3] for winograd_convolution: the same elements in its order.
at::Tensor winograd_reorder_weight(const at::Tensor& weights) {
  TORCH_CHECK(is_float_on_cpu(weights) && weights.dim() == 4 && weights.size(2) == 3 && weights.size(3) == 3,
              "vitrify::winograd_reorder_weight takes float32 weights [k, c, 3, 3] on the CPU, not ", weights.sizes());
  const at::Tensor from = weights.contiguous();
  at::Tensor to = at::empty(from.sizes(), from.options());
  runtime::winograd_weights(from.const_data_ptr<float>(), from.size(0), from.size(1), to.data_ptr<float>());
  return to;
}

// relu(conv(x, weights, bias) + other), 3x3, padding 1, stride 1, in channels-last memory.
at::Tensor winograd_convolution(const at::Tensor& x_, const Optional& other_, const at::Tensor& weights, const Optional& bias, bool relu) {
  TORCH_CHECK(runtime::can_convolve(), "vitrify::winograd_convolution: this processor has no AVX-512");
  TORCH_CHECK(is_float_on_cpu(x_) && is_float_on_cpu(weights) && x_.dim() == 4 && weights.dim() == 4 && weights.size(1) == x_.size(1) &&
                  weights.is_contiguous() && weights.size(0) % 16 == 0 && weights.size(1) % 16 == 0,
              "vitrify::winograd_convolution: cannot convolve ", x_.sizes(), " with ", weights.sizes());
  const at::Tensor x = x_.contiguous(at::MemoryFormat::ChannelsLast);
  at::Tensor y = at::empty({x.size(0), weights.size(0), x.size(2), x.size(3)}, x.options(), at::MemoryFormat::ChannelsLast);
  TORCH_CHECK(!bias || (is_float_on_cpu(*bias) && bias->numel() == y.size(1)), "vitrify::winograd_convolution: bias must be float32 [", y.size(1),
              "]");
  TORCH_CHECK(!other_ || (is_float_on_cpu(*other_) && other_->sizes() == y.sizes()), "vitrify::winograd_convolution: cannot add ", other_->sizes());
  const at::Tensor other = other_ ? other_->contiguous(at::MemoryFormat::ChannelsLast) : at::Tensor(), b = bias ? bias->contiguous() : at::Tensor();
  const runtime::Winograd p{x.const_data_ptr<float>(),
                            weights.const_data_ptr<float>(),
                            bias ? b.const_data_ptr<float>() : nullptr,
                            other_ ? other.const_data_ptr<float>() : nullptr,
                            y.data_ptr<float>(),
                            x.size(0),
                            x.size(2),
                            x.size(3),
                            x.size(1),
                            y.size(1),
                            relu};
  const auto parts = static_cast<int>(team_size());
  std::atomic<bool> finite{true};
  for_parts(parts, [&](int64_t part) {
    if (!runtime::convolve(p, static_cast<int>(part), parts)) finite = false;
  });
  if (!finite) throw NotFinite("vitrify::winograd_convolution: a result is not finite");
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(vitrify, m) {
  m.def("winograd_reorder_weight(Tensor weights) -> Tensor", winograd_reorder_weight);
  m.def("winograd_convolution(Tensor x, Tensor? other, Tensor weights, Tensor? bias, bool relu) -> Tensor", winograd_convolution);
  m.def(
      "convolution_in_chains(Tensor x, Tensor? other, Tensor[] weights, Tensor? bias, int[] padding, int[] stride, int[] dilation, bool relu) -> "
      "Tensor",
      convolution_in_chains);
}

}  // namespace vitrify
