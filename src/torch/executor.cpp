#include "torch/executor.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <exception>

#include "runtime/extern_table.h"
#include "support/budget.h"
#include "support/counters.h"
#include "support/fault.h"
#include "sym/holds.h"
#include "torch/compiled.h"
#include "torch/deregistered.h"
#include "torch/learned.h"
#include "torch/placement.h"
#include "torch/random.h"
#include "torch/team.h"
#include "torch/tracer.h"
#include "torch/watch.h"

namespace vitrify {

using runtime::ExternCall;
using runtime::Plan;
using runtime::SlotKind;
using runtime::Step;

namespace {

// True when the operands had the strides of the record, so that the result should too.
bool called_as_recorded(const ExternCall& e, const std::vector<const at::Tensor*>& operands) {
  bool same = e.node->op->name.starts_with("aten::");
  if (!same && e.node->op->flags & ir::kEffect) return true;  // custom ops are given eager's strides
  size_t k = 0;
  ir::for_each_input(const_cast<ir::Node&>(*e.node), [&](ir::Value& v) {
    const at::Tensor& t = *operands[k++];
    const ir::TensorType& type = v.type();
    for (size_t d = 0; same && d < type.dim(); ++d)
      same = type.strides[d].is_const() && (t.size(static_cast<int64_t>(d)) <= 1 || t.stride(static_cast<int64_t>(d)) == type.strides[d].value());
  });
  return same;
}

// In memory that the record knows to be another: what the schedule gave a value that eager has in other strides.
bool called_otherwise(const ExternCall& e, const std::vector<const at::Tensor*>& operands) {
  bool other = false;
  size_t next = 0;
  ir::for_each_input(const_cast<ir::Node&>(*e.node), [&](ir::Value& v) {
    const at::Tensor& t = *operands[next++];
    const ir::TensorType& type = v.type();
    if (t.dim() != static_cast<int64_t>(type.dim())) return;
    for (size_t d = 0; !other && d < type.dim(); ++d) {
      const auto k = static_cast<int64_t>(d);
      other = t.size(k) > 1 && type.strides[d].is_const() && t.stride(k) != type.strides[d].value();
    }
  });
  return other;
}

// Whether a thread that computes for this one has met an operation without a result, since that was last asked: a difference of infinities, a NaN
// given to a maximum; or, where `overflow` asks for those too, one whose result is more than a float holds. The processor notes it.
bool met_invalid(bool overflow) {
#if defined(__x86_64__)
  const auto take = [overflow] {
    constexpr unsigned kInvalid = 1, kOverflow = 8;
    const unsigned control = _mm_getcsr(), met = control & (kInvalid | kOverflow);
    if (met) _mm_setcsr(control & ~met);
    return (met & (overflow ? kInvalid | kOverflow : kInvalid)) != 0;
  };
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return threads == 1 ? take() : on_any_library_thread(threads, take);
#else
  return false;
#endif
}

}  // namespace

const at::Tensor& constant_tensor(const ir::Graph& g, uint32_t index) {
  VT_CHECK(index < g.constants.size() && g.constants[index], "constant {} has no payload", index);
  return *static_cast<at::Tensor*>(g.constants[index].get());
}

namespace {

c10::DataPtr cached_block(size_t bytes) {
  void* p = runtime::BlockCache::instance().take(bytes);
  c10::profiledCPUMemoryReporter().New(p, bytes);
  auto give_back = [](void* q) {
    c10::profiledCPUMemoryReporter().Delete(q);
    runtime::BlockCache::instance().give_back(q);
  };
  return {p, p, give_back, c10::Device(c10::kCPU)};
}

}  // namespace

at::Tensor new_result(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, bool contiguous, size_t cached_from) {
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(type));
  if (bytes < cached_from)
    return contiguous ? at::Tensor(at::detail::empty_cpu(sizes, type)) : at::Tensor(at::detail::empty_strided_cpu(sizes, strides, type));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, cached_block(bytes), c10::GetCPUAllocator(), true);
  at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                          c10::scalarTypeToTypeMeta(type));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return t;
}

bool shows_part(const at::Tensor& t) {
  return t.storage_offset() != 0 || t.storage().nbytes() != at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
}

at::Tensor without_bits(const at::Tensor& t) {
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), t.options());
  int64_t extent = 1;  // with what lies between its elements, which may be the same memory
  for (int64_t d = 0; d < t.dim(); ++d) extent += (t.size(d) - 1) * t.stride(d);
  return t.as_strided({extent}, {1}).clone().as_strided(t.sizes(), t.strides(), 0);
}

