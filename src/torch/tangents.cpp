#include "torch/tangents.h"

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/LegacyVmapMode.h>

#include <algorithm>
#include <numeric>
#include <ranges>

#include "torch/convert.h"

namespace vitrify {

bool is_other(const Layouts& how) {
  return std::any_of(how.begin(), how.end(), [](const TangentLayout& l) { return l.is_own() || l.view >= 0; });
}

Layouts as_recorded(Layouts how) {
  for (TangentLayout& l : how) {
    l.strides.clear();
    l.conj = l.neg = false;
    l.expanded.clear();
    l.view = -1;
  }
  return how;
}

bool is_plain(const at::Tensor& t) {
  constexpr c10::DispatchKeySet kOthers({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchGradWrapper,
                                         c10::DispatchKey::NestedTensor, c10::DispatchKey::Functionalize, c10::DispatchKey::Python});
  return t.layout() == at::kStrided && !t.key_set().has_any(kOthers) && !t._fw_grad(0).defined();
}

bool all_plain(const std::vector<at::Tensor>& tensors) {
  return std::ranges::all_of(tensors, [](const at::Tensor& t) { return !t.defined() || is_plain(t); });
}

bool is_recorded(const at::Tensor& t, const ir::TensorType& type, bool exactly) {
  bool same = t.layout() == at::kStrided && !t.is_conj() && !t.is_neg() && !t._is_zerotensor() && t.dim() == static_cast<int64_t>(type.dim());
  for (size_t d = 0; same && d < type.dim(); ++d)
    same = (t.size(static_cast<int64_t>(d)) == 1 && !exactly) ||
           (type.strides[d].is_const() && t.stride(static_cast<int64_t>(d)) == type.strides[d].value());
  return same;
}

namespace {

// Of dense memory whose dims lie in the order of these strides. Of one stride, a dim of one element lies inside of others, as it does in memory.
std::vector<int64_t> dense_in_order(const std::vector<int64_t>& of, c10::IntArrayRef sizes) {
  std::vector<size_t> order(of.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](size_t d) { return std::pair(of[d], sizes[d] > 1); });
  std::vector<int64_t> strides(of.size());
  int64_t next = 1;
  for (size_t d : std::views::reverse(order)) {
    strides[d] = next;
    next *= std::max<int64_t>(1, sizes[d]);
  }
  return strides;
}

bool lies_in(const at::Tensor& t, const std::vector<int64_t>& strides) {
  bool same = t.layout() == at::kStrided && !t.is_conj() && !t.is_neg() && !t._is_zerotensor();
  for (size_t d = 0; same && d < strides.size(); ++d) same = t.size(static_cast<int64_t>(d)) == 1 || t.stride(static_cast<int64_t>(d)) == strides[d];
  return same;
}

// By dim, how its stride follows from the sizes: 0: it is that; else it lies in the memory without gaps of those that are not, the last at -1. None:
// it does not follow, though those of one element may have any if not `ones`.
std::vector<int64_t> places_of(const at::Tensor& t, bool ones) {
  std::vector<size_t> order;
  for (size_t d = 0; d < t.strides().size(); ++d)
    if (t.strides()[d] != 0) order.push_back(d);
  std::ranges::stable_sort(order, {}, [&](size_t d) { return std::pair(t.strides()[d], t.sizes()[d] > 1); });
  std::vector<int64_t> places(t.strides().size());
  int64_t next = 1, place = 0;
  for (size_t d : order) {
    if (t.strides()[d] != next && (ones || t.sizes()[d] != 1)) return {};
    places[d] = --place;
    next *= std::max<int64_t>(1, t.sizes()[d]);
  }
  return places;
}

void note_expanded(const at::Tensor& t, TangentLayout& how) {
  for (uint32_t d = 0; d < how.strides.size(); ++d)
    if (how.strides[d] == 0 && t.size(d) > 1) how.expanded.push_back(d);
}

bool all_known(const ir::Dims& d) {
  return std::ranges::all_of(d, [](sym::Int i) { return i.is_const(); });
}

}  // namespace

bool lies_otherwise(const at::Tensor& t, const ir::TensorType& type) {
  return !is_recorded(t, type) && (all_known(type.strides) || !lies_in(t, dense_in_order(values_of(type.strides), t.sizes())));
}

