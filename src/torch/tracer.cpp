#include "torch/tracer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <atomic>

#include "ops/shapes.h"
#include "support/eager.h"
#include "torch/composites.h"
#include "torch/convert.h"
#include "torch/overlap.h"
#include "torch/process_state.h"
#include "torch/seed_seen.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"
#include "torch/versions.h"

namespace vitrify {

using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using ir::TensorType;
using ir::Value;

namespace {

thread_local Tracer* current_tracer = nullptr;
std::atomic<uint64_t> next_trace{1};

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
  // Of one stride, dims of one element come first: they leave the product as it is.
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return strides[a] != strides[b] ? strides[a] < strides[b] : sizes[a] == 1 && sizes[b] != 1; });
  sym::Int product = 1;
  int64_t hint = 1;
  for (size_t d : order) {
    if (strides[d] != hint && sizes[d] == 1) continue;
    if (strides[d] != hint) break;
    type.strides[d] = product;
    product *= type.sizes[d];
    hint *= sizes[d];
  }
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

}  // namespace

// ---- process state

void Tracer::Impl::save_process_state() {
  forget_states_set();
  Saved s;
  s.default_float = ops::default_float();
  s.autocast_cache = at::autocast::is_autocast_cache_enabled();
  s.library = library_state();
  s.threads = at::get_num_threads();
  s.saved_tensor_hooks = at::SavedTensorDefaultHooks::get_tls_state();
  auto no_hooks = s.saved_tensor_hooks;
  no_hooks.stack = {};
  s.marks.reserve(1 + declared_generators.size());
  s.marks.emplace_back(at::detail::getDefaultCPUGenerator());
  for (const at::Generator& g : declared_generators)
    if (g.device().is_cpu() && g != s.marks.front().generator()) s.marks.emplace_back(g);
  {
    at::Generator g = s.marks.front().generator();
    std::lock_guard<std::mutex> lock(g.mutex());
    s.cpu_engine = at::check_generator<at::CPUGeneratorImpl>(g)->engine();
    s.generators.push_back({g, s.marks.front().before(), g.get_state()});
  }
  auto keep = [&](at::Generator g) {
    std::lock_guard<std::mutex> lock(g.mutex());
    const at::Tensor now = g.get_state();
    s.generators.push_back({std::move(g), now, now});
  };
  std::unordered_set<int> devices;
  for (const Source& src : sources)
    if (src.real.defined() && src.real.device().is_cuda() && devices.insert(src.real.device().index()).second)
      keep(at::globalContext().defaultGenerator(src.real.device()));
  // Nothing that can fail comes after the first change but for what is put back above.
  ops::default_float() = to_dtype(c10::get_default_dtype_as_scalartype());
  at::autocast::set_autocast_cache_enabled(false);
  at::SavedTensorDefaultHooks::set_tls_state(no_hooks);
  saved = std::move(s);
}

// The program draws from a generator as it was when the call began: a capture that seeds one cannot be replayed.
bool Tracer::Impl::seed_set() const {
  return std::ranges::any_of(saved->marks, [](const SeedMark& m) { return !m.there(); });
}
bool Tracer::Impl::generators_moved() const {
  if (seed_set()) return true;
  for (size_t i = 0; i < saved->generators.size(); ++i) {
    const auto& [g, before, state] = saved->generators[i];
    at::mt19937 engine;
    at::Tensor now;
    {
      std::lock_guard<std::mutex> lock(g.mutex());
      if (g.device().is_cpu()) engine = at::check_generator<at::CPUGeneratorImpl>(g)->engine();
      now = g.get_state();
    }
    if (same_bytes(now, state)) continue;
    if (rewound && i < last_forward_states.size() && same_bytes(now, last_forward_states[i])) continue;  // a checkpoint has put it in place again
    if (!g.device().is_cpu() || !reached_by_drawing(saved->cpu_engine, engine)) return true;
  }
  return std::ranges::any_of(saved->others, [](const Saved::Generator& o) {
    std::lock_guard<std::mutex> lock(o.g.mutex());
    return !same_bytes(o.g.get_state(), o.during);
  });
}

