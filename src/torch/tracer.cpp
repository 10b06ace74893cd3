#include "torch/tracer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <atomic>

#include "ops/shapes.h"
#include "torch/convert.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using ir::TensorType;
using ir::Value;

namespace {

thread_local Tracer* current_tracer = nullptr;
std::atomic<uint64_t> next_trace{1};

// Byte range a tensor touches.
std::pair<const char*, const char*> span_of(const at::Tensor& t) {
  int64_t extent = 1;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) == 0) return {nullptr, nullptr};
    extent += (t.size(d) - 1) * t.stride(d);
  }
  const char* p = static_cast<const char*>(t.const_data_ptr());
  return {p, p + extent * t.element_size()};
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!a.storage().is_alias_of(b.storage())) return false;
  auto [a0, a1] = span_of(a);
  auto [b0, b1] = span_of(b);
  return a0 && b0 && a0 < b1 && b0 < a1;
}

// Marked sizes become symbols (0 and 1 never do), and strides that are products of sizes the same products.
void mark_dynamic(sym::Context& ctx, TensorType& type, const std::vector<DimMark>& marks) {
  std::vector<int64_t> sizes = values_of(type.sizes), strides = values_of(type.strides);
  bool any = false;
  for (size_t d = 0; d < marks.size() && d < sizes.size(); ++d) {
    if (!marks[d].dynamic || sizes[d] < 2) continue;
    type.sizes[d] = ctx.symbol(sym::SymbolKind::Size, sizes[d], {std::max<int64_t>(2, marks[d].min), marks[d].max});
    any = true;
  }
  if (!any) return;
  std::vector<size_t> order(sizes.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = order.size() - 1 - d;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  sym::Int product = 1;
  int64_t hint = 1;
  for (size_t d : order) {
    if (strides[d] != hint) break;
    type.strides[d] = product;
    product *= type.sizes[d];
    hint *= sizes[d];
  }
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// True if drawing from `before` leads to `now`: other threads draw from the generators of the process as well, and that is no fault of the program.
// The numbers followed are those of a few big models' initialisation.
bool reached_by_drawing(at::mt19937 before, const at::mt19937& now) {
  const auto to = now.data();
  auto from = before.data();
  if (from.seed_ != to.seed_) return false;
  if (from.state_ == to.state_) return to.left_ <= from.left_;
  for (int block = 0; block < 100'000; ++block) {
    from.left_ = 1;  // the next draw makes the next block
    before.set_data(from);
    before();
    from = before.data();
    if (from.state_ == to.state_) return true;
  }
  return false;
}

int64_t version_of(const at::Tensor& t) { return t.is_inference() ? 0 : static_cast<int64_t>(t._version()); }

}  // namespace

// ---- process state

void Tracer::Impl::save_process_state() {
  Saved s;
  s.default_float = ops::default_float();
  ops::default_float() = to_dtype(c10::get_default_dtype_as_scalartype());
  s.autocast_cache = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_cache_enabled(false);
  auto keep = [&](at::Generator g) {
    std::lock_guard<std::mutex> lock(g.mutex());
    s.generators.push_back({g, g.get_state(), {}});
    if (g.device().is_cpu()) {
      auto* cpu = at::check_generator<at::CPUGeneratorImpl>(g);
      s.cpu_engine = cpu->engine();
      if (s.cpu_engine.data().left_ == 1) {  // as just seeded: seeding it again would not show
        s.cpu_engine();
        cpu->set_engine(s.cpu_engine);
        s.generators.back().during = g.get_state();
      }
    }
    if (!s.generators.back().during.defined()) s.generators.back().during = s.generators.back().before;
  };
  keep(at::detail::getDefaultCPUGenerator());
  std::unordered_set<int> devices;
  for (const Source& src : sources)
    if (src.real.device().is_cuda() && devices.insert(src.real.device().index()).second)
      keep(at::globalContext().defaultGenerator(src.real.device()));
  saved = std::move(s);
}

// The program draws from a generator as it was when the call began: a capture that seeds one cannot be replayed.
bool Tracer::Impl::generators_moved() const {
  for (auto& [g, before, state] : saved->generators) {
    at::mt19937 engine;
    at::Tensor now;
    {
      std::lock_guard<std::mutex> lock(g.mutex());
      if (g.device().is_cpu()) engine = at::check_generator<at::CPUGeneratorImpl>(g)->engine();
      now = g.get_state();
    }
    if (same_bytes(now, state)) continue;
    if (!g.device().is_cpu() || !reached_by_drawing(saved->cpu_engine, engine)) return true;
  }
  return false;
}

void Tracer::Impl::restore_process_state() {
  if (!saved) return;
  const bool moved = generators_moved();
  if (!failure && moved) failure = "sets the state of a random number generator";
  ops::default_float() = saved->default_float;
  at::autocast::set_autocast_cache_enabled(saved->autocast_cache);
  for (auto& [g, before, during] : saved->generators) {
    std::lock_guard<std::mutex> lock(g.mutex());
    if (moved || (!before.is_same(during) && same_bytes(g.get_state(), during))) g.set_state(before);
  }
  saved.reset();
}

// ---- inputs

void Tracer::Impl::check_in_scope(const at::Tensor& t) const {
  auto no = [](const char* what) { fail(fmt::format("{} cannot be an input of a captured program", what)); };
  if (as_fake(t)) no("a placeholder of another capture");
  if (t.layout() != at::kStrided) no("a sparse tensor");
  if (t.is_quantized()) no("a quantized tensor");
  if (t.is_nested()) no("a nested tensor");
  if (t.is_meta()) no("a meta tensor");
  if (!t.device().is_cpu() && !t.device().is_cuda()) no("a tensor on this device");
  if (compat::has_names(t)) no("a named tensor");
  auto keys = t.key_set();
  if (keys.has(c10::DispatchKey::Python)) no("a tensor subclass with __torch_dispatch__");
  if (keys.has(c10::DispatchKey::FuncTorchGradWrapper) || keys.has(c10::DispatchKey::FuncTorchBatched)) no("a tensor of a functorch transform");
  if (t.is_conj() || t.is_neg() || t._is_zerotensor()) no("a conjugate, negative or zero view");
  if (!t.has_storage()) no("a tensor without storage");
}

at::Tensor Tracer::Impl::make_input(Source& s, const std::vector<DimMark>& dims) {
  const at::Tensor& real = s.real;
  TensorType type = type_of(real);
  type.wrapped_number = false;
  mark_dynamic(graph->ctx(), type, dims);
  s.input = static_cast<int32_t>(inputs.size());
  Value value = graph->add_input(s.kind, s.name, type);
  inputs.push_back(&s);
  auto view = std::make_shared<View>();
  view->storage = new_storage(value, type, real.storage_offset(), real.device());
  view->storage->input = s.input;
  view->type = type;
  view->offset = real.storage_offset();
  for (const auto& other : input_storages) {
    const Source& o = *inputs[other->input];
    if (overlap(o.real, real)) {
      view->storage->shared_with = other->input;
      other->shared_with = s.input;
    }
  }
  input_storages.push_back(view->storage);
  auto keys = compat::dense_keys(real.device(), real.scalar_type(), real.is_inference());
  s.fake = capture::make_fake(std::move(view), keys);
  s.real_version = version_of(real);
  if (real.requires_grad()) s.fake.set_requires_grad(true);
  return s.fake;
}

at::Tensor Tracer::add_input(const at::Tensor& real, ir::InputKind kind, const std::string& name, const std::vector<DimMark>& dims) {
  Impl& m = *impl_;
  VT_CHECK(!m.started, "inputs are declared before start()");
  VT_CHECK(real.defined());
  m.check_in_scope(real);
  Impl::Source*& known = m.by_real[real.unsafeGetTensorImpl()];
  ++m.num_args;
  if (known) {  // the same object again: one placeholder, and an input nobody reads
    m.sources.push_back({real, {}, kind, name});
    Impl::Source& s = m.sources.back();
    s.input = static_cast<int32_t>(m.inputs.size());
    TensorType type = m.inputs[known->input]->fake.defined() ? as_fake(known->fake)->view->type : type_of(real);
    type.wrapped_number = false;
    m.graph->add_input(kind, name, type);
    m.inputs.push_back(&s);
    return known->fake;
  }
  m.sources.push_back({real, {}, kind, name});
  known = &m.sources.back();
  return m.make_input(*known, dims);
}

void Tracer::declare_source(const at::Tensor& real, ir::InputKind kind, const std::string& name) {
  Impl& m = *impl_;
  if (!real.defined() || m.by_real.count(real.unsafeGetTensorImpl())) return;
  m.sources.push_back({real, {}, kind, name});
  m.by_real[real.unsafeGetTensorImpl()] = &m.sources.back();
}

void Tracer::accept_unknown_tensors(bool b) { impl_->accept_unknown = b; }

at::Tensor Tracer::Impl::fake_of(const at::Tensor& t) {
  if (FakeImpl* f = as_fake(t)) {
    if (f->view->storage->trace != trace) fail("a placeholder of an earlier capture is used");
    return t;
  }
  if (auto it = by_real.find(t.unsafeGetTensorImpl()); it != by_real.end()) {
    Source& s = *it->second;
    if (!s.fake.defined()) {
      check_in_scope(t);
      make_input(s, {});
    }
    return s.fake;
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) return new_tensor(scalar_value(t, true));
  check_in_scope(t);
  if (!accept_unknown) fail("meets a tensor that is neither an argument nor reachable from the program's variables");
  sources.push_back({t,
                     {},
                     t.requires_grad() && t.is_leaf() ? ir::InputKind::Parameter : ir::InputKind::Captured,
                     fmt::format("captured{}", inputs.size() - num_args)});
  by_real[t.unsafeGetTensorImpl()] = &sources.back();
  return make_input(sources.back(), {});
}

Value Tracer::Impl::value_of_tensor(const at::Tensor& t) {
  if (!as_fake(t) && t.unsafeGetTensorImpl()->is_wrapped_number() && !by_real.count(t.unsafeGetTensorImpl())) return scalar_value(t, true);
  at::Tensor f = fake_of(t);
  return read(*as_fake(f)->view);
}

std::optional<c10::Scalar> Tracer::Impl::symbolic_number(const at::Tensor& t) const {
  if (!options.symbolic_number || graph->ctx().num_symbols() == 0) return std::nullopt;
  return options.symbolic_number(t);
}

// A 0-d CPU tensor of a known value, as a node: the compiler folds it into the kernel that reads it.
Value Tracer::Impl::scalar_value(const at::Tensor& real, bool wrapped) {
  if (auto n = wrapped ? symbolic_number(real) : std::nullopt) {
    if (!n->isSymbolic()) {
      at::Tensor t = at::scalar_tensor(*n, at::TensorOptions(real.scalar_type()));
      return scalar_value(t, true);
    }
    TensorType type = type_of(real);
    type.wrapped_number = true;
    return append("aten::scalar_tensor", {capture::from_sym_int(n->toSymInt()), type.dtype, ir::None{}, ir::None{}, ir::None{}}, {type})->out();
  }
  char bytes[16] = {};
  std::memcpy(bytes, real.const_data_ptr(), std::min<size_t>(real.element_size(), sizeof bytes));
  std::string key(bytes, sizeof bytes);
  key += static_cast<char>(real.scalar_type());
  key += wrapped ? 'w' : 's';
  Value& v = scalars[key];
  if (!v) {
    TensorType type = type_of(real);
    type.wrapped_number = wrapped;
    c10::Scalar s = real.item();
    ir::Arg number = s.isBoolean()         ? ir::Arg(s.toBool())
                     : s.isIntegral(false) ? ir::Arg(sym::Int(s.toLong()))
                     : s.isComplex()       ? ir::Arg(ir::Complex{s.toComplexDouble().real(), s.toComplexDouble().imag()})
                                           : ir::Arg(s.toDouble());
    v = append("aten::scalar_tensor", {number, type.dtype, ir::None{}, ir::None{}, ir::None{}}, {type})->out();
  }
  return v;
}

// A literal of the program (torch.tensor(...)), each time a fresh tensor.
at::Tensor Tracer::Impl::constant(const at::Tensor& real) {
  if (by_real.count(real.unsafeGetTensorImpl())) return fake_of(real);
  check_in_scope(real);
  TensorType type = type_of(real);
  type.wrapped_number = false;
  if (real.dim() == 0 && real.device().is_cpu() && type.dtype != DType::Opaque) {
    at::Tensor t = new_tensor(scalar_value(real, false));
    as_fake(t)->view->storage->known = real.item();
    return t;
  }
  auto payload = std::make_shared<at::Tensor>(at::empty_strided(real.sizes(), real.strides(), real.options().requires_grad(false)));
  payload->copy_(real.detach());
  return new_tensor(graph->add_constant(type, payload));
}

// ---- start and end

Tracer::Tracer(TracerOptions options) : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  impl_->owner = this;
  impl_->trace = next_trace++;
}

