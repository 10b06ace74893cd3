// What ATen's kernels gave where its Meta kernels, or a shape rule of ours, said something else: found when a plan runs, used by the next capture.
#pragma once
#include <span>
#include <stdexcept>
#include <string>

#include "ir/graph.h"
#include "support/error.h"

namespace vitrify {
struct Effects;  // effects.h
}
namespace vitrify::capture {

// A call cannot be served by its plan, found before anything outside the plan was written. Eager runs it.
struct PlanRefused : InternalError {
  using InternalError::InternalError;
};
// The content of this call's arguments is not what its plan is for; nothing has been run. Eager runs the call, the plan stays.
struct CallRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The same, found by the run. Nothing outside has been written; custom ops may have run.
struct RunRefused : CallRefused {
  using CallRefused::CallRefused;
  std::shared_ptr<const Effects> effects;  // null: none
};
// A size or a value is not what the plan is for: a plan captured now is for this one.
struct WayRefused : RunRefused {
  using RunRefused::RunRefused;
};
// While a program is captured, sizes that were guessed turn out to be others, by which an op gives fewer results.
struct OtherResults : CaptureError {
  using CaptureError::CaptureError;
};

// A call by op, attributes and operand types. Empty when something symbolic is among them.
std::string call_key(const std::string& op, std::span<const ir::Arg> args);
void learn(const std::string& key, uint32_t result, const ir::TensorType&);
// Replaces what is known better.
void apply_learned(const std::string& op, std::span<const ir::Arg> args, std::span<ir::TensorType> outs);
// What else is known of results of custom ops, which a type does not say: they are a part of memory that their kernels keep for more than them;
// they are conjugate or negative views.
enum class Given { Part, Bits };
void learn(const std::string& op, uint32_t result, Given);
bool is_known(const std::string& op, uint32_t result, Given);

}  // namespace vitrify::capture
