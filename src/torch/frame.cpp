// Frames: what of a plan depends on the sizes of a call, kept for the calls that repeat them.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>

#include "ops/reads.h"
#include "torch/executor.h"
#include "torch/watch.h"

namespace vitrify {

using runtime::ExternCall;
using runtime::SlotKind;

namespace {

constexpr size_t kMaxFrames = 8;
constexpr const char* kNamespacesOfTorch[] = {"aten::", "mkldnn::", "mkl::", "vitrify::"};

}  // namespace

at::ScalarType slot_scalar_type(const runtime::Slot& s) {
  VT_CHECK(s.dtype != DType::Opaque, "memory for an opaque type");
  return to_scalar_type(s.dtype);
}

PlanRun::Window PlanRun::make_window(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, at::ScalarType type, bool wrapped,
                                     int64_t offset_bytes) {
  c10::InferenceMode ordinary(false);
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(type));
  Window w;
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, c10::Device(c10::kCPU)),
                                                       nullptr, false);
  w.storage = storage.get();
  w.offset = offset_bytes;
  w.tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                      c10::scalarTypeToTypeMeta(type));
  w.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  if (wrapped) w.tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return w;
}

void PlanRun::set_pointer(Frame& f, uint32_t slot, void* p) {
  f.pointers[slot] = p;
  SlotState& s = f.slots[slot];
  for (void** at : s.patches) *at = p;
  for (uint32_t w : s.windows) {
    Window& x = f.windows[w];
    x.storage->set_data_ptr_noswap(c10::DataPtr(p ? static_cast<char*>(p) + x.offset : nullptr, c10::Device(c10::kCPU)));
  }
}

bool PlanRun::prepare_slot(Frame& f, uint32_t slot) {
  SlotState& s = f.slots[slot];
  const runtime::Slot& p = plan_->slots[slot];
  if (!f.symbols.eval(p.sizes, s.sizes) || !f.symbols.eval(p.strides, s.strides)) return false;
  auto bytes = f.symbols.eval(p.bytes);
  if (!bytes) return false;
  s.bytes = *bytes;
  int64_t expect = 1;
  s.contiguous = true;
  for (size_t d = s.sizes.size(); d-- > 0;) {
    if (s.strides[d] != expect) s.contiguous = false;  // to the letter: strides of dims of size 1 are promised too
    expect *= std::max<int64_t>(s.sizes[d], 1);
  }
  return s.ready = true;
}

void PlanRun::point_to(Frame& f, const at::Tensor* const* inputs) {
  for (uint32_t s : input_slots_) {
    if (!input_pointer_[s]) continue;
    const at::Tensor& t = *inputs[plan_->slots[s].index];
    TORCH_CHECK(t.unsafeGetTensorImpl()->unsafe_storage().data() || !t.numel(),
                "vitrify: a tensor that is read has elements, and no memory: its storage was given another size");
    set_pointer(f, s, written_[s] ? t.mutable_data_ptr() : const_cast<void*>(t.const_data_ptr()));
  }
}

bool PlanRun::prepare_launch(Frame& f, uint32_t i, bool patch) {
  const runtime::Launch& l = plan_->launches[i];
  LaunchState& s = f.launches[i];
  for (uint32_t slot : l.slots)  // one that runs a known number of times may write to memory of a size that is yet to be found
    if (!f.slots[slot].ready) return false;
  auto iterations = f.symbols.eval(l.iterations);
  if (!iterations || !f.symbols.eval(l.sizes, s.sizes)) return false;
  auto scratch = f.symbols.eval(l.scratch_bytes);
  if (!scratch) return false;
  if (plan_->kernels[l.kernel].scratch_bytes) {
    const size_t bytes = (static_cast<size_t>(std::max<int64_t>(*scratch, 0)) + 127) / 64 * 64 + arguments_bytes(l);
    if (bytes > scratch_stride_) scratch_stride_ = bytes, scratch_threads_ = 0;
  }
  s.iterations = *iterations;
  s.args.assign(l.slots.size() + 2, nullptr);
  for (size_t a = 0; a < l.slots.size(); ++a) {
    if (patch) f.slots[l.slots[a]].patches.push_back(&s.args[a]);
    s.args[a] = f.pointers[l.slots[a]];
  }
  size_t at = l.slots.size();
  if (plan_->kernels[l.kernel].may_fault) s.args[at++] = &fault_;
  return s.ready = true;
}

