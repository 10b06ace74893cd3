// Values that follow from captured tensors, kept until one of those changes.
#include "support/counters.h"
#include "support/resident.h"
#include "torch/executor.h"
#include "torch/extern_call.h"
#include "torch/passes/passes.h"
#include "torch/tracer.h"

namespace vitrify {

std::shared_ptr<const FrozenValues> FrozenCache::get(std::span<const at::Tensor* const> inputs, const FrozenValues* stale) {
  std::lock_guard lock(mutex_);
  if (latest_ && latest_.get() != stale && latest_->valid(inputs.data())) return latest_;
  PlanGuard guard;
  c10::InferenceMode ordinary(false);
  auto fresh = std::make_shared<FrozenValues>();
  fresh->sources = group_.sources;
  for (uint32_t s : group_.sources) fresh->keys.emplace_back(*inputs[s], inputs);  // before anything is read: what is written meanwhile is seen
  std::vector<at::Tensor> args;
  for (uint32_t s : group_.sources) args.push_back(window_on(*inputs[s]));
  fresh->values = interpret(*group_.graph, args);
  counters().weights_packed.fetch_add(1, std::memory_order_relaxed);
  // What is merely a window on a weight would change with it; and nothing kept may share memory with the caller's tensors.
  for (at::Tensor& v : fresh->values)
    for (const at::Tensor& a : args)
      if (v.defined() && v.has_storage() && a.has_storage() && v.is_alias_of(a)) v = v.clone();
  for (at::Tensor& v : fresh->values)
    if (v.defined() && v.is_neg()) v = without_bits(v);
  if (!latest_) return_free_memory();  // the steps of a long chain over every weight
  return latest_ = std::move(fresh);
}

}  // namespace vitrify