// What Tracer::Impl::draw does, for a generator that the program has been given.
void Tracer::Impl::draw_from(const at::Generator& g) {
  if (!g.device().is_cpu() || g == at::detail::getDefaultCPUGenerator()) return;
  auto known = std::ranges::find(saved->others, g, &Saved::Generator::g);
  Saved::Generator now{g, {}, {}};
  std::lock_guard<std::mutex> lock(now.g.mutex());
  if (known == saved->others.end()) {
    now.before = g.get_state();
    known = saved->others.insert(known, now);
  } else if (!same_bytes(g.get_state(), known->during)) {
    fail("sets the state of a random number generator");
  }
  auto* cpu = at::check_generator<at::CPUGeneratorImpl>(g);
  at::mt19937 engine = cpu->engine();
  engine();
  cpu->set_engine(engine);
  known->during = g.get_state();
}

void Tracer::Impl::restore_process_state() {
  if (!saved) return;
  if (rewound)  // what a checkpoint took back it puts in place again
    for (size_t i = 0; i < saved->generators.size(); ++i) {
      auto& s = saved->generators[i];
      s.during = last_forward_states[i];
      std::lock_guard<std::mutex> lock(s.g.mutex());
      if (s.g.device().is_cpu() && same_bytes(s.g.get_state(), s.during))
        saved->cpu_engine = at::check_generator<at::CPUGeneratorImpl>(s.g)->engine();
    }
  rewound = false;
  last_forward_states.clear();
  bool moved = true;  // where there is no memory to look, they are put back
  try {
    moved = generators_moved();
    if (!failure && moved) failure = "sets the state of a random number generator";
  } catch (const std::exception&) {
    if (!failure) failure = "no memory to look at the random number generators";
  }
  // What another thread has set stays. Python's ways to set it are seen (python/facts.cpp), those of C++ are not.
  const auto anyway = [&](const at::Generator& g) { return moved && (!options.python_mode || state_set_here(g)); };
  ops::default_float() = saved->default_float;
  at::autocast::set_autocast_cache_enabled(saved->autocast_cache);
  at::SavedTensorDefaultHooks::set_tls_state(saved->saved_tensor_hooks);
  for (auto& [g, before, during] : saved->generators) {
    if (g.device().is_cpu() && !moved && (!saved->drew || saved->others_drew)) continue;  // where others draw meanwhile, it is as they leave it
    auto put_back = [&](bool anyway) {
      if (g.device().is_cpu()) return saved->marks.front().put_back(anyway ? at::Tensor() : during);
      std::lock_guard<std::mutex> lock(g.mutex());
      if (anyway || (!before.is_same(during) && same_bytes(g.get_state(), during))) g.set_state(before);
    };
    try {
      put_back(anyway(g));
    } catch (const std::exception&) {
      if (!failure) failure = "no memory to look at the random number generators";
      put_back(true);
    }
  }
  for (auto& o : saved->others) {
    std::lock_guard<std::mutex> lock(o.g.mutex());
    if (anyway(o.g) || same_bytes(o.g.get_state(), o.during)) o.g.set_state(o.before);
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
  if (!t.device().is_cpu()) no("a tensor that does not lie on the CPU");  // plans make their windows and results there
  if (compat::has_names(t)) no("a named tensor");
  auto keys = t.key_set();
  if (keys.has(c10::DispatchKey::Python)) no("a tensor subclass with __torch_dispatch__");
  if (keys.has(c10::DispatchKey::FuncTorchGradWrapper) || keys.has(c10::DispatchKey::FuncTorchBatched)) no("a tensor of a functorch transform");
  if (t._is_zerotensor()) no("a zero tensor");
  if (!t.has_storage()) no("a tensor without storage");
  if (t._fw_grad(0).defined()) no("a dual number of forward-mode differentiation");
}

at::Tensor Tracer::Impl::make_input(Source& s, const std::vector<DimMark>& dims) {
  const at::Tensor& real = s.real;
  if (is_spoiled(real.unsafeGetTensorImpl())) fail(fmt::format("{} is a view whose history cannot be made anew", s.name));
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
    if (may_share(o.real, real)) {
      const FakeImpl* met = as_fake(o.fake);
      if (other->generation || (met && met->view->parent && o.real.is_same(real)))
        fail(fmt::format("reads '{}' after it has changed '{}', which is of the same memory", s.name, o.name));
      view->storage->shared_with = other->input;
      other->shared_with = s.input;
    }
  }
  input_storages.push_back(view->storage);
  auto keys = compat::dense_keys(real.device(), real.scalar_type(), real.is_inference());
  if (real.is_conj()) keys = keys.add(c10::DispatchKey::Conjugate);
  if (real.is_neg()) keys = keys.add(c10::DispatchKey::Negative);
  s.fake = capture::make_fake(std::move(view), keys);
  if (s.real_version < 0) s.real_version = version_of(real);
  if (real.requires_grad()) require_grad(s);
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
  if (!real.defined()) return;
  const auto known = m.by_real.find(real.unsafeGetTensorImpl());
  if (known != m.by_real.end() && !m.is_argument(*known->second)) return;
  m.sources.push_back({real, {}, kind, name});
  m.by_real.try_emplace(real.unsafeGetTensorImpl(), &m.sources.back());  // an argument stays one: see fake_of()
}