PlanRun::PlanRun(std::shared_ptr<const Plan> plan, std::shared_ptr<const Originals> originals, uint32_t first_kept)
    : plan_(std::move(plan)),
      originals_(std::move(originals)),
      first_kept_(first_kept),
      tensors_(plan_->slots.size()),
      input_pointer_(plan_->slots.size()),
      written_(plan_->slots.size()) {
  for (const runtime::Output& o : plan_->outputs)
    if (o.in_place) written_[o.ref.slot] = 1;
  for (const ExternCall& e : plan_->externs) {
    calls_.emplace_back(*e.node, *plan_->graph);
    if (e.node->op->flags & ir::kRandom) note_generator(*e.node);
    paddings_.push_back(originals_ ? padding_of(*e.node) : Padding());
    hides_.push_back(originals_ ? hidden_by(*e.node) : Hides::Nothing);
  }
  folds_.resize(calls_.size());
  first_write_ = plan_->steps.size();
  for (size_t k = plan_->steps.size(); k-- > 0;) {
    if (plan_->steps[k].kind != Step::Kind::Launch) continue;
    const runtime::Launch& l = plan_->launches[plan_->steps[k].index];
    for (size_t a = 0; a < l.slots.size(); ++a)
      if (l.writes[a] && written_[l.slots[a]]) first_write_ = k;
  }
  launch_run_.resize(plan_->steps.size());  // none crosses the first write: what comes before may fail
  for (size_t k = plan_->steps.size(); k-- > 0;)
    if (plan_->steps[k].kind == Step::Kind::Launch)
      launch_run_[k] = 1 + (k + 1 < launch_run_.size() && k + 1 != first_write_ ? launch_run_[k + 1] : 0);
  find_waits();
  for (uint32_t s = 0; s < plan_->slots.size(); ++s) {
    const runtime::Slot& slot = plan_->slots[s];
    if (slot.kind == SlotKind::Input) input_slots_.push_back(s);
    if (slot.kind == SlotKind::Output) output_slots_.push_back(s);
    if (slot.kind == SlotKind::Constant) tensors_[s] = constant_tensor(*plan_->graph, slot.index);
  }
  for (const runtime::Launch& l : plan_->launches)
    for (uint32_t s : l.slots) input_pointer_[s] = 1;
  for (const ExternCall& e : plan_->externs)
    for (const runtime::TensorRef& r : e.operands) {
      const runtime::Slot& s = plan_->slots[r.slot];
      if (!(r.sizes == s.sizes && r.strides == s.strides && r.offset.is(0))) input_pointer_[r.slot] = 1;
    }
  std::vector<char> bound(plan_->known.symbols.size());
  const auto& inputs = plan_->graph->inputs;
  auto bind = [&](sym::Int e, uint32_t input, uint32_t dim, bool stride) {
    if (!sym::is_symbol(e)) return;
    uint32_t id = sym::view(e).symbol->id;
    if (!bound[id]) bindings_.push_back({id, input, dim, stride});
    bound[id] = 1;
  };
  for (const bool strides : {false, true})  // those of dims of one element say nothing
    for (uint32_t i = 0; plan_->dynamic && i < inputs.size(); ++i)
      for (uint32_t d = 0; d < inputs[i].value.type().dim(); ++d)
        bind(strides ? inputs[i].value.type().strides[d] : inputs[i].value.type().sizes[d], i, d, strides);
  find_refusals(bound);
  find_lifetimes();
}

void PlanRun::note_generator(const ir::Node& n) {
  at::Generator used = at::detail::getDefaultCPUGenerator();
  for (const ir::Arg& a : n.args)
    if (auto* opaque = std::get_if<ir::OpaqueArg>(&a))
      if (const auto& v = *static_cast<c10::IValue*>(plan_->graph->constants.at(opaque->index).get()); v.isGenerator()) used = v.toGenerator();
  if (std::ranges::none_of(generators_, [&](const at::Generator& g) { return g == used; })) generators_.push_back(std::move(used));
}

void PlanRun::find_refusals(const std::vector<char>& bound) {
  side_effects_ = has_side_effects(*plan_->graph);
  looks_at_memory_ = std::ranges::any_of(plan_->graph->nodes(), [](const ir::Node* n) { return n->op->name == kLooksAtMemory; });
  resumes_ = side_effects_ && std::ranges::any_of(plan_->graph->nodes(), [](const ir::Node* n) {
               return (n->op->flags & ir::kEffect) && n->op->name.starts_with("vitrify::");
             });
  for (const sym::Guard& g : plan_->known.guards) {
    std::vector<sym::Int> symbols;
    sym::free_symbols(g.expr, symbols);
    if (std::ranges::any_of(symbols, [&](sym::Int s) { return !bound[sym::view(s).symbol->id]; })) guards_.push_back(g);
  }
}

void PlanRun::keep_effects() {
  if (!side_effects_) return;
  keeps_.assign(plan_->externs.size(), 0);
  bool fails = false;
  for (size_t k = plan_->steps.size(); k-- > 0;) {
    const Step& step = plan_->steps[k];
    if (step.kind == Step::Kind::Launch) fails = fails || plan_->kernels[plan_->launches[step.index].kernel].may_fault;
    if (step.kind != Step::Kind::Extern) continue;
    keeps_[step.index] = fails;
    fails = true;
  }
}

