// The C++ door's engine: signatures, guards and entries of one compiled callable.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include "support/counters.h"
#include "support/eager.h"
#include "sym/holds.h"
#include "torch/compat.h"
#include "torch/compiled.h"
#include "torch/executor.h"
#include "torch/learned.h"
#include "torch/process_state.h"
#include "torch/tracer.h"
#include "torch/training.h"
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

constexpr int kMaxAttempts = 3;  // captures that the callable's own exceptions ended, and plans that were refused, before a signature stays eager

// Everything but sizes and strides.
void add_kind(Flat& k, const at::Tensor& t) {
  if (!t.defined()) return k.tag('u');
  k.tag('T');
  k.bytes(t.scalar_type());
  k.bytes(t.device());
  k.bytes(t.key_set().raw_repr());
  k.bytes(t.requires_grad());
  k.bytes(t.requires_grad() && t.is_leaf());
  k.bytes(t.dim());
}

void add_tensor(Flat& k, const at::Tensor& t) {
  add_kind(k, t);
  if (!t.defined() || t.layout() != at::kStrided) return;
  for (int64_t d = 0; d < t.dim(); ++d) k.bytes(t.size(d)), k.bytes(t.stride(d));
}

std::string metadata(const std::vector<at::Tensor>& tensors) {
  Flat k;
  for (auto& t : tensors) add_tensor(k, t);
  return std::move(k.key);
}

void add_process_state(Flat& k) {
  k.bytes(c10::GradMode::is_enabled());
  k.bytes(c10::InferenceMode::is_enabled());
  for (auto device : {at::kCPU, at::kCUDA}) {
    k.bytes(at::autocast::is_autocast_enabled(device));
    k.bytes(at::autocast::get_autocast_dtype(device));
  }
  k.bytes(at::get_num_threads());
  k.bytes(library_state());
  k.bytes(c10::get_default_dtype_as_scalartype());
}

Options to_options(const CompileOptions& c) {
  Options o = Options::from_environment();
  for (auto& [k, v] : c.options) set_option(o, k, v);
  return o;
}

// Sizes and strides of a call's tensors, end to end: size 0, stride 0, size 1, ...
std::vector<int64_t> shape_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> shape;
  for (auto& t : tensors)
    if (t.defined() && t.layout() == at::kStrided)
      for (int64_t d = 0; d < t.dim(); ++d) shape.push_back(t.size(d)), shape.push_back(t.stride(d));
  return shape;
}

struct Again {};       // leaves an entry's once_flag unset
struct NotDynamic {};  // the program needs its sizes fixed

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() && a.is_alias_of(b);
}

}  // namespace

struct Engine::Entry {
  // Before the capture, fixed: the shape it is made at, and which of its numbers may differ.
  std::vector<int64_t> shape;
  std::vector<char> free;

  std::once_flag once;
  std::atomic<bool> ready{false};
  // After the capture, fixed.
  std::shared_ptr<CompiledGraph> graph;  // null: this signature runs eagerly
  std::any blueprint;
  std::vector<std::pair<uint32_t, uint32_t>> bindings;  // symbol, index into shape
  std::vector<std::pair<uint32_t, sym::Int>> equal;     // index into shape, its expression
  sym::Known known;                                     // of sizes, by the end of the compile; guards of bindings alone
  std::vector<at::Tensor> held;                         // tensors of the callable's own met by the capture
  std::string held_metadata;

  int attempts = 0;
  std::atomic<bool> stale{false};    // serves nobody any more
  std::atomic<bool> refused{false};  // its plan was wrong: eager

  bool dynamic() const {
    return std::any_of(free.begin(), free.end(), [](char c) { return c; });
  }

  bool may_serve(const std::vector<int64_t>& s) const {
    if (stale) return false;
    for (size_t i = 0; i < s.size(); ++i) {
      if (!free[i] && s[i] != shape[i]) return false;
      if (free[i] && i % 2 == 0 && s[i] < 2) return false;  // 0 and 1 broadcast and vanish
    }
    return true;
  }
  // Of a ready entry that may serve.
  bool serves(const std::vector<int64_t>& s) const {
    if (!graph || bindings.empty()) return true;
    std::vector<int64_t> values;
    for (auto& [symbol, at] : bindings) {
      if (values.size() <= symbol) values.resize(symbol + 1);
      values[symbol] = s[at];
      const auto& [range, multiple_of] = known.symbols[symbol];
      if (s[at] < range.lo || s[at] > range.hi || s[at] % multiple_of) return false;
    }
    values.resize(known.symbols.size());
    const std::function<int64_t(uint32_t)> value = [&](uint32_t id) { return values.at(id); };
    for (auto& [at, e] : equal)
      if (sym::eval(e, value) != s[at]) return false;
    for (const sym::Guard& g : known.guards)
      if (!sym::holds(g, value).value()) return false;
    return true;
  }
  void take_guards(const Program& p) {
    uint32_t at = 0;
    const auto& ctx = p.graph->ctx();
    for (uint32_t i = 0; i < p.num_args; ++i) {
      const ir::TensorType& type = p.graph->inputs[i].value.type();
      for (uint32_t d = 0; d < type.dim(); ++d)
        for (sym::Int e : {type.sizes[d], type.strides[d]}) {
          const uint32_t here = at++;
          if (e.is_const()) {
            if (free[here]) equal.emplace_back(here, e);
            continue;
          }
          const bool bound =
              sym::is_symbol(e) && std::any_of(bindings.begin(), bindings.end(), [&](auto& b) { return b.first == ctx.symbol_info(e).id; });
          if (sym::is_symbol(e) && !bound)
            bindings.emplace_back(ctx.symbol_info(e).id, here);
          else
            equal.emplace_back(here, e);
        }
    }
  }
};