void Tracer::declare_grad(const at::Tensor& of, const at::Tensor& grad) {
  Impl& m = *impl_;
  auto it = m.by_real.find(of.unsafeGetTensorImpl());
  if (it == m.by_real.end() || !grad.defined()) return;
  Impl::Source& s = *it->second;
  if (s.input >= 0 && s.fake.defined()) s.fake.mutable_grad() = grad;
  auto [known, fresh] = m.by_real.try_emplace(grad.unsafeGetTensorImpl(), nullptr);
  if (!fresh) {  // calls find it by way of `of`, where it may be another by then
    const Impl::Source* owner = known->second->grad_of;
    if (!owner || !owner->real.is_same(s.real)) note_failure(fmt::format("reads the .grad of '{}', which it has by another name as well", s.name));
    return;
  }
  m.sources.push_back({grad, {}, ir::InputKind::Captured, s.name + ".grad"});
  m.sources.back().grad_of = &s;
  known->second = &m.sources.back();
}

void Tracer::note_grad(const at::Tensor& of, const at::Tensor& grad) { impl_->new_grads.emplace_back(of, grad); }

c10::SymFloat Tracer::live_number(uint32_t index, double now) {
  auto step = impl_->numbers->add({Numbers::Op::Live, index}, now);
  return capture::to_sym_float(impl_->numbers, *step);
}

at::Tensor Tracer::live_tensor(uint32_t index, double now) {
  return impl_->new_tensor(impl_->number_value(*impl_->numbers->add({Numbers::Op::Live, index}, now)));
}

void Tracer::accept_unknown_tensors(bool b) { impl_->accept_unknown = b; }