void PlanRun::set_found(Frame& f, uint32_t symbol, int64_t value) {
  f.symbols.set(symbol, value);
  const auto& [range, multiple_of] = plan_->known.symbols[symbol];
  const auto known = [&](uint32_t id) { return f.symbols.known(id) ? std::optional(f.symbols[id]) : std::nullopt; };
  bool fits = value >= range.lo && value <= range.hi && value % multiple_of == 0;
  for (size_t k = 0; fits && k < guards_.size(); ++k)  // up to the first that fails: later ones may divide by what it says is not zero
    fits = sym::holds(guards_[k], known).value_or(true);
  if (fits) return;
  throw capture::WayRefused("a size that follows from content is not what the plan is for");
}

// When results come into being, and which step reads an input last.
void PlanRun::find_lifetimes() {
  first_.resize(plan_->steps.size() + 1);
  last_.resize(plan_->steps.size() + 1);
  const size_t never = plan_->steps.size();
  std::vector<size_t> first(plan_->slots.size(), never), last(plan_->slots.size(), never);
  for (size_t k = 0; k < plan_->steps.size(); ++k) {
    auto use = [&](uint32_t s) {
      first[s] = std::min(first[s], k);
      last[s] = k;
    };
    const Step& step = plan_->steps[k];
    if (step.kind == Step::Kind::Launch)
      for (uint32_t s : plan_->launches[step.index].slots) use(s);
    if (step.kind == Step::Kind::Extern) {
      for (const runtime::TensorRef& r : plan_->externs[step.index].operands) use(r.slot);
      for (int32_t r : plan_->externs[step.index].results)
        if (r >= 0) use(static_cast<uint32_t>(r));
    }
  }
  std::vector<char> returned(plan_->slots.size());
  for (const runtime::Output& o : plan_->outputs)
    if (o.defined) returned[o.ref.slot] = 1;
  for (size_t k = plan_->steps.size(); k-- > 0;) {  // what a view is of lives as long as the view: a window on it owns nothing
    if (plan_->steps[k].kind != Step::Kind::Extern) continue;
    const ExternCall& e = plan_->externs[plan_->steps[k].index];
    if (!(e.node->op->flags & ir::kView)) continue;
    for (int32_t result : e.results)
      for (const runtime::TensorRef& o : e.operands) {
        if (result < 0) continue;
        const auto r = static_cast<uint32_t>(result);
        last[o.slot] = std::max(last[o.slot], last[r]);
        returned[o.slot] |= returned[r];
      }
  }
  for (uint32_t s : output_slots_) first_[first[s]].push_back(s);
  for (uint32_t s : input_slots_)
    if (!returned[s]) last_[last[s]].push_back(plan_->slots[s].index);
}

// Launches between two that wait may run in any order, or at once.
void PlanRun::find_waits() {
  waits_.assign(plan_->steps.size(), 1);
  if (plan_->dynamic) return;  // where the arena's slots lie is not known yet
  enum : char { kIdle, kRead, kWritten };
  std::vector<char> used(plan_->slots.size(), kIdle);
  std::vector<uint32_t> touched;
  auto in_the_way = [&](uint32_t slot, bool writes) {
    if (used[slot] == kWritten || (writes && used[slot] == kRead)) return true;
    const runtime::Slot& s = plan_->slots[slot];
    if (s.kind != SlotKind::Arena) return false;
    return std::any_of(touched.begin(), touched.end(), [&](uint32_t t) {
      const runtime::Slot& o = plan_->slots[t];
      if (t == slot || o.kind != SlotKind::Arena || !(writes || used[t] == kWritten)) return false;
      return s.arena_offset < o.arena_offset + o.bytes.value() && o.arena_offset < s.arena_offset + s.bytes.value();
    });
  };
  for (size_t k = 0; k < plan_->steps.size(); ++k) {
    const bool launch = plan_->steps[k].kind == Step::Kind::Launch;
    bool wait = !launch;
    const runtime::Launch* l = launch ? &plan_->launches[plan_->steps[k].index] : nullptr;
    for (size_t a = 0; launch && !wait && a < l->slots.size(); ++a) wait = in_the_way(l->slots[a], l->writes[a]);
    if (wait) {
      for (uint32_t t : touched) used[t] = kIdle;
      touched.clear();
    }
    waits_[k] = wait;
    for (size_t a = 0; launch && a < l->slots.size(); ++a) {
      touched.push_back(l->slots[a]);
      used[l->slots[a]] = std::max<char>(used[l->slots[a]], l->writes[a] ? kWritten : kRead);
    }
  }
}

PlanRun::~PlanRun() {
  if (expected_) runtime::ArenaPool::instance().forget(expected_);
}

void PlanRun::allocate_output(Frame& f, uint32_t slot) {
  SlotState& s = f.slots[slot];
  tensors_[slot] = new_result(s.sizes, s.strides, slot_scalar_type(plan_->slots[slot]), s.contiguous, cached_from);
  set_pointer(f, slot, tensors_[slot].data_ptr());
}