// What a module consisted of when last looked at.
struct ModuleView {
  std::vector<std::pair<std::string, at::Tensor>> sources;  // parameters and buffers
  std::vector<std::shared_ptr<torch::nn::Module>> modules;

  explicit ModuleView(const torch::nn::Module* m) {
    if (!m) return;
    for (auto& p : m->named_parameters()) sources.emplace_back(p.key(), p.value());
    for (auto& b : m->named_buffers()) sources.emplace_back(b.key(), b.value());
    modules = const_cast<torch::nn::Module*>(m)->modules();
  }
  bool has(const at::Tensor& t) const {
    return std::any_of(sources.begin(), sources.end(), [&](auto& s) { return s.second.is_same(t); });
  }
};

struct Engine::Impl {
  using Entries = std::vector<std::shared_ptr<Entry>>;
  CompileOptions spec;
  Options options;
  std::shared_ptr<torch::nn::Module> module;

  mutable std::shared_mutex mutex;
  std::shared_ptr<const ModuleView> view;
  std::unordered_map<std::string, Entries> entries;  // by everything but sizes and strides of the arguments
  size_t count = 0;
  std::unordered_set<std::string> fixed;  // keys of `entries` whose programs need their sizes fixed
  bool warned_limit = false;
  std::atomic<int> refusals{0};

  std::string key(const ModuleView&, const Flat& call) const;
  std::shared_ptr<Entry> entry_for(const std::string& key, const std::vector<int64_t>& shape, const std::vector<at::Tensor>& args);
  void remove(const Entry&);
  void capture(Entry&, const ModuleView&, const Flat& call, const Trace&);
};

Engine::Engine(CompileOptions o, std::shared_ptr<torch::nn::Module> m) : impl_(std::make_shared<Impl>()) {
  impl_->spec = std::move(o);
  impl_->options = to_options(impl_->spec);
  impl_->module = std::move(m);
  impl_->view = std::make_shared<ModuleView>(impl_->module.get());
}
Engine::~Engine() = default;

std::string Engine::Impl::key(const ModuleView& view, const Flat& call) const {
  Flat k;
  k.key.reserve(call.key.size() + 64 * (call.tensors.size() + view.sources.size()));
  k.key = call.key;
  for (auto& t : call.tensors) add_kind(k, t);
  // which arguments are one tensor, or share memory
  for (size_t i = 0; i < call.tensors.size(); ++i)
    for (size_t j = i + 1; j < call.tensors.size(); ++j) {
      const at::Tensor &a = call.tensors[i], &b = call.tensors[j];
      if (share_memory(a, b)) k.bytes(i), k.bytes(j), k.bytes(a.is_same(b)), k.bytes(b.storage_offset() - a.storage_offset());
    }
  add_process_state(k);
  for (auto& m : view.modules) k.bytes(m->is_training());
  for (auto& [n, t] : view.sources) add_tensor(k, t);
  return std::move(k.key);
}

