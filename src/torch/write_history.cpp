#include "torch/write_history.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "torch/compat.h"
#include "torch/convert.h"
#include "torch/learned.h"

namespace vitrify {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

// Gradients reach an input that was written through the region; what a view's base held there gets none.
class WriteNode final : public Node {
 public:
  variable_list apply(variable_list&& g) override {
    if (num_outputs() == 1) return {g[0]};
    return {g[0].defined() ? at::zeros_like(g[0]) : g[0], g[0]};
  }
  std::string name() const override { return "VitrifyWriteBackward"; }
};

}  // namespace

void refuse_changed(const ir::TensorType& type, const at::Tensor& now, const std::string& of, int64_t version, int64_t expected) {
  std::vector<std::string> sizes;
  if (now.defined())
    for (int64_t i : now.sizes()) sizes.push_back(std::to_string(i));
  else
    for (sym::Int i : type.sizes) sizes.push_back(i.is_const() ? std::to_string(i.value()) : "?");
  TORCH_CHECK(false, kChanged, type.device.kind == DeviceKind::CPU ? "CPU" : "CUDA", c10::toString(scalar_type_of(type)), "Type [",
              fmt::format("{}", fmt::join(sizes, ", ")), "]]", of, " is at version ", version, "; expected version ", expected,
              " instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
              "torch.autograd.set_detect_anomaly(True, check_nan=False).");
}

std::string with_writes(std::string says, int64_t more) {
  constexpr std::string_view kVersion = " is at version ";
  const size_t at = says.find(kVersion);
  if (at == std::string::npos) return says;
  const size_t begin = at + kVersion.size(), end = says.find_first_not_of("0123456789", begin);
  return says.replace(begin, end - begin, std::to_string(std::stoll(says.substr(begin)) + more));
}

void refuse_detached() {
  TORCH_CHECK(false,
              "Trying to use a saved tensor that has been detached in-place, i.e. with .detach_()."
              "This is not supported, please use out-of-place `.detach()` instead");
}

// Leaves, and some views, may not be written in a way that gradients follow: eager says which, and why.
void check_written(const at::Tensor& t) {
  try {
    const c10::AutoGradMode with_gradients(true);
    torch::autograd::check_inplace(t, true);
  } catch (const c10::Error&) {
    throw capture::CallRefused("it writes what gradients follow where eager may not");
  }
}

void check_written_view(const at::Tensor& t, bool past_it) {
  if (past_it) throw capture::CallRefused("it writes to an argument that is a view, and returns what follows by way of another view");
  at::Tensor base;
  base = t._base();
  const Edge end = torch::autograd::impl::gradient_edge(base);
  for (Edge e = torch::autograd::impl::gradient_edge(t); e.function && e != end;) {
    Node& n = *e.function;
    if (!n.pre_hooks().empty() || !n.post_hooks().empty() || !n.tensor_pre_hooks().empty() || !n.retains_grad_hooks().empty() || n.num_outputs() != 1)
      throw capture::CallRefused("it writes to an argument that is a view, whose gradient someone looks at");
    e = Edge(n.next_edge(0));
  }
}

// `t` was written in place, in a way that gradients follow: eager's history for it. `before`: where its gradient went.
void rebase(const at::Tensor& t, Edge region, const Edge& before) {
  auto part = compat::make_node<WriteNode>();
  if (t.is_view()) part->add_next_edge(before);  // what its base's node takes for its own gradient, if there is one
  part->add_next_edge(std::move(region));
  part->add_input_metadata(t);
  torch::autograd::impl::rebase_history(t, Edge(std::move(part), 0));
}

}  // namespace vitrify
