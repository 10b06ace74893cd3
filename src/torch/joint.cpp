// Captures the derivative: autograd's own formulas run over the placeholders, under the same mode as the program did.
#include "torch/joint.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

#include "torch/convert.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using ir::Value;
using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

// On this thread, since the tracer belongs to it; without autocast, which does not hold for what runs after its region.
class BackwardState {
 public:
  BackwardState() : multithreading_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
  ~BackwardState() { c10::AutogradState::get_tls_state().set_multithreading_enabled(multithreading_); }
  BackwardState(const BackwardState&) = delete;

 private:
  bool multithreading_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

// Python hooks would run once, on placeholders.
void refuse_hooks(const std::vector<Edge>& roots) {
  std::vector<Node*> todo;
  std::unordered_set<Node*> seen;
  auto add = [&](const Edge& e) {
    if (e.function && seen.insert(e.function.get()).second) todo.push_back(e.function.get());
  };
  for (const Edge& e : roots) add(e);
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    const bool leaf = n->num_outputs() == 0;  // hooks of a leaf run when the gradient arrives, as in eager
    if (!leaf && (!n->pre_hooks().empty() || !n->post_hooks().empty() || !n->tensor_pre_hooks().empty() || !n->retains_grad_hooks().empty()))
      fail("registers a gradient hook, or retains the gradient of a tensor that is not a leaf");
    for (const Edge& e : n->next_edges()) add(e);
  }
}

}  // namespace

// Where the gradient of an input that is not a leaf leaves the program.
struct Tracer::Impl::InputNode final : Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { TORCH_CHECK(false, "vitrify: a placeholder has no gradient"); }
  std::string name() const override { return "VitrifyInput"; }
};

void Tracer::Impl::require_grad(Source& s) {
  if (s.real.is_leaf()) {
    s.fake.set_requires_grad(true);
  } else {
    torch::autograd::set_history(s.fake, compat::make_node<InputNode>());
  }
  s.edge = torch::autograd::impl::gradient_edge(s.fake);
}

JointProgram Tracer::Impl::finish_joint(const std::vector<at::Tensor>& outputs) {
  if (failure) throw CaptureError(*failure);
  JointProgram j;
  count_versions();
  std::vector<at::Tensor> tensors;  // per graph output: the tensor it is; undefined where it carries no gradient
  emit_outputs(outputs, j.program, &tensors);
  j.num_forward = static_cast<uint32_t>(graph->outputs.size());
  tensors.resize(j.num_forward);

  for (Source* s : inputs)
    if (s->fake.defined() && s->edge.function && torch::autograd::impl::gradient_edge(s->fake) != s->edge)
      fail(fmt::format("writes to input '{}' in a way that gradients must follow", s->name));

  for (uint32_t o = 0; o < tensors.size(); ++o) {
    if (!tensors[o].defined() || !tensors[o].requires_grad()) continue;
    const ir::TensorType type = graph->outputs[o].type();
    sources.push_back({{}, {}, ir::InputKind::Tangent, fmt::format("tangent{}", j.roots.size())});
    sources.back().input = static_cast<int32_t>(inputs.size());
    inputs.push_back(&sources.back());
    j.roots.push_back({o, static_cast<uint32_t>(sources.back().input)});
    roots.tangents.push_back(new_tensor(graph->add_input(ir::InputKind::Tangent, sources.back().name, type)));
    roots.from.push_back(torch::autograd::impl::gradient_edge(tensors[o]));
  }
  if (!j.roots.empty()) {
    refuse_hooks(roots.from);
    for (uint32_t i = 0; i < inputs.size(); ++i) {
      Source& s = *inputs[i];
      if (!s.fake.defined() || !s.real.requires_grad()) continue;
      // An argument is met as its placeholder, anything else as itself.
      roots.to.push_back(i < num_args ? s.edge : torch::autograd::impl::gradient_edge(s.real));
      roots.inputs.push_back(i);
    }
    j.backward = graph->next_id();
    std::vector<Value> values;
    j.gradients = differentiate(roots.tangents, values);
    for (Gradient& g : j.gradients) g.how.index += j.num_forward;
    graph->outputs.insert(graph->outputs.end(), values.begin(), values.end());
  }
  stop();
  if (failure) throw CaptureError(*failure);
  take_inputs(j.program);
  if (j.roots.empty()) graph->remove_dead();  // otherwise the trace may go on
  return j;
}