namespace {

// To a custom op, itself or as views of other dtypes.
bool shows_memory(const runtime::Plan& p, const ExternCall& e) {
  if (ops::is_custom(*e.node)) return true;
  if (!(e.node->op->flags & ir::kView)) return false;
  return std::ranges::any_of(p.externs, [&](const ExternCall& o) {
    return &o != &e && std::ranges::any_of(o.operands, [&](const runtime::TensorRef& r) {
      return std::ranges::find(e.results, static_cast<int32_t>(r.slot)) != e.results.end();
    }) && shows_memory(p, o);
  });
}

}  // namespace

bool PlanRun::prepare_extern(Frame& f, uint32_t i, bool patch) {
  const ExternCall& e = plan_->externs[i];
  ExternState& s = f.externs[i];
  s = {};
  std::vector<bool> wrapped;
  ir::for_each_input(const_cast<ir::Node&>(*e.node), [&](ir::Value& v) { wrapped.push_back(v.type().wrapped_number); });
  VT_CHECK(wrapped.size() == e.operands.size(), "{} has {} operands, the plan {}", e.node->op->name, wrapped.size(), e.operands.size());
  s.relaid = !e.node->op->name.starts_with("aten::") || e.node->op->name.starts_with("aten::convolution");
  s.foreign = std::ranges::none_of(kNamespacesOfTorch, [&](const char* n) { return e.node->op->name.starts_with(n); });
  s.shown = shows_memory(*plan_, e);
  s.pointers.resize(e.operands.size());
  for (uint32_t k = 0; k < e.operands.size(); ++k) {
    const runtime::TensorRef& r = e.operands[k];
    const runtime::Slot& slot = plan_->slots[r.slot];
    bool whole = r.sizes == slot.sizes && r.strides == slot.strides && r.offset.is(0);
    std::vector<int64_t> sizes, strides, own_sizes, own_strides;
    std::optional<int64_t> offset;
    if (!whole) {
      offset = f.symbols.eval(r.offset);
      if (!offset || !f.symbols.eval(r.sizes, sizes) || !f.symbols.eval(r.strides, strides)) return false;
      // Guards fix sizes in nodes, not in slots. A window has no conjugate bit: what is whole is handed over as it is.
      whole = *offset == 0 && f.symbols.eval(slot.sizes, own_sizes) && sizes == own_sizes && f.symbols.eval(slot.strides, own_strides) &&
              strides == own_strides;
    }
    if (whole && slot.kind == SlotKind::Input) {
      s.inputs.push_back({k, slot.index});
      continue;
    }
    if (whole && slot.kind != SlotKind::Arena) {
      s.slots.push_back({k, r.slot});
      continue;
    }
    if (!offset) {
      offset = 0;
      if (!f.symbols.eval(r.sizes, sizes) || !f.symbols.eval(r.strides, strides)) return false;
    }
    const auto number = static_cast<uint32_t>(f.windows.size());
    f.windows.push_back(make_window(sizes, strides, slot_scalar_type(slot), wrapped[k], *offset * static_cast<int64_t>(size_of(slot.dtype))));
    f.slots[r.slot].windows.push_back(number);
    s.windows.push_back({k, number});
    set_pointer(f, r.slot, f.pointers[r.slot]);
  }
  return s.ready = true;
}

