// Composite ops whose code in ATen asks for sizes as numbers, which a capture would have to take as they are: the same steps, with symbols, or one
// call where nobody asks for gradients.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <utility>

namespace vitrify::capture {

// No part of torch uses this key.
constexpr auto kCompositeKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;
inline c10::DispatchKeySet below_composites(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kCompositeKey);
}
// Autocast's own kernel, for an op that has one, is asked before the op is taken apart: it casts, and comes back with that key off.
inline bool casts_first(c10::DispatchKeySet keys) { return keys.has(c10::DispatchKey::AutocastCPU); }
bool has_symbols(const at::Tensor&);  // among its sizes and strides
void register_quantiles(torch::Library&);
void register_ways(torch::Library&);

// Placeholders have it, so that those ops come here before autograd takes them apart; empty where another library has the key.
c10::DispatchKeySet composite_keys();
void include_composites(bool);  // for all tensors, on this thread

// While a composite looks at its operands by _unsafe_view(): memory that others have and may write to. All else that torch looks at so is its own.
class LooksAtOperands {
 public:
  LooksAtOperands() : before_(std::exchange(now_, true)) {}
  ~LooksAtOperands() { now_ = before_; }
  LooksAtOperands(const LooksAtOperands&) = delete;
  static bool now() { return now_; }

 private:
  static inline thread_local bool now_ = false;
  bool before_;
};

// Whether the composite that has just arrived is to stay whole, if a rule says what it gives. Says so once.
bool stays_whole();

}  // namespace vitrify::capture
