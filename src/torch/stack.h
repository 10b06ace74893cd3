// The operands of a boxed call: the last ones of its stack.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include "torch/compat.h"

namespace vitrify {

inline c10::ArrayRef<c10::IValue> last(const compat::Stack& s, size_t n) { return c10::ArrayRef<c10::IValue>(s).slice(s.size() - n, n); }
inline void drop(compat::Stack& s, size_t n) { s.erase(s.end() - n, s.end()); }

// Calls f on each defined tensor among them, in lists too.
template <class F>
void for_each_tensor(c10::ArrayRef<c10::IValue> args, F&& f) {
  for (const c10::IValue& v : args) {
    if (v.isTensor()) {
      if (v.toTensor().defined()) f(v.toTensor());
    } else if (v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorVector())
        if (t.defined()) f(t);
    } else if (v.isList()) {
      for (const c10::IValue& e : v.toListRef())
        if (e.isTensor() && e.toTensor().defined()) f(e.toTensor());
    }
  }
}

}  // namespace vitrify
