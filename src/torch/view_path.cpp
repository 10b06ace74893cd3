#include "torch/view_path.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>

namespace vitrify {

namespace {

c10::OperatorHandle must_find(const std::string& name) {
  auto found = find_operator(name);
  VT_CHECK(found.has_value(), "no such op: {}", name);
  return *found;
}

}  // namespace

ViewCall::ViewCall(const ResultSpec::ViewOp& v) : op_(must_find(v.op)), args_(v.args), result_(v.result) {
  const auto& schema = op_.schema().arguments();
  for (size_t i = args_.size() + 1; i < schema.size(); ++i) args_.push_back(schema[i].default_value().value_or(c10::IValue()));
}

at::Tensor ViewCall::operator()(const at::Tensor& self) const {
  compat::Stack stack{self};
  stack.insert(stack.end(), args_.begin(), args_.end());
  op_.callBoxed(stack);
  std::vector<at::Tensor> out;
  flatten_results(stack, out);
  return out.at(result_ < 0 ? 0 : static_cast<size_t>(result_));
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
}

void ResultMaker::make(const std::vector<at::Tensor>& outputs, const std::vector<const at::Tensor*>& inputs, std::vector<at::Tensor>& results,
                       bool first) const {
  results.resize(specs_.size());
  for (uint32_t i : order_) {
    const ResultSpec& r = specs_[i];
    if (first ? !r.first : r.first && results[i].defined()) continue;
    const c10::AutoGradMode grad(r.grad.value_or(c10::GradMode::is_enabled()));
    switch (r.kind) {
      case ResultSpec::Kind::Value:
        results[i] = outputs[r.index];
        break;
      case ResultSpec::Kind::ViewOfOutput:
        results[i] = follow(paths_[i], outputs[r.index]);
        break;
      case ResultSpec::Kind::Input:
      case ResultSpec::Kind::ViewOfInput:
        results[i] = follow(paths_[i], *inputs[r.index]);
        break;
      case ResultSpec::Kind::ViewOfValue:
        results[i] = follow(paths_[i], results[r.index]);
        break;
      case ResultSpec::Kind::Undefined:
        break;
    }
  }
}

}  // namespace vitrify