at::Tensor Tracer::Impl::fake_of(const at::Tensor& t) {
  if (FakeImpl* f = as_fake(t)) {
    if (f->view->storage->trace != trace) fail("a placeholder of an earlier capture is used");
    if (compat::has_names(t)) fail("gives names to dims");
    return t;
  }
  if (once && !has_placeholder(t)) return late_constant(t);
  if (auto it = by_real.find(t.unsafeGetTensorImpl()); it != by_real.end()) {
    // What the program reaches by itself it reaches in each call, whatever that is given: where it is an argument as well, that is another input.
    const auto met = [&](const at::Tensor& real) {
      return std::ranges::find_if(sources, [&](const Source& o) { return o.real.is_same(real) && !is_argument(o); });
    };
    Source* found = it->second;
    if (is_argument(*found)) {
      if (auto own = met(t); own != sources.end()) {
        found = &*own;
      } else if (found->frozen) {
        fail(fmt::format("freezes or unfreezes '{}', an argument that it also reaches by itself", found->name));
      } else {
        sources.push_back({t, {}, ir::InputKind::Captured, found->name});
        sources.back().real_version = found->real_version;
        found = &sources.back();
      }
    }
    Source& s = *found;
    if (s.grad_of && is_argument(*s.grad_of) && met(s.grad_of->real) != sources.end())
      fail("reads the .grad of an argument that it also reaches by itself");
    if (!s.fake.defined()) {
      check_in_scope(t);
      make_input(s, {});
    } else if (!in_backward && !s.edge.function && t.is_leaf() && t.requires_grad()) {  // the program has met it frozen
      require_grad(s);
    }
    return s.fake;
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) return new_tensor(scalar_value(t, true));
  check_in_scope(t);
  if (!accept_unknown)
    fail(in_backward
             ? "what runs again in a backward, as a checkpoint's function, comes to a tensor that it did not come to in the forward: that is to be "
               "changed before the call"
             : "meets a tensor that is neither an argument nor reachable from the program's variables");
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
  return read_noted(*as_fake(f)->view);
}

std::optional<c10::Scalar> Tracer::Impl::symbolic_number(const at::Tensor& t) const {
  if (!options.symbolic_number || (graph->ctx().num_symbols() == 0 && numbers->steps.empty())) return std::nullopt;
  return options.symbolic_number(t);
}