// The entry that serves this call, or may once it has been captured; null: run eagerly.
std::shared_ptr<Engine::Entry> Engine::Impl::entry_for(const std::string& key, const std::vector<int64_t>& shape,
                                                       const std::vector<at::Tensor>& args) {
  auto look = [&]() -> std::shared_ptr<Entry> {
    auto it = entries.find(key);
    if (it == entries.end()) return nullptr;
    for (auto& e : it->second)
      if (e->may_serve(shape) && (!e->ready || (e->serves(shape) && (e->held.empty() || metadata(e->held) == e->held_metadata)))) return e;
    return nullptr;
  };
  {
    std::shared_lock lock(mutex);
    if (auto e = look()) return e;
  }
  std::unique_lock lock(mutex);
  if (auto e = look()) return e;
  Entries& list = entries[key];
  // What the callable's own tensors no longer match will not be used again, unless they change back.
  count -= std::erase_if(list, [&](auto& e) { return e->stale || (e->ready && !e->held.empty() && metadata(e->held) != e->held_metadata); });
  if (count && options.error_on_recompile) throw RecompileError("vitrify: " + spec.name + " was called with a new signature");
  if (static_cast<int64_t>(count) >= options.recompile_limit) {
    if (std::exchange(warned_limit, true)) return nullptr;
    lock.unlock();
    note_eager("recompile_limit is reached");
    TORCH_WARN("vitrify: ", spec.name, " has ", options.recompile_limit, " compiled signatures (recompile_limit); new ones run eagerly.");
    return nullptr;
  }
  auto e = std::make_shared<Entry>();
  e->shape = shape;
  e->free.resize(shape.size());
  bool aliases = false;  // how they overlap depends on their sizes
  for (size_t i = 0; i < args.size(); ++i)
    for (size_t j = i + 1; j < args.size(); ++j) aliases = aliases || share_memory(args[i], args[j]);
  if (spec.dynamic != Dynamic::Never && !aliases && !fixed.count(key))
    for (size_t i = 0; i < shape.size(); i += 2) {
      bool differs = spec.dynamic == Dynamic::Always;
      for (auto& other : list) differs = differs || other->free[i] || other->shape[i] != shape[i];
      e->free[i] = differs && shape[i] >= 2;
    }
  if (e->dynamic())
    for (size_t i = 1; i < shape.size(); i += 2) e->free[i] = 1;  // strides follow sizes: checked against their expressions
  list.push_back(e);
  if (count++) counters().recompiles++;
  return e;
}

void Engine::Impl::remove(const Entry& gone) {
  std::unique_lock lock(mutex);
  for (auto& [k, list] : entries) count -= std::erase_if(list, [&](auto& e) { return e.get() == &gone; });
}

void Engine::Impl::capture(Entry& e, const ModuleView& view, const Flat& call, const Trace& trace) {
  auto eager = [&](auto&&... why) {
    counters().fallbacks++;
    note_eager(c10::str(why...));
    TORCH_WARN("vitrify: ", spec.name, " runs eagerly for this signature: ", why...);
  };
  TracerOptions about;
  about.name = spec.name;
  about.resumes = true;
  auto tracer_owner = std::make_shared<Tracer>(std::move(about));
  Tracer& tracer = *tracer_owner;
  try {
    std::vector<at::Tensor> fakes;
    size_t at = 0;
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      const at::Tensor& t = call.tensors[i];
      if (!t.defined()) {
        fakes.emplace_back();
        continue;
      }
      if (t.unsafeGetTensorImpl()->is_wrapped_number()) throw CaptureError("an argument is a wrapped number");
      std::vector<DimMark> marks;
      if (t.layout() == at::kStrided)
        for (int64_t d = 0; d < t.dim(); ++d, at += 2) marks.push_back({bool(e.free[at])});
      fakes.push_back(tracer.add_input(t, ir::InputKind::Argument, "arg" + std::to_string(i), marks));
    }
    for (auto& [n, t] : view.sources) tracer.declare_source(t, t.requires_grad() ? ir::InputKind::Parameter : ir::InputKind::Buffer, n);
    tracer.accept_unknown_tensors(true);
    tracer.start();
    std::vector<at::Tensor> out = trace(fakes, e.blueprint);
    JointProgram joint;
    if (c10::GradMode::is_enabled() || tracer.makes_gradients(out))
      joint = tracer.finish_joint(out);
    else
      joint.program = tracer.finish(out);
    Program& p = joint.program;
    complete(p);
    counters().captures++;
    for (auto& t : p.captured)
      if (t.defined() && !view.has(t)) e.held.push_back(t);
    e.held_metadata = metadata(e.held);
    e.take_guards(p);
    auto graph = joint.roots.empty() ? CompiledGraph::compile(std::move(p), options) : compile_training(std::move(joint), tracer_owner, options);
    e.known = sym::known(graph->program().graph->ctx());
    std::erase_if(e.known.guards, [&](const sym::Guard& g) {  // the run looks at those of other sizes
      std::vector<sym::Int> symbols;
      sym::free_symbols(g.expr, symbols);
      return !std::ranges::all_of(
          symbols, [&](sym::Int s) { return std::ranges::any_of(e.bindings, [&](auto& b) { return b.first == sym::view(s).symbol->id; }); });
    });
    e.graph = std::move(graph);
  } catch (const CaptureError& err) {
    if (e.dynamic()) throw NotDynamic();
    if (tracer.takes_other_sizes() && ++e.attempts < kMaxAttempts) throw Again();
    if (spec.fullgraph) throw;
    eager(err.what());
  } catch (const InternalError& err) {
    if (e.dynamic()) throw NotDynamic();
    if (spec.fullgraph) throw;
    eager("internal error while compiling: ", err.what());
  } catch (const std::bad_alloc&) {
    eager("out of memory while compiling");
  } catch (...) {
    // The callable's own exception, or what it made of a failed capture.
    if (e.dynamic()) throw NotDynamic();
    if (auto& why = tracer.failure(); why && !(tracer.takes_other_sizes() && e.attempts + 1 < kMaxAttempts)) {
      if (spec.fullgraph) throw CaptureError(*why);
      return eager(*why);
    }
    // The eager call decides, raises what eager raises and leaves what eager leaves.
    if (++e.attempts < kMaxAttempts) throw Again();
    eager("it throws while it is captured");
  }
}

