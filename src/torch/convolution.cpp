// A convolution whose long sums are added up in parts. oneDNN adds the products of one result of a channels-last convolution in a single chain, whose
// error grows with the root of its length; eager's layout gives it several.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

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

// relu(conv(x, weights, bias) + other): each weight is packed, for its share of the channels.
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(vitrify, m) {
  m.def(
      "convolution_in_chains(Tensor x, Tensor? other, Tensor[] weights, Tensor? bias, int[] padding, int[] stride, int[] dilation, bool relu) -> "
      "Tensor",
      convolution_in_chains);
}

}  // namespace vitrify