// A 0-d CPU tensor of a known value, as a node: the compiler folds it into the kernel that reads it.
Value Tracer::Impl::scalar_value(const at::Tensor& real, bool wrapped) {
  if (auto n = wrapped ? symbolic_number(real) : std::nullopt) {
    if (n->isSymFloat()) return number_value(capture::step_of(n->toSymFloat()).value());
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
  if (real.is_conj() || real.is_neg()) fail("meets a literal that is a conjugate or negative view");
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

void Tracer::declare_generator(const at::Generator& g) { impl_->declared_generators.push_back(g); }
const std::vector<at::Generator>& Tracer::declared_generators() const { return impl_->declared_generators; }

void Tracer::start() {
  VT_CHECK(!impl_->started && !impl_->done, "start() is called once");
  impl_->resume();
}

void Tracer::Impl::resume() {
  if (current_tracer) fail("a capture is already running on this thread");
  if (compat::any_mode_on_stack()) fail("a torch dispatch mode is active");
  for (Source& s : sources)  // a custom op may count its writes before it arrives here
    if (!s.fake.defined() && s.real.defined()) s.real_version = version_of(s.real);
  turn.take();
  try {
    save_process_state();
  } catch (...) {
    turn.give_back();
    throw;
  }
  started = true;
  current_tracer = owner;
  try {
    capture::push_mode(this, options.python_mode);
    capture::include_composites(true);  // of real tensors too, which the program reaches by itself
  } catch (...) {
    stop();
    throw;
  }
}

void Tracer::Impl::stop() {
  if (!started) return;
  started = false;
  const bool captures = !std::exchange(done, true);
  took_other_sizes = !sizes_now().empty();
  known_now.clear();
  drop_unread_states();
  capture::remove_mode(this);
  capture::include_composites(false);
  if (current_tracer == owner) current_tracer = nullptr;
  count_versions();
  // A real tensor the program wrote to was not written, but the layer above us counted it.
  for (Source& s : sources)
    if (s.fake.defined() && s.real.defined() && counts_versions(s.real)) {
      c10::VariableVersion counter = s.real.unsafeGetTensorImpl()->version_counter();
      counter.set_version(s.real_version);
    }
  bool detached = false;
  // Nor has it got the history that autograd gave it. By the time of a later derivative it has one of its own.
  for (Source& s : sources) {
    if (!captures || !s.fake.defined() || s.input < static_cast<int32_t>(num_args)) continue;
    auto* meta = torch::autograd::impl::get_autograd_meta(s.real);
    if (!meta || s.real.is_view()) continue;
    const bool was_leaf = !s.edge.function || dynamic_cast<const torch::autograd::AccumulateGrad*>(s.edge.function.get());
    if (!was_leaf && s.real.is_leaf()) detached = true;
    const torch::autograd::Edge had = was_leaf ? torch::autograd::Edge() : s.edge;
    if (meta->grad_fn_ == had.function) continue;
    meta->grad_fn_ = had.function;
    meta->output_nr_ = had.function ? had.input_nr : 0;
    if (!s.edge.function) meta->requires_grad_ = false;
  }
  if (detached && !failure) failure = "detaches a tensor in place that has a history of before the call";
  restore_process_state();
  turn.give_back();
}

void Tracer::Impl::count_versions() {
  std::unordered_map<const void*, std::vector<Source*>> all;
  for (Source& s : sources) {
    if (!s.fake.defined() || !s.real.defined() || !counts_versions(s.real)) continue;
    if (s.input >= static_cast<int32_t>(num_args))
      all[counter_of(s.real)].push_back(&s);
    else
      s.bumps = version_of(s.fake);  // writes are counted in what stands for it: its own counter is told of those to what is captured
  }
  for (auto& [_, one] : all) {
    const auto grad = std::ranges::find_if(one, &Source::grad_of);  // which other calls find anew
    if (grad != one.end() && one.size() > 1 && !failure)
      failure = fmt::format("reads '{}', which counts its versions with another tensor", (*grad)->name);
    const int64_t before = (*std::ranges::min_element(one, {}, &Source::real_version))->real_version, counted = version_of(one[0]->real) - before;
    const auto written = std::ranges::find_if(one, [](const Source* s) { return as_fake(s->fake)->view->storage->generation > 0; });
    const Source* tells = written == one.end() ? one[0] : *written;
    for (Source* s : one) {
      s->real_version = before;
      s->bumps = version_of(s->fake) + counted;
      s->shared = s == tells ? 0 : counted;
    }
  }
}

void Tracer::abort() { impl_->stop(); }
Tracer* Tracer::current() { return current_tracer; }
bool Tracer::is_fake(const at::Tensor& t) { return as_fake(t) != nullptr; }
const std::optional<std::string>& Tracer::failure() const { return impl_->failure; }
bool Tracer::takes_other_sizes() const { return impl_->took_other_sizes || !impl_->sizes_now().empty(); }
void Tracer::note_failure(std::string why) {
  if (!impl_->failure) impl_->failure = std::move(why);
}
bool Tracer::state_holds() const { return !impl_->options.state_holds || impl_->options.state_holds(); }

void Tracer::warn_eager(const std::string& part, const std::string& why) const {
  const std::string message = fmt::format("vitrify: {} of {} run eagerly: {}", part, impl_->options.name, why);
  note_eager(message);
  if (impl_->options.warn)
    impl_->options.warn(message);
  else
    TORCH_WARN(message);
}
std::string Tracer::cannot(const std::string& part, const std::string& why) const {
  return fmt::format("vitrify: {} of {} cannot be compiled: {}", part, impl_->options.name, why);
}
void Tracer::set_source_callback(std::function<std::string()> f) { impl_->source_callback = std::move(f); }

namespace {

template <class M, class F>
auto finishing(M& m, F&& f) {
  VT_CHECK(m.started, "finish() without start()");
  if (!m.failure) m.failure = m.raised_now;
  try {
    return f();
  } catch (const CaptureError& e) {
    if (!m.failure) m.failure = e.what();
    m.stop();
    throw;
  }
}

}  // namespace

Program Tracer::finish(const std::vector<at::Tensor>& outputs) {
  return finishing(*impl_, [&] { return impl_->finish(outputs); });
}
bool Tracer::makes_gradients(const std::vector<at::Tensor>& outputs) {
  return finishing(*impl_, [&] { return impl_->makes_gradients(outputs); });
}
JointProgram Tracer::finish_joint(const std::vector<at::Tensor>& outputs) {
  return finishing(*impl_, [&] {
    JointProgram j = impl_->finish_joint(outputs);
    impl_->let_accumulators_go();
    return j;
  });
}

}  // namespace vitrify
