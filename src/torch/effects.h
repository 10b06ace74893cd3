// What custom ops did in a run that was refused or has failed, and how eager goes on from there: they do not run again.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch/mode.h"

namespace vitrify {

// What a call with these arguments writes.
std::vector<at::Tensor> written_by(const c10::FunctionSchema&, const std::vector<c10::IValue>& stack);
// Whether the ops that an op's kernel calls count what they write, where no mode is.
bool kernel_counts_writes(const c10::OperatorHandle&);
// Calls an op's kernel, which has the ops that it calls count what they write. What the op counts itself has been counted where it was called.
void call_counting(const c10::OperatorHandle&, std::vector<c10::IValue>& stack);

// How often plans have begun on this thread what eager may not do again: calls of custom ops, of which nobody knows what they do, and writes to what
// the call was given.
uint64_t effects_begun();
void note_effect();

using RandomStates = std::vector<std::pair<at::Generator, at::Tensor>>;
RandomStates random_states(const std::vector<at::Generator>&);  // and of the default one
RandomStates moved_since(const RandomStates& before);           // as they are now
void set_random_states(const RandomStates&);

// What the custom ops of a refused run gave, in order: whatever serves the call then must not run them again.
struct Effects {
  struct One {
    std::string op;
    // And then what the written arguments have become, and then how often each was written, where nothing else counts that.
    std::vector<at::Tensor> results;
    RandomStates random;       // after it, of generators from which it may have drawn
    std::exception_ptr error;  // what it raised instead
  };
  std::vector<One> all;
};
// What the custom ops gave of the run that has just failed on this thread, where eager can run the call from the start with it; null: it cannot.
std::shared_ptr<const Effects> take_effects_of_failure();
void set_effects_of_failure(std::shared_ptr<const Effects>);
// Of the next run on this thread.
void give_effects(std::shared_ptr<const Effects>);
std::shared_ptr<const Effects> take_given_effects();

// While it lives, the first custom ops that this thread calls give what they gave.
class Resumed final : public capture::ModeHandler {
 public:
  // Null: does nothing. `python_mode`: as in push_mode.
  explicit Resumed(std::shared_ptr<const Effects>, void* python_mode = nullptr);
  ~Resumed();
  Resumed(const Resumed&) = delete;
  void dispatch(const c10::OperatorHandle&, compat::Stack*) override;
  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl*) override;

 private:
  void give(const Effects::One&, const c10::OperatorHandle&, compat::Stack*) const;
  std::shared_ptr<const Effects> effects_;
  size_t given_ = 0;
  std::optional<capture::Unseen> unseen_;
};

}  // namespace vitrify