at::Tensor turned(at::Tensor t, const at::Tensor& like) {
  if (like.is_conj()) t = t._conj();
  return like.is_neg() ? t._neg_view() : t;
}

void take_strides(const at::Tensor& t, const ir::TensorType& type, TangentLayout& how, bool looked_at) {
  if (t.layout() != at::kStrided || t._is_zerotensor()) return;
  if (looked_at || !t.is_non_overlapping_and_dense()) how.conj = t.is_conj(), how.neg = t.is_neg();
  if (all_known(type.sizes)) {
    if (!is_recorded(t, type, true)) how.strides = t.strides().vec();
  } else {  // where sizes differ from call to call, strides do with them
    const std::vector<int64_t> recorded = dense_in_order(values_of(type.strides), t.sizes());
    if (t.strides() != at::IntArrayRef(recorded)) how.strides = places_of(t, true);
    if (how.strides.empty() && !lies_in(turned(t, t), recorded)) {
      how.strides = places_of(t, false);
      if (how.strides.empty() && looked_at) how.strides = t.strides().vec();
    }
  }
  note_expanded(t, how);
}

void take_numbers(const at::Tensor& t, TangentLayout& how) {
  how.conj = t.is_conj(), how.neg = t.is_neg();
  how.strides = t.strides().vec();
  note_expanded(t, how);
}

// The batch that this is, of one is_grads_batched, in memory.
static const at::BatchedTensorImpl* batch_in_memory(const at::Tensor& t) {
  const auto* batch = at::maybeGetBatchedImpl(t);
  if (!batch || batch->bdims().size() != 1 || batch->bdims()[0].level() != 1 || at::impl::VmapMode::current_vmap_level() != 1) return nullptr;
  const at::Tensor& all = batch->value();
  return is_plain(all) && !all._is_zerotensor() && all.size(batch->bdims()[0].dim()) > 0 ? batch : nullptr;
}

bool take_batch(const at::Tensor& t, TangentLayout& how) {
  const auto* batch = batch_in_memory(t);
  if (!batch || batch->value().is_conj() || batch->value().is_neg()) return false;
  const at::Tensor& all = batch->value();
  how.batch_dim = static_cast<int32_t>(batch->bdims()[0].dim());
  how.batch = all.size(how.batch_dim);
  how.strides = all.strides().vec();
  note_expanded(all, how);
  return !how.strides.empty();
}

bool has_bits(const at::Tensor& t) {
  const auto* batch = at::maybeGetBatchedImpl(t);
  return batch ? has_bits(batch->value()) : t.is_conj() || t.is_neg();
}

at::Tensor batch_without_bits(const at::Tensor& t) {
  if (const auto* batch = at::maybeGetBatchedImpl(t)) {
    at::Tensor r = batch_without_bits(batch->value());
    for (const at::BatchDim& d : batch->bdims()) r = at::addBatchDim(r, d.level(), d.dim());
    return r;
  }
  return t.resolve_conj().resolve_neg();
}

at::Tensor batch_of(const std::vector<at::Tensor>& each) {
  std::vector<int64_t> sizes = each[0].sizes().vec(), strides = each[0].strides().vec();
  int64_t span = 1;
  for (size_t d = 0; d < sizes.size(); ++d) span += std::max<int64_t>(0, sizes[d] - 1) * strides[d];
  std::vector<int64_t> full = sizes;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (strides[d] == 0) sizes[d] = std::min<int64_t>(sizes[d], 1);
  sizes.insert(sizes.begin(), static_cast<int64_t>(each.size()));
  strides.insert(strides.begin(), span);
  full.insert(full.begin(), static_cast<int64_t>(each.size()));
  at::Tensor all = at::empty_strided(sizes, strides, each[0].options());
  for (size_t i = 0; i < each.size(); ++i) {
    at::Tensor from = each[i];
    for (int64_t d = 0; d < from.dim(); ++d) from = from.narrow(d, 0, sizes[static_cast<size_t>(d) + 1]);
    all.select(0, static_cast<int64_t>(i)).copy_(from);
  }
  return all.expand(full);  // what each repeats, once: gradients of what is made here are as of any copies
}

static TangentLayout without_bits(TangentLayout how) {
  how.conj = how.neg = false;
  return how;
}