std::vector<Gradient> Tracer::Impl::differentiate(const std::vector<at::Tensor>& tangents, std::vector<Value>& values) {
  std::vector<Edge> from;
  std::vector<at::Tensor> defined, grads;
  for (size_t k = 0; k < tangents.size(); ++k)
    if (tangents[k].defined()) {
      from.push_back(roots.from[k]);
      defined.push_back(tangents[k]);
    }
  if (roots.to.empty() || from.empty()) return {};
  auto run = [&] {
    BackwardState state;
    grads = torch::autograd::Engine::get_default_engine().execute(from, defined, /*keep_graph=*/true, /*create_graph=*/false,
                                                                  /*accumulate_grad=*/false, roots.to);
  };
  if (options.without_gil)
    options.without_gil(run);
  else
    run();
  std::vector<Gradient> r;
  auto owners = output_roots;  // gradients and results each have memory of their own
  for (size_t k = 0; k < grads.size(); ++k) {
    if (!grads[k].defined()) continue;
    const at::Tensor g = fake_of(grads[k]);
    FakeImpl* f = as_fake(g);
    if (f->is_conj() || f->is_neg()) fail("a gradient is a conjugate or negative view");
    capture::View& v = *f->view;
    ResultSpec how;
    how.index = static_cast<uint32_t>(values.size());
    bool overlaps = false;
    for (size_t d = 0; d < v.type.dim(); ++d) overlaps = overlaps || (v.type.strides[d].is(0) && !v.type.sizes[d].is(1));
    if (overlaps) {
      how.kind = ResultSpec::Kind::ViewOfOutput;
      how.path = path_of(v);
      values.push_back(own_storage(v.storage->base, v.storage.get(), owners));
    } else {
      values.push_back(own_storage(read(v), v.storage.get(), owners));
    }
    r.push_back({roots.inputs[k], std::move(how)});
  }
  return r;
}

std::vector<Gradient> Tracer::Impl::differentiate_again(const std::vector<char>& defined, std::vector<Value>& values) {
  std::vector<at::Tensor> tangents = roots.tangents;
  for (size_t k = 0; k < tangents.size(); ++k)
    if (!defined[k]) tangents[k].reset();
  failure.reset();
  // What autograd saved was of those versions; they are put back when this is over.
  std::vector<std::pair<Source*, int64_t>> versions;
  for (Source& s : sources)
    if (s.fake.defined() && !s.real.is_inference()) {
      versions.emplace_back(&s, static_cast<int64_t>(s.real._version()));
      c10::VariableVersion counter = s.real.unsafeGetTensorImpl()->version_counter();
      counter.set_version(s.real_version);
    }
  struct PutBack {
    std::vector<std::pair<Source*, int64_t>>& versions;
    ~PutBack() {
      for (auto& [s, v] : versions) {
        c10::VariableVersion counter = s->real.unsafeGetTensorImpl()->version_counter();
        counter.set_version(v);
      }
    }
  } put_back{versions};
  resume();
  std::vector<Gradient> r;
  try {
    r = differentiate(tangents, values);
  } catch (...) {
    stop();
    throw;
  }
  stop();
  return r;
}

std::vector<Gradient> Tracer::differentiate(const std::vector<char>& defined, std::vector<Value>& outputs) {
  std::vector<Gradient> r;
  auto run = [&] { r = impl_->differentiate_again(defined, outputs); };
  if (impl_->options.with_gil)
    impl_->options.with_gil(run);
  else
    run();
  return r;
}

}  // namespace vitrify
