// Composite ops whose code in ATen asks for sizes as numbers, which a capture would have to take as they are: the same steps, with symbols.
#pragma once
#include <c10/core/DispatchKeySet.h>

namespace vitrify::capture {

// Placeholders have it, so that those ops come here before autograd takes them apart; empty where another library has the key.
c10::DispatchKeySet composite_keys();

}  // namespace vitrify::capture
