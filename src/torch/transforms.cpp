#include "torch/transforms.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/TensorWrapper.h>

#include <algorithm>

#include "torch/mode.h"
#include "torch/tangents.h"

namespace vitrify {

namespace {

namespace functorch = at::functorch;
using Tensors = std::vector<at::Tensor>;

void set_layers(const std::vector<functorch::DynamicLayer>& layers) {
  functorch::setDynamicLayerStack(layers);
  functorch::setDynamicLayerFrontBackKeysIncluded(!layers.empty());
}

const functorch::BatchedTensorImpl* batch_at(const at::Tensor& t, int64_t level) {
  const auto* batch = t.defined() ? functorch::maybeGetBatchedImpl(t) : nullptr;
  return batch && batch->level() == level ? batch : nullptr;
}

const functorch::TensorWrapper* wrapper_at(const at::Tensor& t, int64_t level) {
  const auto* wrapper = t.defined() ? functorch::maybeGetTensorWrapper(t) : nullptr;
  return wrapper && wrapper->level() == level ? wrapper : nullptr;
}

at::Tensor unwrapped(const at::Tensor& t, int64_t level) {
  const auto* wrapper = wrapper_at(t, level);
  return wrapper ? wrapper->value() : t;
}

// What `op` makes of each of `n`; none where it may not run several times, or there are none.
std::optional<std::vector<Tensors>> of_each(const TransformedOp& op, int64_t n, const std::function<Tensors(int64_t)>& one) {
  if (n <= 0 || !op.repeats) return {};
  std::vector<Tensors> each;
  for (int64_t i = 0; i < n; ++i) {
    auto made = under_transforms(op, one(i));
    if (!made) return {};
    each.push_back(*std::move(made));
  }
  return each;
}

std::optional<Tensors> of_vmap(const TransformedOp& op, const Tensors& given, int64_t level) {
  int64_t size = 0;
  for (const at::Tensor& t : given)
    if (const auto* batch = batch_at(t, level)) size = batch->value().size(batch->bdim());
  Tensors all;
  {
    const WithoutTransforms behind(false);
    auto each = of_each(op, size, [&](int64_t i) {
      Tensors one = given;
      for (at::Tensor& t : one)
        if (const auto* batch = batch_at(t, level)) t = batch->value().select(batch->bdim(), i);
      return one;
    });
    if (!each) return {};
    all.resize(each->at(0).size());
    for (size_t g = 0; g < all.size(); ++g) {
      Tensors of;
      for (Tensors& one : *each) of.push_back(std::move(one[g]));
      if (of[0].defined()) all[g] = all_plain(of) ? batch_of(of) : at::stack(of);
    }
  }
  for (at::Tensor& t : all)
    if (t.defined()) t = functorch::makeBatched(std::move(t), 0, level);
  return all;
}

// Of reverse mode nothing is left to do where no history of the transform's is kept. ATen's ops wrap what they give, also of tensors that are not
// wrapped.
std::optional<Tensors> of_values(const TransformedOp& op, const Tensors& given, const functorch::DynamicLayer& layer) {
  Tensors values;
  for (const at::Tensor& t : given) values.push_back(unwrapped(t, layer.layerId()));
  std::optional<Tensors> made;
  {
    const WithoutTransforms behind(false);
    made = under_transforms(op, values);
  }
  if (!made) return {};
  for (at::Tensor& t : *made) {
    if (!t.defined()) continue;
    const auto same = std::ranges::find_if(values, [&](const at::Tensor& v) { return v.is_same(t); });
    t = same == values.end() ? functorch::makeTensorWrapper(t, layer.interpreter()) : given[static_cast<size_t>(same - values.begin())];
  }
  return made;
}

std::optional<Tensors> of_jvp(const TransformedOp& op, const Tensors& given, const functorch::DynamicLayer& layer) {
  Tensors directions(given.size());
  bool any = false;
  for (size_t k = 0; k < given.size(); ++k)
    if (given[k].defined()) {
      const at::Tensor d = given[k]._fw_grad(0);
      any = any || d.defined();
      directions[k] = d.defined() && !d._is_zerotensor() ? d : at::zeros_like(given[k]);
    }
  if (any && !op.linear) return {};
  auto made = of_values(op, given, layer);
  if (!made || !any) return made;
  const auto moved = of_values(op, directions, layer);
  if (!moved) return {};
  for (size_t g = 0; g < made->size(); ++g)
    if ((*made)[g].defined() && (*moved)[g].defined()) (*made)[g] = at::_make_dual((*made)[g], (*moved)[g], 0);
  return made;
}

// Batches of is_grads_batched lie around those of torch.func.
std::optional<Tensors> of_legacy_batch(const TransformedOp& op, const Tensors& given) {
  const auto each = [&] {
    const capture::InBatch none(false);
    return of_each(op, size_of_any_batch(given), [&](int64_t i) { return one_of_batch(given, i); });
  }();
  return each ? std::optional(as_batch(*each)) : std::nullopt;
}

}  // namespace

struct WithoutTransforms::Before {
  std::vector<functorch::DynamicLayer> layers;
  std::optional<at::AutoGradMode> mode;  // as it was around the transform
};

WithoutTransforms::WithoutTransforms(bool all) {
  if (!any_transform()) return;
  before_ = std::make_unique<Before>(functorch::getDynamicLayerStack());
  auto keeps = before_->layers;
  bool grad = at::GradMode::is_enabled();
  do {
    const functorch::Interpreter& last = keeps.back().interpreter();
    if (last.key() == functorch::TransformType::Grad) grad = grad && std::get<functorch::GradInterpreterMeta>(last.meta()).prevGradMode_;
    keeps.pop_back();
  } while (all && !keeps.empty());
  before_->mode.emplace(grad);
  set_layers(keeps);
}

WithoutTransforms::~WithoutTransforms() {
  if (before_) set_layers(before_->layers);
}

bool any_transform() { return !functorch::getDynamicLayerStack().empty(); }

std::optional<Tensors> under_transforms(const TransformedOp& op, Tensors given) {
  for (at::Tensor& t : given)
    if (t.defined()) t = functorch::unwrapIfDead(t);
  if (!any_transform()) return op.run(std::move(given));
  if (size_of_any_batch(given) >= 0) return of_legacy_batch(op, given);
  const functorch::DynamicLayer layer = functorch::getDynamicLayerStack().back();
  const int64_t level = layer.layerId();
  const bool of_it = std::ranges::any_of(given, [&](const at::Tensor& t) { return batch_at(t, level) || wrapper_at(t, level); });
  switch (layer.key()) {
    case functorch::TransformType::Vmap: {
      if (of_it) return of_vmap(op, given, level);
      const WithoutTransforms behind(false);
      return under_transforms(op, std::move(given));
    }
    case functorch::TransformType::Grad: {
      const auto keeps_history = [&](const at::Tensor& t) { return wrapper_at(t, level) && t.requires_grad(); };
      return at::GradMode::is_enabled() && std::ranges::any_of(given, keeps_history) ? std::nullopt : of_values(op, given, layer);
    }
    case functorch::TransformType::Jvp:
      return of_jvp(op, given, layer);
    default:
      return {};
  }
}

}  // namespace vitrify
