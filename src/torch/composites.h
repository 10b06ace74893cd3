// Composite ops whose code in ATen asks for sizes as numbers, which a capture would have to take as they are: the same steps, with symbols, or one
// call where nobody asks for gradients.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace vitrify::capture {

// No part of torch uses this key.
constexpr auto kCompositeKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;
inline c10::DispatchKeySet below_composites(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kCompositeKey);
}
bool has_symbols(const at::Tensor&);  // among its sizes and strides
void register_quantiles(torch::Library&);

// Placeholders have it, so that those ops come here before autograd takes them apart; empty where another library has the key.
c10::DispatchKeySet composite_keys();

// Whether the composite that has just arrived is to stay whole, if a rule says what it gives. Says so once.
bool stays_whole();

}  // namespace vitrify::capture