// Slots whose size has just become known get memory.
void PlanRun::start_late(Frame& f, const std::vector<uint32_t>& slots) {
  for (uint32_t s : slots) {
    const SlotKind kind = plan_->slots[s].kind;
    if (!f.slots[s].ready) VT_CHECK(prepare_slot(f, s), "size of slot {} is unknown", s);
    if (kind == SlotKind::Arena && f.slots[s].arena_offset < 0 && !f.pointers[s]) {
      auto bytes = static_cast<size_t>(std::max<int64_t>(f.slots[s].bytes, 1));
      if (late_memory_[s].bytes() < bytes) late_memory_[s] = runtime::Arena(bytes);
      set_pointer(f, s, late_memory_[s].data());
    }
    if (kind == SlotKind::Output && !tensors_[s].defined()) allocate_output(f, s);
  }
}

// All memory that is still to be had comes first: a call that has written to its inputs cannot be taken back.
void PlanRun::begin_writes(Frame& f) {
  for (size_t k = first_write_; k <= plan_->steps.size(); ++k) begin_step(f, k);
  for (size_t k = first_write_; late_ && k < plan_->steps.size(); ++k)
    if (plan_->steps[k].kind == Step::Kind::Launch) start_late(f, plan_->launches[plan_->steps[k].index].slots);
  reserve_scratch(team_size());
  wrote_ = true;
  note_effect();
}

void PlanRun::begin_step(Frame& f, size_t step) {
  for (uint32_t s : first_[step])
    if (f.slots[s].ready && !tensors_[s].defined()) allocate_output(f, s);
}

void PlanRun::end_step(size_t step, std::vector<at::Tensor>* owned) const {
  if (!owned) return;
  for (uint32_t i : last_[step])
    if (i < owned->size()) (*owned)[i].reset();
}

// A custom op has given what its author describes, before any of it is kept: the program may have asked for the sizes of what nothing reads, too.
void PlanRun::check_described(const Frame& f, const ExternCall& e) const {
  if (results_.size() != e.node->outs.size())
    throw capture::PlanRefused(fmt::format("{} returned {} tensors, recorded {}", e.node->op->name, results_.size(), e.node->outs.size()));
  for (uint32_t r = 0; r < e.results.size(); ++r) {
    const ir::TensorType& type = e.node->outs[r];
    const at::Tensor& t = results_[r];
    if (!t.defined() || is_undefined(type)) continue;
    if (t.layout() != at::kStrided || !(to_device(t.device()) == type.device) || (t.numel() && !t.storage().data()))
      throw capture::PlanRefused(fmt::format("{}: result {} is no dense tensor in memory of its device", e.node->op->name, r));
    if (t.is_conj() || t.is_neg()) {
      capture::learn(e.node->op->name, r, capture::Given::Bits);
      throw capture::PlanRefused(fmt::format("{}: result {} is a conjugate or negative view", e.node->op->name, r));
    }
    if (looks_at_memory_ && shows_part(t)) {
      capture::learn(e.node->op->name, r, capture::Given::Part);
      throw capture::PlanRefused(fmt::format("{}: result {} is a part of its memory, which the program looks at", e.node->op->name, r));
    }
    const SlotState* s = e.results[r] >= 0 && !late_ ? &f.slots[static_cast<size_t>(e.results[r])] : nullptr;
    const bool typed = t.scalar_type() == scalar_type_of(type);
    bool same = typed && t.dim() == static_cast<int64_t>(type.dim());
    const auto is = [&](sym::Int want, const std::vector<int64_t>* found, size_t d, int64_t given) {
      return want.is_const() ? want.value() == given : !found || (*found)[d] == given;
    };
    for (size_t d = 0; same && d < type.dim(); ++d) {
      const auto k = static_cast<int64_t>(d);
      same = is(type.sizes[d], s ? &s->sizes : nullptr, d, t.size(k)) &&
             ((t.size(k) <= 1 && t.numel() == 0) || is(type.strides[d], s ? &s->strides : nullptr, d, t.stride(k)));
    }
    if (same || (lenient && typed && s && t.sizes() == at::IntArrayRef(s->sizes))) continue;
    const std::string key = late_ ? std::string() : capture::call_key(e.node->op->name, e.node->args);
    for (uint32_t k = r; k < e.results.size(); ++k)
      if (const at::Tensor& u = results_[k]; u.defined() && u.layout() == at::kStrided && u.has_storage()) capture::learn(key, k, type_of(u));
    throw capture::PlanRefused(fmt::format("{}: result {} is {} [{}] strides [{}], recorded {} [{}] strides [{}]", e.node->op->name, r,
                                           to_string(to_dtype(t.scalar_type())), fmt::join(t.sizes(), ","), fmt::join(t.strides(), ","),
                                           to_string(type.dtype), fmt::join(s ? s->sizes : values_of(type.sizes), ","),
                                           fmt::join(s ? s->strides : values_of(type.strides), ",")));
  }
}

// Each element once, of what is expanded too.
static void copy_once(at::Tensor to, at::Tensor from) {
  for (int64_t d = 0; d < to.dim() && from.dim() == to.dim(); ++d)
    if (to.stride(d) == 0 && to.size(d) > 1) to = to.narrow(d, 0, 1), from = from.narrow(d, 0, 1);
  to.copy_(from);
}

