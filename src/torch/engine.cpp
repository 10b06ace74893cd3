// The C++ door's engine: signatures, guards and entries of one compiled callable.
#include <ATen/autocast_mode.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <shared_mutex>

#include "support/counters.h"
#include "torch/compiled.h"
#include "torch/tracer.h"
#include "vitrify/compile.h"

namespace vitrify {

std::map<std::string, uint64_t> counters_map() {
  std::map<std::string, uint64_t> m;
  for (auto& [k, v] : counters().snapshot()) m[k] = v;
  return m;
}
void reset_counters() { counters().reset(); }

namespace detail {

namespace {

void add_tensor(Flat& k, const at::Tensor& t) {
  if (!t.defined()) return k.tag('u');
  k.tag('T');
  k.bytes(t.scalar_type());
  k.bytes(t.device());
  k.bytes(t.key_set().raw_repr());
  k.bytes(t.requires_grad());
  k.bytes(t.dim());
  for (int64_t d = 0; d < t.dim(); ++d) k.bytes(t.size(d)), k.bytes(t.stride(d));
}

void add_process_state(Flat& k) {
  k.bytes(c10::GradMode::is_enabled());
  k.bytes(c10::InferenceMode::is_enabled());
  k.bytes(at::autocast::is_autocast_enabled(at::kCPU));
  k.bytes(at::autocast::get_autocast_dtype(at::kCPU));
  k.bytes(at::get_num_threads());
  k.bytes(at::globalContext().deterministicAlgorithms());
  k.bytes(c10::get_default_dtype_as_scalartype());
}

bool needs_grad(const std::vector<at::Tensor>& args, const std::vector<at::Tensor>& params) {
  if (!c10::GradMode::is_enabled()) return false;
  for (auto* list : {&args, &params})
    for (auto& t : *list)
      if (t.defined() && t.requires_grad()) return true;
  return false;
}

Options to_options(const CompileOptions& c) {
  Options o = Options::from_environment();
  for (auto& [k, v] : c.options) set_option(o, k, v);
  return o;
}

}  // namespace

struct Engine::Entry {
  std::shared_ptr<CompiledGraph> graph;  // null: this signature runs eagerly
  std::any blueprint;
  std::once_flag once;
};

struct Engine::Impl {
  CompileOptions spec;
  Options options;
  std::shared_ptr<torch::nn::Module> module;
  std::vector<std::pair<std::string, at::Tensor>> sources;  // parameters and buffers
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::vector<at::Tensor> params;