Tracer::~Tracer() { impl_->stop(); }

void Tracer::start() {
  Impl& m = *impl_;
  VT_CHECK(!m.started && !m.done, "start() is called once");
  if (current_tracer) fail("a capture is already running on this thread");
  if (compat::any_mode_on_stack()) fail("a torch dispatch mode is active");
  m.save_process_state();
  m.started = true;
  current_tracer = this;
  try {
    capture::push_mode(&m, m.options.python_mode);
  } catch (...) {
    m.stop();
    throw;
  }
}

void Tracer::Impl::stop() {
  if (!started) return;
  started = false;
  done = true;
  capture::remove_mode();
  if (current_tracer == owner) current_tracer = nullptr;
  // A real tensor the program wrote to was not written, but the layer above us counted it.
  for (Source& s : sources)
    if (s.fake.defined() && !s.real.is_inference()) {
      s.bumps = version_of(s.fake) + version_of(s.real) - s.real_version;
      c10::VariableVersion counter = s.real.unsafeGetTensorImpl()->version_counter();
      counter.set_version(s.real_version);
    }
  restore_process_state();
}

void Tracer::abort() { impl_->stop(); }
Tracer* Tracer::current() { return current_tracer; }
bool Tracer::is_fake(const at::Tensor& t) { return as_fake(t) != nullptr; }
const std::optional<std::string>& Tracer::failure() const { return impl_->failure; }
void Tracer::set_source_callback(std::function<std::string()> f) { impl_->source_callback = std::move(f); }