// What an op hands through must not die, or change, with the memory of its operand.
static void own_memory(at::Tensor& t, const std::vector<const at::Tensor*>& operands) {
  if (std::ranges::none_of(operands, [&](const at::Tensor* o) { return o->has_storage() && o->is_alias_of(t); })) return;
  // In its own strides: it may be expanded, and views of it are recorded so.
  t = t.unsafeGetTensorImpl()->is_non_overlapping_and_dense() ? t.clone() : without_bits(t);
}

void PlanRun::store_result(Frame& f, const ExternCall& e, uint32_t r, at::Tensor t, const ExternState& state) {
  const auto slot = static_cast<uint32_t>(e.results[r]);
  const runtime::Slot& p = plan_->slots[slot];
  if (late_) {
    const ir::TensorType& type = e.node->outs[r];
    for (size_t d = 0; d < type.dim(); ++d)
      if (sym::is_symbol(type.sizes[d])) {
        uint32_t id = sym::view(type.sizes[d]).symbol->id;
        if (!f.symbols.known(id)) set_found(f, id, t.size(static_cast<int64_t>(d)));
      }
    start_late(f, {slot});
  }
  SlotState& s = f.slots[slot];
  const bool strided = t.defined() && t.layout() == at::kStrided && p.dtype != DType::Opaque && t.has_storage();
  if (strided && t.is_neg()) t = without_bits(t);
  auto agrees = [&] {  // but for dims of one element
    for (size_t d = 0; d < s.sizes.size(); ++d)
      if (s.sizes[d] != 1 && t.stride(static_cast<int64_t>(d)) != s.strides[d]) return false;
    return true;
  };
  bool same = true;
  if (strided) {
    const bool typed = t.sizes() == at::IntArrayRef(s.sizes) && to_dtype(t.scalar_type()) == p.dtype;
    same = !typed || agrees();
    const bool differs = !typed || (!same && called_as_recorded(e, state.pointers));
    if (differs && typed && lenient) {  // nobody sees the layout of what a gradient is made of: it is copied, and known the next time
      if (!late_) capture::learn(capture::call_key(e.node->op->name, e.node->args), r, type_of(t));
      learned = true;
    } else if (differs) {
      // Downstream of a wrong record everything may be wrong: this call is eager's, and the next capture knows better, of the later results too.
      const std::string key = late_ ? std::string() : capture::call_key(e.node->op->name, e.node->args);
      capture::learn(key, r, type_of(t));
      for (uint32_t k = r + 1; k < e.results.size(); ++k)
        if (const at::Tensor& u = results_[k]; u.defined() && u.layout() == at::kStrided && u.has_storage()) capture::learn(key, k, type_of(u));
      throw capture::PlanRefused(fmt::format("{}: result {} is {} [{}] strides [{}], recorded {} [{}] strides [{}]", e.node->op->name, r,
                                             to_string(to_dtype(t.scalar_type())), fmt::join(t.sizes(), ","), fmt::join(t.strides(), ","),
                                             to_string(p.dtype), fmt::join(s.sizes, ","), fmt::join(s.strides, ",")));
    }
  }
  if (p.kind != SlotKind::Extern) {  // the plan wants it in memory of its own choice
    if (strided && t.const_data_ptr() == f.pointers[slot]) {
      if (same) return;
      t = t.clone();
    }
    counters().results_copied++;
    Window w = make_window(s.sizes, s.strides, slot_scalar_type(p), false, 0);
    w.storage->set_data_ptr_noswap(c10::DataPtr(f.pointers[slot], c10::Device(c10::kCPU)));
    copy_once(w.tensor, t);
    return;
  }
  if (!t.defined()) {
    tensors_[slot] = std::move(t);
    return;
  }
  if (strided) {
    if (!same) {
      at::Tensor u = new_result(s.sizes, s.strides, t.scalar_type(), s.contiguous, cached_from);
      copy_once(u, t);
      t = std::move(u);
    } else if (!((e.node->op->flags & ir::kView) && is_native(p.dtype))) {  // the plan copies those itself
      own_memory(t, state.pointers);
      if (t.strides() != at::IntArrayRef(s.strides) && t.use_count() == 1 && agrees() && (state.relaid || called_otherwise(e, state.pointers)))
        // users see the strides of one element too
        t.unsafeGetTensorImpl()->set_sizes_and_strides(s.sizes, s.strides);
    }
  } else if (p.dtype == DType::Opaque && t.layout() == at::kStrided && t.has_storage()) {
    own_memory(t, state.pointers);
  }
  if (e.node->outs[r].wrapped_number && !t.dim()) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  tensors_[slot] = std::move(t);
  if (strided && input_pointer_[slot]) set_pointer(f, slot, const_cast<void*>(tensors_[slot].const_data_ptr()));  // perhaps a view of an input
}