// A custom op may look past the edges of what it is given, and keep it: it gets views of all that the window is on, in memory that lasts.
std::vector<at::Tensor> PlanRun::give_views(const Frame& f, const ExternCall& e, ExternState& s, const at::Tensor* const* inputs) const {
  std::vector<at::Tensor> given;
  if (s.windows.empty() || !s.shown) return given;
  const at::AutoDispatchBelowADInplaceOrView plain;
  std::unordered_map<uint32_t, at::Tensor> whole;  // by slot
  given.reserve(s.windows.size());
  for (auto [k, window] : s.windows) {
    const Window& w = f.windows[window];
    const uint32_t slot = e.operands[k].slot;
    at::Tensor& base = whole[slot];
    if (!base.defined()) {
      const runtime::Slot& p = plan_->slots[slot];
      const SlotState& memory = f.slots[slot];
      if (p.kind == SlotKind::Input) {
        base = *inputs[p.index];
        if (s.foreign) end_watch(base);
      } else if (p.kind == SlotKind::Arena) {
        base = at::empty_strided(memory.sizes, memory.strides, slot_scalar_type(p));
        if (base.numel()) std::memcpy(base.mutable_data_ptr(), f.pointers[slot], base.storage().nbytes());
      } else {
        base = tensors_[slot];
      }
    }
    const int64_t offset = w.offset / static_cast<int64_t>(w.tensor.itemsize());
    s.pointers[k] = &given.emplace_back(base.as_strided(w.tensor.sizes(), w.tensor.strides(), base.storage_offset() + offset));
    if (w.tensor.unsafeGetTensorImpl()->is_wrapped_number()) given.back().unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return given;
}

void PlanRun::place_arena(Frame& f, char* at) {
  if (f.arena == at) return;
  f.arena = at;
  for (uint32_t s = 0; s < f.slots.size(); ++s)
    if (f.slots[s].arena_offset >= 0) set_pointer(f, s, at + f.slots[s].arena_offset);
}

PlanRun::ArenaUse::ArenaUse(PlanRun& run, Frame& f) {
  if (!f.arena_bytes) return;
  const auto bytes = static_cast<size_t>(f.arena_bytes);
  take(run, f, bytes);
  at_ = f.arena;
  c10::profiledCPUMemoryReporter().New(at_, bytes);
}

void PlanRun::ArenaUse::take(PlanRun& run, Frame& f, size_t bytes) {
  if (bytes < runtime::ArenaPool::kMinBytes) {
    if (run.arena_.bytes() < bytes) run.arena_ = runtime::Arena(bytes);
    run.place_arena(f, run.arena_.data());
    return;
  }
  auto& pool = runtime::ArenaPool::instance();
  if (run.expected_ < bytes) {
    pool.expect(bytes);
    if (const size_t before = std::exchange(run.expected_, bytes)) pool.forget(before);
  }
  shared_ = pool.take(bytes);
  run.place_arena(f, shared_.data());
}

PlanRun::ArenaUse::~ArenaUse() {
  if (at_) c10::profiledCPUMemoryReporter().Delete(at_);
  if (shared_.bytes()) runtime::ArenaPool::instance().give_back(std::move(shared_));
}

std::unique_ptr<PlanRun::Frame> PlanRun::make_frame(std::vector<int64_t> key) {
  auto frame = std::make_unique<Frame>();
  Frame& f = *frame;
  const size_t n = plan_->slots.size();
  f.symbols = runtime::SymbolValues(plan_->known.symbols.size());
  for (size_t i = 0; i < bindings_.size(); ++i) f.symbols.set(bindings_[i].symbol, key[i]);
  f.key = std::move(key);
  f.slots.resize(n);
  f.pointers.resize(n);
  f.launches.resize(plan_->launches.size());
  f.externs.resize(plan_->externs.size());
  size_t windows = 0;
  for (const ExternCall& e : plan_->externs) windows += e.operands.size();
  f.windows.reserve(windows);
  for (uint32_t s = 0; s < n; ++s)
    if (!prepare_slot(f, s)) late_ = true;
  if (plan_->dynamic) {
    auto layout = runtime::lay_out_arena(*plan_, f.symbols);
    for (uint32_t s = 0; s < n; ++s) f.slots[s].arena_offset = layout.offsets[s];
    f.arena_bytes = layout.bytes;
  } else {
    for (uint32_t s = 0; s < n; ++s)
      if (plan_->slots[s].kind == SlotKind::Arena) f.slots[s].arena_offset = plan_->slots[s].arena_offset;
    f.arena_bytes = plan_->arena_bytes;
  }
  for (uint32_t s = 0; s < n; ++s)
    if (plan_->slots[s].kind == SlotKind::Constant && input_pointer_[s]) f.pointers[s] = const_cast<void*>(tensors_[s].const_data_ptr());
  for (uint32_t i = 0; i < f.launches.size(); ++i)
    if (!prepare_launch(f, i, true)) late_ = true;
  for (uint32_t i = 0; i < f.externs.size(); ++i)
    if (!prepare_extern(f, i, true)) late_ = true;
  if (late_ && late_memory_.empty()) late_memory_.resize(n);
  return frame;
}

PlanRun::Frame& PlanRun::frame_for(const at::Tensor* const* inputs) {
  if (!late_ && current_ && bindings_.empty()) return *current_;
  std::vector<int64_t> key(bindings_.size());
  for (size_t i = 0; i < key.size(); ++i) {
    const Binding& b = bindings_[i];
    key[i] = b.stride ? inputs[b.input]->stride(b.dim) : inputs[b.input]->size(b.dim);
  }
  if (!late_) {
    if (current_ && current_->key == key) return *current_;
    for (auto& f : frames_)
      if (f->key == key) return *(current_ = f.get());
  } else {
    frames_.clear();  // sizes found while running are part of a frame: none can be used again
  }
  if (frames_.size() == kMaxFrames) frames_.erase(frames_.begin());
  frames_.push_back(make_frame(std::move(key)));
  return *(current_ = frames_.back().get());
}

}  // namespace vitrify