std::shared_ptr<Engine::Entry> Engine::find(const Flat& call, const Trace& trace) {
  Impl& im = *impl_;
  if (im.spec.disable || capture::has_mode() || compat::any_mode_on_stack()) return nullptr;
  std::shared_ptr<const ModuleView> view;
  {
    std::shared_lock lock(im.mutex);
    view = im.view;
  }
  const std::string key = im.key(*view, call);
  const std::vector<int64_t> shape = shape_of(call.tensors);
  std::shared_ptr<Entry> e;
  // An entry still being made may turn out not to serve this call's sizes.
  do {
    e = im.entry_for(key, shape, call.tensors);
    if (!e || e->ready) break;
    try {
      std::call_once(e->once, [&] {
        if (e->stale) throw NotDynamic();
        im.capture(*e, *view, call, trace);
        e->ready = true;
      });
    } catch (const Again&) {
      e = nullptr;
    } catch (const NotDynamic&) {
      std::unique_lock lock(im.mutex);
      im.fixed.insert(key);
      e->stale = true;
    } catch (...) {
      im.remove(*e);
      throw;
    }
  } while (e && (e->stale || !e->serves(shape)));
  if (!e || !e->graph || e->refused) {
    counters().eager_calls++;
    return nullptr;
  }
  return e;
}

bool Engine::run(const std::shared_ptr<Entry>& e, const std::vector<at::Tensor>& args, std::vector<at::Tensor>& out, Rest& rest,
                 at::ArrayRef<double> live) {
  const uint64_t effects = effects_begun();
  try {
    if (std::all_of(args.begin(), args.end(), [](const at::Tensor& t) { return t.defined(); })) {
      e->graph->run_live(args, out, live);
    } else {
      std::vector<at::Tensor> given;
      std::copy_if(args.begin(), args.end(), std::back_inserter(given), [](const at::Tensor& t) { return t.defined(); });
      e->graph->run_live(given, out, live);
    }
    return true;
  } catch (const capture::CallRefused& refusal) {
    const auto* run = dynamic_cast<const capture::RunRefused*>(&refusal);
    if (run && run->effects)
      rest = std::make_shared<Resumed>(run->effects);
    else if (effects_begun() != effects)
      throw InternalError(refusal.what());  // custom ops have run
    note_eager(refusal.what());
  } catch (const std::exception& err) {
    // A plan writes outside only when all else is done, so the callable can still run from the start: it raises what eager raises, with the state
    // eager leaves.
    const auto* bug = dynamic_cast<const InternalError*>(&err);
    const bool learned = dynamic_cast<const capture::PlanRefused*>(&err);
    if (effects_begun() != effects) {
      const std::shared_ptr<const Effects> made = bug && !learned ? nullptr : take_effects_of_failure();
      if (!made) throw;
      rest = std::make_shared<Resumed>(made);
    }
    if (bug) {
      counters().fallbacks++;
      note_eager((learned ? "" : "internal error: ") + std::string(err.what()));
      if (!learned) TORCH_WARN("vitrify: internal error in ", impl_->spec.name, ", running it eagerly: ", err.what());
      e->refused = true;
      if (impl_->refusals++ < kMaxAttempts)
        e->stale = true;  // captured again, with what was learned
      else if (learned)
        TORCH_WARN("vitrify: ", impl_->spec.name, " runs eagerly from now on: ", err.what());
    }
  }
  counters().eager_calls++;
  out.clear();
  return false;
}

const std::any& Engine::blueprint(const Entry& e) const { return e.blueprint; }
void Engine::reset() {
  std::unique_lock lock(impl_->mutex);
  impl_->entries.clear();
  impl_->fixed.clear();
  impl_->count = 0;
  impl_->view = std::make_shared<ModuleView>(impl_->module.get());
}
std::string Engine::explain() const {
  std::shared_lock lock(impl_->mutex);
  std::string s;
  for (auto& [k, list] : impl_->entries)
    for (auto& e : list) s += e->ready && e->graph ? e->graph->describe() : "eager\n";
  return s;
}

}  // namespace detail
}  // namespace vitrify