Program Tracer::finish(const std::vector<at::Tensor>& outputs) {
  Impl& m = *impl_;
  VT_CHECK(m.started, "finish() without start()");
  try {
    return m.finish(outputs);
  } catch (const CaptureError& e) {
    if (!m.failure) m.failure = e.what();
    m.stop();
    throw;
  }
}

// ---- results

// A graph output must be memory of its own: not an input's, a constant's, or another output's (unless eager shares it as well).
Value Tracer::Impl::own_storage(Value v, const StorageState* storage, std::unordered_map<const ir::Node*, const StorageState*>& roots) {
  const ir::Node* n = v.node;
  while (n->op->flags & ir::kView) n = std::get<Value>(n->args[0]).node;
  bool borrowed = n->op->name == "graph::input" || n->op->name == "graph::constant" || n->op->name == "aten::scalar_tensor";
  if (auto it = roots.find(n); it != roots.end() && it->second != storage) borrowed = true;
  if (borrowed) {
    TensorType type = v.type();
    type.wrapped_number = false;
    if (n->op->name == "graph::input" || n->op->name == "graph::constant" || type.dim()) {
      Value empty =
          append("aten::empty_strided",
                 {std::vector<sym::Int>(type.sizes.begin(), type.sizes.end()), std::vector<sym::Int>(type.strides.begin(), type.strides.end()),
                  type.dtype == DType::Opaque ? ir::Arg(ir::None{}) : ir::Arg(type.dtype), ir::None{}, type.device, ir::None{}},
                 {type})
              ->out();
      bool dense = type.is_contiguous();
      v = dense || type.dtype == DType::Opaque ? append("aten::clone", {v, ir::MemoryFormat::Preserve}, {type})->out()
                                               : append("aten::copy", {empty, v, false}, {type})->out();
    } else {
      v = append("aten::clone", {v, ir::MemoryFormat::Preserve}, {type})->out();
    }
    n = v.node;
  }
  roots.emplace(n, storage);
  return v;
}

