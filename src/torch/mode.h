// Our entry on torch's dispatch mode stack: every op called while it is on top arrives at the tracer of the thread.
#pragma once
#include "torch/compat.h"

namespace vitrify {

// In a Python process, once: torch's own interpreter (getPyInterpreter()), whose table is replaced by one that forwards everything but dispatch and
// detach while our mode is on top. Without this call an interpreter of our own is used: a C++ process needs no Python.
__attribute__((visibility("default"))) void use_python_interpreter(c10::impl::PyInterpreter*);

namespace capture {

// What the mode calls; the tracer.
struct ModeHandler {
  virtual void dispatch(const c10::OperatorHandle&, compat::Stack*) = 0;
  virtual c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl*) = 0;

 protected:
  ~ModeHandler() = default;
};

// Puts the mode on this thread's stack. `python_mode`: the TorchDispatchMode instance that stands for it, null in a C++ process.
void push_mode(ModeHandler*, void* python_mode);
void remove_mode(const ModeHandler*);  // wherever on the stack it is; does nothing where it is not that one's
bool mode_on_top();
bool has_mode();  // of this thread, seen or not: what is called within belongs to what the mode is for

// Takes the mode off the stack for a scope.
class Paused {
 public:
  Paused();
  ~Paused();
  Paused(const Paused&) = delete;

 private:
  std::shared_ptr<compat::Mode> mode_;
  c10::impl::ExcludeDispatchKeyGuard not_unseen_;
};

// For a scope, the mode is on the stack for as long as an op is called and no longer: ATen's formulas ask whether there is one, and write nothing in
// place if so. Composite ops are taken apart without it.
class Unseen {
 public:
  Unseen();
  ~Unseen();
  Unseen(const Unseen&) = delete;

 private:
  std::shared_ptr<compat::Mode> mode_;
  c10::impl::LocalDispatchKeySet keys_;
};

// For a scope, ops know that they are of a batch of the first generation's vmap, or that they are not.
class InBatch {
 public:
  explicit InBatch(bool on = true);
  ~InBatch();
  InBatch(const InBatch&) = delete;

 private:
  bool before_;
};

// Back on the stack for a scope within that.
class Seen {
 public:
  Seen();
  ~Seen();
  Seen(const Seen&) = delete;

 private:
  std::shared_ptr<compat::Mode> mode_;
  c10::impl::ExcludeDispatchKeyGuard not_unseen_;
};

}  // namespace capture
}  // namespace vitrify
