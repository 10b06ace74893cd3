#include "torch/program.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "torch/tracer_impl.h"

namespace vitrify {

void complete(Program& p, const std::vector<at::Tensor>& outputs, const std::vector<at::Generator>& known) {
  const bool mode = c10::InferenceMode::is_enabled();
  size_t made = 0, as_mode = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (p.results[i].kind != ResultSpec::Kind::Value && p.results[i].kind != ResultSpec::Kind::ViewOfOutput) continue;
    ++made;
    as_mode += outputs[i].is_inference() == mode;
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (p.results[i].path.empty()) continue;
    auto* view = torch::autograd::impl::get_view_autograd_meta(outputs[i]);
    if (!view || !view->has_bw_view()) continue;
    const auto meta = view->get_creation_meta();
    if (meta != torch::autograd::CreationMeta::DEFAULT && meta != torch::autograd::CreationMeta::NO_GRAD_MODE) continue;
    const bool grad = meta == torch::autograd::CreationMeta::DEFAULT;
    if (grad != c10::GradMode::is_enabled()) p.results[i].grad = grad;
  }
  if (made && !as_mode) p.inference = !mode;
  if (made && as_mode && as_mode != made) capture::fail("returns both inference tensors and others");

  for (const ir::Node* n : p.graph->nodes()) {
    for (const ir::Arg& a : n->args) {
      auto* opaque = std::get_if<ir::OpaqueArg>(&a);
      if (!opaque) continue;
      const auto& v = *std::static_pointer_cast<c10::IValue>(p.graph->constants.at(opaque->index));
      if (!v.isGenerator()) continue;
      const at::Generator g = v.toGenerator();
      if (g == at::detail::getDefaultCPUGenerator()) continue;
      if (std::none_of(known.begin(), known.end(), [&](const at::Generator& k) { return k == g; }))
        capture::fail(n->op->name + " draws from a generator that the program makes");
    }
  }
}

}  // namespace vitrify
