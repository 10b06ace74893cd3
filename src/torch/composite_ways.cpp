// Composites that ask whether there is a mode (isTensorSubclassLike) and compute otherwise if so, or give their out argument its size by an op that
// they do not call otherwise. And what such an op has done with its out argument is looked at.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "torch/compat.h"
#include "torch/composites.h"
#include "torch/convert.h"
#include "torch/mode.h"
#include "torch/stack.h"
#include "torch/tracer_impl.h"
#include "torch/versions.h"

namespace vitrify::capture {
namespace {

using at::Tensor;

// Those whose results, errors or out arguments differ by that, and which do all their work by ops.
bool asks_for_mode(std::string_view base) {
  static const std::unordered_set<std::string_view> names{"aten::linalg_matrix_rank", "aten::linalg_eigvalsh", "aten::linalg_svdvals",
                                                          "aten::_scaled_dot_product_attention_math"};
  return names.contains(base);
}

// Keys that lead to the mode are of the time when it was there.
c10::DispatchKeySet without_mode(c10::DispatchKeySet keys) {
  return below_composites(keys) - (compat::any_mode_on_stack() ? c10::DispatchKeySet() : c10::DispatchKeySet(c10::DispatchKey::Python));
}

void call_unseen(const c10::OperatorHandle& op, c10::DispatchKeySet keys, compat::Stack* stack) {
  const Unseen unseen;
  op.redispatchBoxed(without_mode(keys), stack);
}

// Its bias is added in place, unless there is a mode. Below autograd it stays whole.
Tensor linear(c10::DispatchKeySet keys, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::optional<Unseen> unseen;
  if (x.dim() != 2 && bias && bias->defined() && keys.has_any(c10::autograd_dispatch_keyset)) unseen.emplace();
  return at::_ops::linear::redispatch(unseen ? without_mode(keys) : below_composites(keys), x, weight, bias);
}

// --- out arguments

// Not by resize_() of its own, which counts.
bool gives_size_unseen(std::string_view base) {
  static const std::unordered_set<std::string_view> names{"aten::diff", "aten::empty", "aten::randn"};
  return !names.contains(base);
}

thread_local bool gives_size = false;
struct GivesSize {
  explicit GivesSize(bool unseen) : before(std::exchange(gives_size, unseen)) {}
  ~GivesSize() { gives_size = before; }
  const bool before;
};

bool is_out(const c10::Argument& a) { return a.kwarg_only() && a.alias_info() && a.alias_info()->isWrite(); }

struct Written {
  explicit Written(Tensor out) : t(std::move(out)) {
    if (const FakeImpl* f = as_fake(t)) dims = f->hint_sizes().vec(), storage = f->view->storage, generation = f->view->storage->generation;
    version = version_of(t);
  }
  bool since() const {
    if (t.sym_numel() == 0) return true;
    if (const FakeImpl* f = as_fake(t)) return f->view->storage != storage.lock() || f->view->storage->generation != generation;
    return !counts_versions(t) || version_of(t) != version;
  }
  bool has_other_size() const {
    const FakeImpl* f = as_fake(t);
    return f && f->view->storage == storage.lock() && f->hint_sizes() != c10::IntArrayRef(dims);
  }
  Tensor t;
  std::vector<int64_t> dims;
  std::weak_ptr<StorageState> storage;  // one more that holds it would keep it from getting another size
  uint64_t generation = 0;
  int64_t version;
};

[[noreturn]] void refuse(std::string why) {
  if (Tracer* now = Tracer::current()) now->note_failure(why);
  fail(std::move(why));
}

void call_with_out(const c10::OperatorHandle& op, c10::DispatchKeySet keys, compat::Stack* stack) {
  if (!Tracer::current()) return op.redispatchBoxed(below_composites(keys), stack);
  const c10::FunctionSchema& schema = op.schema();
  const size_t n = schema.arguments().size(), begin = stack->size() - n;
  std::vector<Written> outs;
  for (size_t i = 0; i < n; ++i)
    if (const c10::IValue& v = (*stack)[begin + i]; is_out(schema.arguments()[i]) && v.isTensor() && v.toTensor().defined())
      outs.emplace_back(v.toTensor());
  {
    const GivesSize scope(gives_size_unseen(schema.name()));
    try {
      if (asks_for_mode(schema.name()))
        call_unseen(op, keys, stack);
      else
        op.redispatchBoxed(below_composites(keys), stack);
    } catch (const c10::Error&) {  // with no mode it does that to the memory itself
      if (std::ranges::any_of(outs, &Written::has_other_size)) refuse(fmt::format("{} resizes its out argument", op_name(op.operator_name())));
      throw;
    }
  }
  for (const Written& w : outs) {
    const bool given =
        std::ranges::any_of(last(*stack, schema.returns().size()), [&](const c10::IValue& v) { return v.isTensor() && v.toTensor().is_same(w.t); });
    if ((!schema.returns().empty() && !given) || !w.since())
      refuse(fmt::format("{} computes and leaves its out argument as it was", op_name(op.operator_name())));
  }
}

// Eager's way of giving an out argument its size is no op: nothing is counted.
const Tensor& resize_(c10::DispatchKeySet keys, const Tensor& x, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  c10::DispatchKeySet below = below_composites(keys);
  if (gives_size) below = below - c10::autograd_dispatch_keyset - c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
  return at::_ops::resize_::redispatch(below, x, sizes, format);
}

}  // namespace

void register_ways(torch::Library& ours) {
  ours.impl("linear", TORCH_FN(linear));
  ours.impl("resize_", TORCH_FN(resize_));
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !compat::has_composite_kernel(*op) || op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    const std::string full = op_name(name);
    const std::string_view local = std::string_view(full).substr(std::string_view("aten::").size());
    if (std::ranges::any_of(op->schema().arguments(), is_out))
      ours.impl(std::string(local).c_str(), torch::CppFunction::makeFromBoxedFunction<&call_with_out>());
    else if (asks_for_mode(name.name))
      ours.impl(std::string(local).c_str(), torch::CppFunction::makeFromBoxedFunction<&call_unseen>());
  }
}

}  // namespace vitrify::capture