Program Tracer::Impl::finish(const std::vector<at::Tensor>& outputs) {
  stop();
  if (failure) throw CaptureError(*failure);
  Program p;
  p.graph = graph;
  p.num_args = num_args;

  std::vector<at::Tensor> fakes;
  for (const at::Tensor& t : outputs) fakes.push_back(t.defined() ? fake_of(t) : t);
  std::unordered_map<const StorageState*, uint32_t> root_result;
  std::unordered_map<const c10::TensorImpl*, uint32_t> by_impl;
  for (uint32_t i = 0; i < fakes.size(); ++i)
    if (FakeImpl* f = as_fake(fakes[i]); f && !f->view->parent) root_result.try_emplace(f->view->storage.get(), i);

  std::unordered_map<const ir::Node*, const StorageState*> roots;
  // Results that share memory with each other and not with a returned root are views of one hidden output, as in eager.
  std::unordered_map<const StorageState*, std::unordered_set<const c10::TensorImpl*>> loose;
  std::unordered_map<const StorageState*, uint32_t> root_output;
  for (const at::Tensor& t : fakes)
    if (FakeImpl* f = as_fake(t)) loose[f->view->storage.get()].insert(t.unsafeGetTensorImpl());
  for (uint32_t i = 0; i < fakes.size(); ++i) {
    ResultSpec r;
    FakeImpl* f = as_fake(fakes[i]);
    if (!f) {
      r.kind = ResultSpec::Kind::Undefined;
      p.results.push_back(std::move(r));
      continue;
    }
    View& v = *f->view;
    StorageState* s = v.storage.get();
    auto [same, first] = by_impl.try_emplace(fakes[i].unsafeGetTensorImpl(), i);
    auto emit_view_of_output = [&] {
      auto [it, fresh] = root_output.try_emplace(s, static_cast<uint32_t>(graph->outputs.size()));
      if (fresh) graph->outputs.push_back(own_storage(s->base, s, roots));
      r.kind = ResultSpec::Kind::ViewOfOutput;
      r.index = it->second;
      r.path = path_of(v);
    };
    auto emit_value = [&] {
      const bool empty = std::any_of(v.type.sizes.begin(), v.type.sizes.end(), [](sym::Int i) { return i.is(0); });
      for (size_t d = 0; d < v.type.dim() && !v.parent && !empty; ++d)
        if (v.type.strides[d].is(0) && !v.type.sizes[d].is(1)) fail("returns a tensor that overlaps itself");
      r.kind = ResultSpec::Kind::Value;
      r.index = static_cast<uint32_t>(graph->outputs.size());
      graph->outputs.push_back(own_storage(read(v), s, roots));
    };
    if (s->input >= 0) {
      r.index = s->input;
      FakeImpl* own = as_fake(inputs[s->input]->fake);
      if (f == own) {
        r.kind = ResultSpec::Kind::Input;
      } else {
        if (own->view->parent) fail("returns a view of an input whose shape it changes in place");
        for (const View* q = &v; q; q = q->parent.get())
          if (q->in_place) fail("returns a view of an input, changed in place");
        r.kind = ResultSpec::Kind::ViewOfInput;
        r.path = path_of(v);
      }
    } else if (!first) {
      r.kind = ResultSpec::Kind::ViewOfValue;
      r.index = same->second;
    } else if (auto it = root_result.find(s); it != root_result.end() && it->second != i) {
      r.kind = ResultSpec::Kind::ViewOfValue;
      r.index = it->second;
      r.path = path_of(v);
    } else if (it == root_result.end() && v.parent && (loose[s].size() > 1 || !ops::is_dense(graph->ctx(), v.type) || f->is_conj() || f->is_neg())) {
      emit_view_of_output();
    } else {
      emit_value();
    }
    p.results.push_back(std::move(r));
  }

  for (uint32_t i = 0; i < inputs.size(); ++i) {
    Source& src = *inputs[i];
    if (!src.fake.defined()) continue;  // a second mention of another input
    View& v = *as_fake(src.fake)->view;
    StorageState* s = v.storage.get();
    int32_t metadata = 0;
    Mutation change;
    for (const View* q = &v; q->parent; q = q->parent.get()) {
      VT_CHECK(q->in_place, "an input's own object became a view");
      change.path.push_back({q->in_place->name, q->step.args, -1});
      ++metadata;
    }
    std::reverse(change.path.begin(), change.path.end());
    if (s->generation) {
      Mutation w;
      w.input = i;
      w.output = static_cast<uint32_t>(graph->outputs.size());
      w.version_bumps = std::max<int32_t>(0, static_cast<int32_t>(src.bumps) - metadata);
      graph->outputs.push_back(own_storage(s->base, s, roots));
      p.mutations.push_back(std::move(w));
    }
    const bool only_counted = !metadata && !s->generation && src.bumps > 0;  // t_() on a view of it
    if (metadata || only_counted) {
      change.input = i;
      change.metadata_only = true;
      change.version_bumps = only_counted ? static_cast<int32_t>(src.bumps) : metadata;
      p.mutations.push_back(std::move(change));
    }
  }
  for (uint32_t i = num_args; i < inputs.size(); ++i) p.captured.push_back(inputs[i]->real);
  graph->remove_dead();
  return p;
}

}  // namespace vitrify