// A batch whose each lies so: ATen has no rule that copies a batch into what is none.
static at::Tensor batch_laid_out(const at::BatchedTensorImpl& batch, c10::IntArrayRef strides) {
  const at::Tensor all = batch.value().movedim(batch.bdims()[0].dim(), 0);
  std::vector<int64_t> in = strides.vec();
  int64_t span = 1;
  for (size_t d = 0; d < in.size(); ++d) span += std::max<int64_t>(0, all.size(static_cast<int64_t>(d) + 1) - 1) * in[d];
  in.insert(in.begin(), span);
  return at::addBatchDim(at::empty_strided(all.sizes(), in, all.options()).copy_(all), batch.bdims()[0].level(), 0);
}

at::Tensor laid_out(const at::Tensor& t, const ir::TensorType& type, const TangentLayout& how) {
  if (how.batch) {
    at::Tensor r = at::maybeGetBatchedImpl(t)->value();
    for (uint32_t d : how.expanded) r = r.narrow(d, 0, 1);
    return r;
  }
  if (how.conj || how.neg) return laid_out(turned(t, t), type, without_bits(how));
  if (!how.strides.empty()) {
    at::Tensor r = t.resolve_conj().resolve_neg();
    if (all_known(type.sizes))  // else its sizes may be what says them
      for (uint32_t d : how.expanded) r = r.narrow(d, 0, 1);
    return r;
  }
  if (is_recorded(t, type)) {
    if (is_recorded(t, type, true) || c10::GradMode::is_enabled()) return t;
    std::vector<int64_t> as_recorded = t.strides().vec();  // calls hand on the strides they are given, also those of one element
    for (size_t d = 0; d < type.dim(); ++d)
      if (type.strides[d].is_const()) as_recorded[d] = type.strides[d].value();
    return t.as_strided(t.sizes(), as_recorded);
  }
  std::vector<int64_t> strides = values_of(type.strides);
  if (!all_known(type.strides)) strides = dense_in_order(strides, t.sizes());  // in the order of the record
  if (lies_in(t, strides)) return t;
  if (const auto* batch = at::maybeGetBatchedImpl(t); batch && batch->bdims().size() == 1) return batch_laid_out(*batch, strides);
  return at::empty_strided(t.sizes(), strides, t.options().layout(at::kStrided)).copy_(t);
}

bool is_batch(const std::vector<at::Tensor>& tangents) {
  return std::ranges::all_of(tangents, [](const at::Tensor& t) { return !t.defined() || is_plain(t) || batch_in_memory(t); });
}

int64_t size_of_batch(const std::vector<at::Tensor>& tangents) {
  for (const at::Tensor& t : tangents)
    if (const auto* batch = t.defined() ? batch_in_memory(t) : nullptr) return batch->value().size(batch->bdims()[0].dim());
  return 0;
}

int64_t size_of_any_batch(const std::vector<at::Tensor>& tangents) {
  for (const at::Tensor& t : tangents)
    if (const auto* batch = t.defined() ? at::maybeGetBatchedImpl(t) : nullptr; batch && batch->bdims().size() == 1)
      return batch->value().size(batch->bdims()[0].dim());
  return -1;
}

std::vector<at::Tensor> one_of_batch(std::vector<at::Tensor> tangents, int64_t which) {
  for (at::Tensor& t : tangents)
    if (const auto* batch = t.defined() ? at::maybeGetBatchedImpl(t) : nullptr) t = batch->value().select(batch->bdims()[0].dim(), which);
  return tangents;
}

bool has_dims_of_one(const std::vector<at::Tensor>& tensors) {
  return std::ranges::any_of(tensors, [](const at::Tensor& t) { return t.defined() && std::ranges::count(t.sizes(), 1) > 0; });
}

std::vector<at::Tensor> as_batch(const std::vector<std::vector<at::Tensor>>& each) {
  std::vector<at::Tensor> all(each.at(0).size()), of;
  for (size_t g = 0; g < all.size(); ++g) {
    of.clear();
    for (const auto& one : each) of.push_back(one[g]);
    if (of[0].defined()) all[g] = at::addBatchDim(all_plain(of) ? batch_of(of) : at::stack(of), 1, 0);
  }
  return all;
}

}  // namespace vitrify
