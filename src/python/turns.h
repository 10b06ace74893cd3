// What has served the calls of compiled programs in a checkpoint's function. When that is called again, in a backward, each is served alike: torch
// gives back what is saved then by number, and two plans, or a plan and eager, save other things in another order.
#pragma once
#include <memory>

#include "python/entry.h"

namespace vitrify::python {

class Turn {
 public:
  // Of a call of `state` that begins: its turn among those in the checkpoint's function that runs in this thread, if there is one.
  static Turn next(PyObject* state);
  bool again() const { return again_; }
  std::shared_ptr<Entry> served() const;     // when the function was called first; null: eager
  void note(const std::shared_ptr<Entry>&);  // this has served the call, and not eager

 private:
  Ref served_;  // a list, which the checkpoint's frame has
  Py_ssize_t at_ = 0;
  bool again_ = false;
};

}  // namespace vitrify::python