  mutable std::shared_mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<Entry>> entries;
  bool warned_grad = false, warned_limit = false;
};

Engine::Engine(CompileOptions o, std::shared_ptr<torch::nn::Module> m) : impl_(std::make_shared<Impl>()) {
  impl_->spec = std::move(o);
  impl_->options = to_options(impl_->spec);
  impl_->module = std::move(m);
  if (impl_->module) {
    for (auto& p : impl_->module->named_parameters()) impl_->sources.emplace_back(p.key(), p.value()), impl_->params.push_back(p.value());
    for (auto& b : impl_->module->named_buffers()) impl_->sources.emplace_back(b.key(), b.value());
    impl_->modules = impl_->module->modules();
  }
}
Engine::~Engine() = default;

std::shared_ptr<Engine::Entry> Engine::find(const Flat& call, const Trace& trace) {
  Impl& im = *impl_;
  if (im.spec.disable || Tracer::current()) return nullptr;
  if (needs_grad(call.tensors, im.params)) {
    counters().eager_calls++;
    std::unique_lock lock(im.mutex);
    if (!std::exchange(im.warned_grad, true))
      TORCH_WARN("vitrify: ", im.spec.name, " ran eagerly: it needs gradients, and this version compiles inference only. Call it under torch::NoGradGuard.");
    return nullptr;
  }
  Flat key = {{}, call.key};
  for (auto& t : call.tensors) add_tensor(key, t);
  // which arguments are one tensor, or share memory
  for (size_t i = 0; i < call.tensors.size(); ++i)
    for (size_t j = i + 1; j < call.tensors.size(); ++j)
      if (call.tensors[i].defined() && call.tensors[j].defined() && call.tensors[i].is_alias_of(call.tensors[j]))
        key.bytes(i), key.bytes(j), key.bytes(call.tensors[i].is_same(call.tensors[j])), key.bytes(call.tensors[j].storage_offset() - call.tensors[i].storage_offset());
  add_process_state(key);
  for (auto& m : im.modules) key.bytes(m->is_training());
  for (auto& [n, t] : im.sources) key.bytes(t.unsafeGetTensorImpl()), add_tensor(key, t);

  std::shared_ptr<Entry> e;
  {
    std::shared_lock lock(im.mutex);
    if (auto it = im.entries.find(key.key); it != im.entries.end()) e = it->second;
  }
  if (!e) {
    std::unique_lock lock(im.mutex);
    if (static_cast<int64_t>(im.entries.size()) >= im.options.recompile_limit && !im.entries.count(key.key)) {
      counters().eager_calls++;
      if (im.options.error_on_recompile) throw RecompileError("vitrify: " + im.spec.name + " reached recompile_limit");
      if (!std::exchange(im.warned_limit, true))
        TORCH_WARN("vitrify: ", im.spec.name, " has ", im.entries.size(), " compiled signatures (recompile_limit); new ones run eagerly.");
      return nullptr;
    }
    auto& slot = im.entries[key.key];
    if (!slot) slot = std::make_shared<Entry>();
    e = slot;
  }
  std::call_once(e->once, [&] {
    try {
      Tracer tracer;
      std::vector<at::Tensor> fakes;
      for (size_t i = 0; i < call.tensors.size(); ++i)
        fakes.push_back(call.tensors[i].defined() ? tracer.add_input(call.tensors[i], ir::InputKind::Argument, "arg" + std::to_string(i)) : at::Tensor());
      for (auto& [n, t] : im.sources) tracer.declare_source(t, t.requires_grad() ? ir::InputKind::Parameter : ir::InputKind::Buffer, n);
      tracer.accept_unknown_tensors(true);
      tracer.start();
      std::vector<at::Tensor> out = trace(fakes, e->blueprint);
      Program p = tracer.finish(out);
      counters().captures++;
      e->graph = CompiledGraph::compile(std::move(p), im.options);
    } catch (const CaptureError& err) {
      if (im.spec.fullgraph) throw;
      counters().fallbacks++;
      TORCH_WARN("vitrify: ", im.spec.name, " runs eagerly for this signature: ", err.what());
    } catch (const InternalError& err) {
      if (im.spec.fullgraph) throw;
      counters().fallbacks++;
      TORCH_WARN("vitrify: internal error while compiling ", im.spec.name, ", running it eagerly: ", err.what());
    } catch (const std::bad_alloc&) {
      counters().fallbacks++;
      TORCH_WARN("vitrify: out of memory while compiling ", im.spec.name, ", running it eagerly");
    } catch (const c10::Error&) {
      // The callable itself failed, or a placeholder was misused: the eager call decides, and raises what eager raises.
      if (im.spec.fullgraph) throw;
      counters().fallbacks++;
    }
  });
  if (!e->graph) {
    counters().eager_calls++;
    return nullptr;
  }
  return e;
}

std::vector<at::Tensor> Engine::run(Entry& e, const std::vector<at::Tensor>& args) {
  bool all = true;
  for (auto& t : args) all = all && t.defined();
  if (all) return e.graph->run(args);
  std::vector<at::Tensor> given;
  for (auto& t : args)
    if (t.defined()) given.push_back(t);
  return e.graph->run(given);
}
const std::any& Engine::blueprint(const Entry& e) const { return e.blueprint; }
void Engine::reset() {
  std::unique_lock lock(impl_->mutex);
  impl_->entries.clear();
}
std::string Engine::explain() const {
  std::shared_lock lock(impl_->mutex);
  std::string s;
  for (auto& [k, e] : impl_->entries) s += e->graph ? e->graph->describe() : "eager\n";
  return s;
}

}  // namespace detail
}  // namespace vitrify
