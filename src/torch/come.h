// Results that a backward comes to without a gradient.
#pragma once
#include "torch/joint.h"

namespace vitrify {

// A derivative of the user's runs behind it all the same. What has no gradient has no batch: the dim of that says so.
inline void come_without(TangentLayout& l) { l.batch_dim = -1; }
inline bool comes_without(const TangentLayout& l) { return !l.defined && l.batch_dim < 0; }

}  // namespace vitrify