void PlanRun::run_extern(Frame& f, uint32_t i, const at::Tensor* const* inputs) {
  const ExternCall& e = plan_->externs[i];
  ExternState& s = f.externs[i];
  if (late_) {
    std::vector<uint32_t> slots;
    for (const runtime::TensorRef& r : e.operands) slots.push_back(r.slot);
    start_late(f, slots);
    if (!s.ready) VT_CHECK(prepare_extern(f, i, false), "operand sizes of {} are unknown", e.node->op->name);
  }
  for (auto [k, input] : s.inputs) s.pointers[k] = inputs[input];
  for (auto [k, slot] : s.slots) s.pointers[k] = &tensors_[slot];
  for (auto [k, window] : s.windows) s.pointers[k] = &f.windows[window].tensor;
  const std::vector<at::Tensor> views = give_views(f, e, s, inputs);
  std::vector<at::Tensor> ordinary;
  if (gives_ordinary && !e.node->op->name.starts_with("aten::")) {
    ordinary.reserve(s.slots.size() + s.windows.size());
    const auto give = [&](uint32_t k) {
      const at::Tensor& t = *s.pointers[k];
      if (t.defined() && t.is_inference()) s.pointers[k] = &ordinary.emplace_back(same_memory(t, false));
    };
    for (auto [k, _] : s.slots) give(k);
    for (auto [k, _] : s.windows) give(k);
  }
  if (s.foreign)
    for (auto [k, input] : s.inputs) end_watch(*inputs[input]);
  if (!originals_ || (e.node->op->name.starts_with("aten::") && !is_folded(*e.node, s))) return call_extern(f, i);
  // What a library does not do, though ATen does, is no error of the user's.
  if (!failed_.empty())
    if (const auto it = failed_.find(i); it != failed_.end() && it->second.for_good && run_originals(f, i, inputs)) return;
  if (!folds_alike(i, s, inputs)) {
    if (run_originals(f, i, inputs)) return;
    if (effects_begun() == effects_before_) throw capture::RunRefused("a number is not finite");
    throw NotFinite("a number is not finite");
  }
  bool for_good = true;
  std::exception_ptr failure;
  const bool gives_up_operand = e.in_place && calls_[i].has_in_place();
  at::Tensor given_up;
  try {
    const bool folded = folds_[i].shift.defined();  // sums of the folded weights' products overflow where the norm's operand does not, perhaps
    if (hides_[i] == Hides::Nothing && !folded) return call_extern(f, i);
    if (gives_up_operand && effects_begun() != effects_before_) given_up = s.pointers[1]->clone();  // nothing else can run the ops with it
    met_invalid(folded);
    call_extern(f, i);
    if (!met_invalid(folded) && !(hides_[i] == Hides::Overflow && result_is_large(f, i))) return;
    if (gives_up_operand && !given_up.defined()) throw capture::RunRefused("a number is not finite");  // it is gone, perhaps: eager knows
    if (given_up.defined()) s.pointers[1] = &given_up;
    throw NotFinite("a number is not finite");
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const capture::CallRefused&) {
    throw;
  } catch (const InternalError&) {
    throw;
  } catch (const NotFinite&) {
    for_good = false;
    failure = std::current_exception();
  } catch (const std::exception&) {
    rethrow_interrupt();
    if (is_side_effect(*e.node) || e.node->op->flags & ir::kRandom) throw;
    failure = std::current_exception();
  }
  failed_[i].for_good = for_good;
  if (run_originals(f, i, inputs)) return;
  if (!for_good && effects_begun() == effects_before_) throw capture::RunRefused("a number is not finite");
  std::rethrow_exception(failure);
}

// The ops that the call stands for, in its place.
bool PlanRun::run_originals(Frame& f, uint32_t i, const at::Tensor* const* inputs) {
  const ExternCall& e = plan_->externs[i];
  ExternState& s = f.externs[i];
  const Originals::Ops* ops = originals_of(i);
  if (!ops) return false;
  results_.clear();
  std::vector<at::Tensor> args;
  for (const Originals::Ops::Source& from : ops->sources) args.push_back(from.operand ? *s.pointers[from.index] : *inputs[from.index]);
  if (std::ranges::any_of(args, [](const at::Tensor& t) { return !t.defined(); })) return false;
  std::vector<at::Tensor> results = interpret(*ops->graph, args);
  for (uint32_t r = 0; r < e.results.size(); ++r) {
    if (e.results[r] < 0) continue;
    VT_CHECK(ops->results[r] >= 0, "{} result {} stands for nothing", e.node->op->name, r);
    at::Tensor& t = results[static_cast<size_t>(ops->results[r])];
    store_result(f, e, r, t.reshape(f.slots[static_cast<uint32_t>(e.results[r])].sizes), s);
  }
  return true;
}

namespace {

std::atomic<bool> lies_known{false};  // a custom op has given something else than its author describes: what such ops give is kept from then on

at::Tensor copy_of(const at::Tensor& t) {
  if (!t.defined()) return t;
  return t.layout() != at::kStrided || t.unsafeGetTensorImpl()->is_non_overlapping_and_dense() ? t.clone() : without_bits(t);
}

}  // namespace

