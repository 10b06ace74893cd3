#include "torch/effects.h"

#include <ATen/core/PythonFallbackKernel.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "torch/compat.h"
#include "torch/convert.h"
#include "torch/stack.h"
#include "torch/versions.h"

namespace vitrify {
namespace {

thread_local uint64_t begun = 0;
thread_local std::shared_ptr<const Effects> given_here, failed_here;

}  // namespace

std::vector<at::Tensor> written_by(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& stack) {
  std::vector<at::Tensor> r;
  const size_t n = schema.arguments().size();
  for (size_t i = 0; i < n; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    const c10::IValue& v = stack[stack.size() - n + i];
    if (v.isTensor() && v.toTensor().defined()) r.push_back(v.toTensor());
    if (v.isTensorList())
      for (const at::Tensor& t : v.toTensorVector()) r.push_back(t);
    if (v.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector())
        if (t) r.push_back(*t);
  }
  return r;
}

bool kernel_counts_writes(const c10::OperatorHandle& op) {
  constexpr auto kKey = c10::DispatchKey::ADInplaceOrView;
  // ATen's own exclude the key for what they call, and a view that is made through it is one to autograd already.
  const bool own = op.schema().is_mutable() && !op.schema().name().starts_with("aten::");
  if (op.hasKernelForDispatchKey(kKey) && !(own && compat::kKernelsBehindCountedWritesCount)) return false;
  const at::impl::RestorePythonTLSSnapshot as_called;
  return !c10::impl::tls_is_dispatch_key_excluded(kKey);
}

void call_counting(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) {
  constexpr auto kKey = c10::DispatchKey::ADInplaceOrView;
  struct Counted {
    ~Counted() {  // also where it has raised: it counts before it writes
      for (const auto& [t, version] : before) {
        c10::VariableVersion counter = t.unsafeGetTensorImpl()->version_counter();
        counter.set_version(std::max(version, version_of(t) - 1));
      }
      if (was) c10::impl::tls_set_dispatch_key_excluded(kKey, true);
    }
    std::vector<std::pair<at::Tensor, int64_t>> before;
    bool was = c10::impl::tls_is_dispatch_key_excluded(kKey);
  } counted;
  c10::impl::tls_set_dispatch_key_excluded(kKey, false);
  if (op.hasKernelForDispatchKey(kKey))
    for (const at::Tensor& t : written_by(op.schema(), stack))
      if (counts_versions(t)) counted.before.emplace_back(t, version_of(t));
  op.callBoxed(stack);
}

RandomStates random_states(const std::vector<at::Generator>& generators) {
  RandomStates r{{at::detail::getDefaultCPUGenerator(), {}}};
  for (const at::Generator& g : generators)
    if (g != r[0].first) r.emplace_back(g, at::Tensor());
  for (auto& [g, state] : r) state = g.get_state();
  return r;
}
RandomStates moved_since(const RandomStates& before) {
  RandomStates r;
  for (const auto& [g, state] : before)
    if (at::Tensor now = g.get_state(); !now.equal(state)) r.emplace_back(g, std::move(now));
  return r;
}
void set_random_states(const RandomStates& states) {
  for (auto [g, state] : states) {
    std::lock_guard lock(g.mutex());
    g.set_state(state);
  }
}

uint64_t effects_begun() { return begun; }
void note_effect() { ++begun; }
void give_effects(std::shared_ptr<const Effects> e) { given_here = std::move(e); }
std::shared_ptr<const Effects> take_given_effects() { return std::exchange(given_here, nullptr); }
std::shared_ptr<const Effects> take_effects_of_failure() { return std::exchange(failed_here, nullptr); }
void set_effects_of_failure(std::shared_ptr<const Effects> e) { failed_here = std::move(e); }

Resumed::Resumed(std::shared_ptr<const Effects> e, void* python_mode) : effects_(std::move(e)) {
  if (!effects_ || effects_->all.empty()) return;
  capture::push_mode(this, python_mode);
  unseen_.emplace();
}
Resumed::~Resumed() {
  unseen_.reset();
  if (effects_ && !effects_->all.empty()) capture::remove_mode(this);
}

void Resumed::dispatch(const c10::OperatorHandle& op, compat::Stack* stack) {
  const std::string name = op_name(op.operator_name());
  const bool known = given_ < effects_->all.size() && name == effects_->all[given_].op;
  if (!known && !name.starts_with("aten::") && compat::has_composite_kernel(op) && !op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
    const capture::Unseen unseen;  // what it calls comes here; in inference mode it does itself
    return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  }
  const capture::Paused paused;
  if (!known) {
    // Elsewhere they count as they are called.
    const bool counting = c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView) && kernel_counts_writes(op);
    return counting ? call_counting(op, *stack) : op.callBoxed(stack);
  }
  give(effects_->all[given_++], op, stack);
}

void Resumed::give(const Effects::One& one, const c10::OperatorHandle& op, compat::Stack* stack) const {
  const c10::FunctionSchema& schema = op.schema();
  set_random_states(one.random);
  const std::vector<at::Tensor> written = written_by(schema, *stack);
  size_t fresh = 0;
  for (const c10::Argument& r : schema.returns()) fresh += !r.alias_info();
  const size_t n = written.size(), all = one.results.size();
  const bool counted = n && all == (one.error ? 0 : fresh) + 2 * n;
  const size_t made = all - std::min(all, counted ? 2 * n : n);
  for (size_t k = 0; k < n && made + k < all; ++k) {
    if (written[k].sizes() != one.results[made + k].sizes()) written[k].resize_(one.results[made + k].sizes());
    written[k].copy_(one.results[made + k]);
    for (int64_t times = counted ? one.results[made + n + k].item<int64_t>() : 0; times > 0; --times)
      written[k].unsafeGetTensorImpl()->bump_version();
  }
  if (one.error) std::rethrow_exception(one.error);
  drop(*stack, schema.arguments().size());
  const std::vector<at::Tensor> results(one.results.begin(), one.results.begin() + static_cast<std::ptrdiff_t>(made));
  if (schema.returns().size() == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::ListType) {
    stack->emplace_back(c10::List<at::Tensor>(results));
    return;
  }
  // How long a list is follows from how many others there are: ops with several are not captured (Tracer::Impl::append_custom).
  const size_t in_list = results.size() + 1 - std::min(results.size() + 1, fresh);
  size_t next = 0, next_written = 0;
  for (const c10::Argument& r : schema.returns()) {
    if (r.alias_info()) {
      stack->emplace_back(written.at(next_written++));
    } else if (r.type()->kind() == c10::TypeKind::ListType) {
      const auto begin = results.begin() + static_cast<std::ptrdiff_t>(next);
      stack->emplace_back(c10::List<at::Tensor>(std::vector<at::Tensor>(begin, begin + static_cast<std::ptrdiff_t>(in_list))));
      next += in_list;
    } else {
      stack->emplace_back(results.at(next++));
    }
  }
}

c10::intrusive_ptr<c10::TensorImpl> Resumed::detach(const c10::TensorImpl* t) {
  const capture::Paused paused;
  return t->shallow_copy_and_detach(c10::VariableVersion(0), false);
}

}  // namespace vitrify
