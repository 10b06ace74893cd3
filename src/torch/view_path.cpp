#include "torch/view_path.h"

#include <ATen/LegacyBatchedTensorImpl.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "torch/versions.h"

namespace vitrify {

namespace {

c10::OperatorHandle must_find(const std::string& name) {
  auto found = find_operator(name);
  VT_CHECK(found.has_value(), "no such op: {}", name);
  return *found;
}

}  // namespace

ViewCall::ViewCall(const ResultSpec::ViewOp& v)
    : op_(must_find(v.op)), args_(v.args), result_(v.result), call_(v.call), own_versions_(v.own_versions), mode_(v.mode), creation_(v.creation) {
  const auto& schema = op_.schema().arguments();
  for (size_t i = args_.size() + 1; i < schema.size(); ++i) args_.push_back(schema[i].default_value().value_or(c10::IValue()));
}

at::Tensor ViewCall::operator()(const at::Tensor& self) const {
  at::Tensor t = all(self).at(result());
  if (auto* view = creation_ < 0 ? nullptr : torch::autograd::impl::get_view_autograd_meta(t); view && view->has_bw_view())
    view->set_creation_meta(static_cast<torch::autograd::CreationMeta>(creation_));
  return t;
}

std::vector<at::Tensor> ViewCall::all(const at::Tensor& self) const {
  std::optional<c10::InferenceMode> inference;
  std::optional<c10::AutoGradMode> grad;
  if (mode_) {
    if ((mode_ == ViewMode::Inference) != c10::InferenceMode::is_enabled()) inference.emplace(mode_ == ViewMode::Inference);
    if (mode_ != ViewMode::Inference) grad.emplace(mode_ == ViewMode::Grad);
  }
  if (own_versions_) return {self.variable_data()};
  if (at::isBatchedTensor(self) && op_.operator_name().name == "aten::alias") return {self.expand(self.sizes())};  // ATen has no rule for it
  compat::Stack stack{self};
  stack.insert(stack.end(), args_.begin(), args_.end());
  op_.callBoxed(stack);
  std::vector<at::Tensor> out;
  flatten_results(stack, out);
  return out;
}

ViewPath resolve(const std::vector<ResultSpec::ViewOp>& path) { return ViewPath(path.begin(), path.end()); }

at::Tensor follow(const ViewPath& path, at::Tensor t) {
  for (const ViewCall& v : path) t = v(t);
  return t;
}

ResultMaker::ResultMaker(const std::vector<ResultSpec>& specs) : specs_(specs) {
  for (const ResultSpec& r : specs_) paths_.push_back(resolve(r.path));
  std::vector<uint32_t> by_age(specs_.size());
  std::iota(by_age.begin(), by_age.end(), 0);
  std::ranges::stable_sort(by_age, {}, [&](uint32_t i) { return specs_[i].order; });
  std::vector<char> made(specs_.size());
  const auto make_after = [&](auto&& self, uint32_t i) -> void {
    if (std::exchange(made[i], 1)) return;
    if (specs_[i].kind == ResultSpec::Kind::ViewOfValue) self(self, specs_[i].index);
    order_.push_back(i);
  };
  for (uint32_t i : by_age) make_after(make_after, i);
  keep_calls();
  find_alone();
}

void ResultMaker::keep_calls() {
  using Key = std::tuple<ResultSpec::Kind, uint32_t, size_t, uint64_t>;  // what it is a view of, when, and the call
  std::map<Key, std::pair<size_t, int32_t>> calls;                       // how many results come from it; where it is kept
  const auto each = [&](auto&& f) {
    for (size_t i = 0; i < specs_.size(); ++i)
      for (size_t k = 0; k < paths_[i].size(); ++k)
        if (const uint64_t call = paths_[i][k].call()) f(i, k, calls[Key{specs_[i].kind, specs_[i].index, k, call}]);
  };
  each([](size_t, size_t, auto& call) { ++call.first, call.second = -1; });
  if (calls.empty()) return;
  kept_.resize(specs_.size());
  each([&](size_t i, size_t k, auto& call) {
    if (call.first < 2) return;
    if (call.second < 0) call.second = static_cast<int32_t>(kept_calls_++);
    kept_[i].resize(paths_[i].size(), -1);
    kept_[i][k] = call.second;
  });
}

void ResultMaker::find_alone() {
  const auto is_of_output = [](const ResultSpec& r) { return r.kind == ResultSpec::Kind::Value || r.kind == ResultSpec::Kind::ViewOfOutput; };
  std::map<uint32_t, int> users;
  for (const ResultSpec& r : specs_)
    if (is_of_output(r)) ++users[r.index];
  alone_.resize(specs_.size());
  for (size_t i = 0; i < specs_.size(); ++i)
    alone_[i] = is_of_output(specs_[i]) && !paths_[i].empty() && users[specs_[i].index] == 1 && !specs_[i].outdated && !specs_[i].turn;
  for (const ResultSpec& r : specs_)
    if (r.kind == ResultSpec::Kind::ViewOfValue) alone_[r.index] = 0;
  if (std::ranges::find(alone_, 1) == alone_.end()) return;
  memo_ = std::make_shared<Memo>();
  memo_->laid.resize(specs_.size());
}

bool ResultMaker::Laid::Layout::is_of(const at::Tensor& t) const {
  return t.storage_offset() == offset && t.sizes() == sizes && t.strides() == strides;
}

// Null: it makes more of it than another layout.
std::shared_ptr<const ResultMaker::Laid> ResultMaker::laid_of(size_t result, const at::Tensor& output) const {
  if (typeid(*output.unsafeGetTensorImpl()) != typeid(c10::TensorImpl) || output.layout() != at::kStrided || output.is_conj() || output.is_neg())
    return nullptr;
  std::lock_guard lock(memo_->mutex);
  std::shared_ptr<const Laid>& known = memo_->laid[result];
  if (known && known->of.is_of(output)) return known;
  const at::Tensor t = follow(paths_[result], output);
  if (!t.is_alias_of(output) || t.scalar_type() != output.scalar_type() || t.is_conj() || t.is_neg()) return nullptr;
  const auto layout = [](const at::Tensor& t) { return Laid::Layout{t.sizes().vec(), t.strides().vec(), t.storage_offset()}; };
  return known = std::make_shared<Laid>(Laid{layout(output), layout(t)});
}

at::Tensor ResultMaker::memory_of(size_t result, const at::Tensor& output) const {
  const auto laid = laid_of(result, output);
  if (!laid) return follow(paths_[result], output);
  if (laid->of == laid->to) return output;
  at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(output.storage()), output.key_set(), output.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(laid->to.sizes, laid->to.strides, laid->to.offset);
  return t;
}

at::Tensor ResultMaker::view(size_t result, at::Tensor t, std::vector<std::vector<at::Tensor>>& calls) const {
  const ViewPath& path = paths_[result];
  if (kept_.empty() || kept_[result].empty()) return follow(path, std::move(t));
  const std::vector<int32_t>& kept = kept_[result];
  size_t k = path.size();
  while (k > 0 && (kept[k - 1] < 0 || calls[kept[k - 1]].empty())) --k;
  if (k > 0) t = calls[kept[k - 1]].at(path[k - 1].result());
  for (; k < path.size(); ++k) {
    if (kept[k] < 0) {
      t = path[k](t);
      continue;
    }
    calls[kept[k]] = path[k].all(t);
    t = calls[kept[k]].at(path[k].result());
  }
  return t;
}

void ResultMaker::make(const std::vector<at::Tensor>& outputs, const std::vector<const at::Tensor*>& inputs, std::vector<at::Tensor>& results,
                       std::optional<uint32_t> turn, bool unseen) const {
  results.resize(specs_.size());
  std::vector<std::vector<at::Tensor>> calls(kept_calls_);
  for (uint32_t i : order_) {
    const ResultSpec& r = specs_[i];
    if (turn ? r.turn != turn : r.turn && results[i].defined()) continue;
    switch (r.kind) {
      case ResultSpec::Kind::Value:
      case ResultSpec::Kind::ViewOfOutput:
        results[i] = unseen && alone_[i] ? memory_of(i, outputs[r.index]) : view(i, outputs[r.index], calls);
        break;
      case ResultSpec::Kind::Input:
      case ResultSpec::Kind::ViewOfInput:
        results[i] = view(i, *inputs[r.index], calls);
        break;
      case ResultSpec::Kind::ViewOfValue:
        if (turn && specs_[r.index].kind == ResultSpec::Kind::Value && specs_[r.index].path.empty())
          results[r.index] = outputs[specs_[r.index].index];
        results[i] = view(i, results[r.index], calls);
        break;
      case ResultSpec::Kind::Undefined:
        break;
    }
    if (r.outdated) make_outdated(results[i]);
  }
}

void write_back(const Mutation& m, const ViewPath& path, const at::Tensor& input, const std::vector<at::Tensor>& outputs, bool memory) {
  if (!path.empty()) follow(path, input);
  if (memory) input.copy_(outputs[m.output]);
  count_writes(m, input, m.counted < 0 ? 0 : outputs[static_cast<size_t>(m.counted)].item<int64_t>());
}

void count_writes(const Mutation& m, const at::Tensor& input, int64_t counted) {
  if (!counts_versions(input)) return;
  for (int64_t k = 0; k < m.version_bumps + counted; ++k) input.unsafeGetTensorImpl()->bump_version();
}

}  // namespace vitrify