void PlanRun::call_extern(Frame& f, uint32_t i) {
  const ExternCall& e = plan_->externs[i];
  ExternState& s = f.externs[i];
  const NodeCall& call = calls_[i];
  const bool side_effect = side_effects_ && is_side_effect(*e.node);
  const bool resumes = side_effect && (late_ || resumes_ || !f.proven || lies_known || (!keeps_.empty() && keeps_[i]));
  if (side_effect && take_effect(f, i)) return;
  if (side_effect) {
    note_effect();
    ++begun_;
  }
  RandomStates before;
  if (resumes) before = random_states(generators_);
  if (call.has_out() && e.results[0] >= 0) {
    const auto slot = static_cast<uint32_t>(e.results[0]);
    const runtime::Slot& p = plan_->slots[slot];
    if (late_) start_late(f, {slot});
    SlotState& d = f.slots[slot];
    if (p.kind == SlotKind::Arena) {
      if (!s.result.tensor.defined()) s.result = make_window(d.sizes, d.strides, slot_scalar_type(p), false, 0);
      s.result.storage->set_data_ptr_noswap(c10::DataPtr(f.pointers[slot], c10::Device(c10::kCPU)));
      call.call_out(s.result.tensor, s.pointers.data());
      return;
    }
    if (p.kind == SlotKind::Extern) {
      tensors_[slot] = new_result(d.sizes, d.strides, slot_scalar_type(p), d.contiguous, cached_from);
      if (input_pointer_[slot]) set_pointer(f, slot, tensors_[slot].data_ptr());
    }
    call.call_out(tensors_[slot], s.pointers.data());
    return;
  }
  if (e.in_place && call.has_in_place()) {
    const auto slot = static_cast<uint32_t>(e.results[0]);
    at::Tensor& given = tensors_[e.operands[1].slot];
    const bool in_arena = plan_->slots[slot].kind == SlotKind::Arena;  // the two slots are one there
    if (in_arena || (given.use_count() == 1 && given.storage().use_count() == 1)) {
      call.call_in_place(s.pointers.data(), stack_);
      if (in_arena) return;
      tensors_[slot] = std::move(given);
      if (input_pointer_[slot]) set_pointer(f, slot, tensors_[slot].data_ptr());
      return;
    }
  }
  std::optional<Placement> placement;
  if (e.results.size() == 1 && e.results[0] >= 0) {
    const auto slot = static_cast<uint32_t>(e.results[0]);
    const auto bytes = static_cast<size_t>(f.slots[slot].bytes);
    if (plan_->slots[slot].kind != SlotKind::Extern)
      placement.emplace(c10::DataPtr(f.pointers[slot], c10::Device(c10::kCPU)), bytes);
    else if (bytes >= cached_from && runtime::writes_into_slot(e.node->op->name))
      placement.emplace(cached_block(bytes), bytes);
  }
  const auto find_size = [&](sym::Int x) {
    auto v = f.symbols.eval(x);
    VT_CHECK(v.has_value(), "{} needs {}", e.node->op->name, sym::str(x));
    return *v;
  };
  if (side_effect && !keeps_.empty()) {
    try {
      call.call(s.pointers.data(), find_size, stack_, results_);
    } catch (const InternalError&) {
      throw;
    } catch (...) {
      made_.all.push_back({e.node->op->name, std::move(results_), random_states(generators_), std::current_exception()});
      throw;
    }
  } else {
    call.call(s.pointers.data(), find_size, stack_, results_);
  }
  placement.reset();
  if (resumes) {
    Effects::One& one = made_.all.emplace_back();
    one.op = e.node->op->name;
    for (const at::Tensor& t : results_) one.results.push_back(copy_of(t));  // kernels may write over what was given
    one.random = moved_since(before);
  }
  if (!side_effect) return store_results(f, i);
  try {
    store_results(f, i);
  } catch (const capture::PlanRefused&) {
    lies_known = true;
    for (size_t r = 0; resumes && r < results_.size(); ++r)  // a copy has other memory, and other bits
      if (results_[r].defined()) made_.all.back().results[r] = results_[r];
    if (made_.all.size() + 1 == begun_) made_.all.push_back({e.node->op->name, std::move(results_), random_states(generators_)});
    throw;
  }
}

// The op has run already, in an earlier run for this call.
bool PlanRun::take_effect(Frame& f, uint32_t i) {
  const size_t k = made_.all.size();
  if (!given_ || k >= given_->all.size()) return false;
  ++begun_;
  const Effects::One& one = made_.all.emplace_back(given_->all[k]);
  VT_CHECK(one.op == plan_->externs[i].node->op->name, "{} has run where {} should", one.op, plan_->externs[i].node->op->name);
  for (const at::Tensor& t : one.results) results_.push_back(copy_of(t));
  set_random_states(one.random);
  store_results(f, i);
  return true;
}

void PlanRun::store_results(Frame& f, uint32_t i) {
  const ExternCall& e = plan_->externs[i];
  const ExternState& s = f.externs[i];
  if (is_side_effect(*e.node)) check_described(f, e);
  VT_CHECK(results_.size() >= e.results.size(), "{} returned {} tensors, recorded {}", e.node->op->name, results_.size(), e.results.size());
  for (uint32_t r = 0; r < e.results.size(); ++r)
    if (e.results[r] >= 0) store_result(f, e, r, std::move(results_[r]), s);
  results_.clear();
}

void PlanRun::make_outputs(Frame& f, const at::Tensor* const* inputs, std::vector<at::Tensor>& outputs) {
  for (const runtime::Output& o : plan_->outputs) {
    if (!o.defined) {
      outputs.emplace_back();
      continue;
    }
    const runtime::Slot& slot = plan_->slots[o.ref.slot];
    const at::Tensor& base = slot.kind == SlotKind::Input ? *inputs[slot.index] : tensors_[o.ref.slot];
    if (o.ref.sizes == slot.sizes && o.ref.strides == slot.strides && o.ref.offset.is(0)) {
      outputs.push_back(base);
      continue;
    }
    std::vector<int64_t> sizes, strides;
    auto offset = f.symbols.eval(o.ref.offset);
    VT_CHECK(offset && f.symbols.eval(o.ref.sizes, sizes) && f.symbols.eval(o.ref.strides, strides), "output sizes are unknown");
    outputs.push_back(base.as_strided(sizes, strides, base.storage_offset() + *offset));
  }
}

void PlanRun::drop_tensors() noexcept {
  for (uint32_t s = 0; s < tensors_.size(); ++s)
    if (plan_->slots[s].kind == SlotKind::Extern || plan_->slots[s].kind == SlotKind::Output) tensors_[s].reset();
  results_.clear();
  stack_.clear();
  if (side_effects_) {
    made_.all.clear();
    given_.reset();
  }
}

void PlanRun::run(const at::Tensor* const* inputs, std::vector<at::Tensor>& outputs, std::vector<at::Tensor>* owned) {
  Frame& f = frame_for(inputs);
  const ArenaUse arena(*this, f);
  struct Drop {
    PlanRun& run;
    ~Drop() { run.drop_tensors(); }
  } drop{*this};
  fault_ = 0;
  set_effects_of_failure(nullptr);
  if (side_effects_) {
    given_ = take_given_effects();
    made_.all.clear();
    wrote_ = false;
    begun_ = 0;
  }
  // Where it fails, eager starts from the same random state; not where an op has run that must not run twice.
  const uint64_t effects = effects_before_ = effects_begun();
  if (const uint64_t now = deregistrations(); now != looked_at_) {
    for (const NodeCall& c : calls_) c.check_registered();
    looked_at_ = now;
  }
  std::vector<at::Tensor> states;
  for (const at::Generator& g : generators_) states.push_back(g.get_state());
  const size_t left = side_effects_ ? random_states_left() : 0;
  const auto put_back = [&] {
    fault_ = 0;
    for (size_t i = 0; i < states.size(); ++i) generators_[i].set_state(states[i]);
  };
  const auto kept = [&] {
    if (given_)  // what this plan has not come to has run all the same
      for (size_t k = made_.all.size(); k < given_->all.size(); ++k) made_.all.push_back(given_->all[k]);
    return std::make_shared<Effects>(std::move(made_));
  };
  try {
    run_steps(f, inputs, owned);
  } catch (capture::RunRefused& refusal) {
    if (side_effects_) go_back_to_random_state(left);
    put_back();
    if (!made_.all.empty()) refusal.effects = kept();
    throw;
  } catch (...) {
    fault_ = 0;
    if (side_effects_) go_back_to_random_state(left);
    const bool again = side_effects_ && !wrote_ && begun_ == made_.all.size();
    if (again || effects_begun() == effects) put_back();
    if (again) set_effects_of_failure(kept());
    throw;
  }
  counters().kernels_launched.fetch_add(plan_->launches.size(), std::memory_order_relaxed);
  counters().externs_called.fetch_add(plan_->externs.size(), std::memory_order_relaxed);
  f.proven = true;
  make_outputs(f, inputs, outputs);
}

void PlanRun::run_steps(Frame& f, const at::Tensor* const* inputs, std::vector<at::Tensor>* owned) {
  point_to(f, inputs);
  end_step(plan_->steps.size(), owned);  // nobody reads these
  for (size_t k = 0; k < plan_->steps.size(); ++k) {
    const Step& step = plan_->steps[k];
    if (k == std::min<size_t>(first_write_, plan_->steps.size() / 2)) fault_point("run");
    if (k == first_write_) begin_writes(f);
    if (!late_ && launch_run_[k] > 1 && run_together(f, k, launch_run_[k], owned)) {
      k += launch_run_[k] - 1;
      continue;
    }
    begin_step(f, k);
    switch (step.kind) {
      case Step::Kind::Launch:
        run_launch(f, step.index);
        break;
      case Step::Kind::Extern:
        run_extern(f, step.index, inputs);
        break;
      case Step::Kind::Free:
        tensors_[step.index].reset();
        break;
    }
    end_step(k, owned);
  }
  begin_step(f, plan_->steps.size());  // nobody writes these
  if (late_)
    for (uint32_t s : output_slots_)  // nor those without elements whose other sizes were found
      if (!tensors_[s].defined()) start_late(f, {s});
}

}  // namespace vitrify
