// What eager's autograd would do in a backward of a program: which nodes it comes to, and what each has saved.
#pragma once
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ir/graph.h"

namespace vitrify {

// By step of a tape: does a backward come to it? Empty: to all of them.
using Path = std::vector<char>;
inline bool on(const Path& path, size_t step) { return path.empty() || path[step]; }

// How eager's backward has what a call was given: as memory, by way of a view or not at all; as the tensor itself, which assigning to its .data gives
// other memory; or both.
enum class Hold : uint8_t { Memory, Tensor, Both };

struct Tape {
  struct Step {
    const torch::autograd::Node* node;  // of the trace, which holds it
    uint64_t number = 0;                // of it: the last made runs first
    std::vector<uint32_t> next;         // steps that its gradients go to, and
    std::vector<uint32_t> next_input;   // which input of each
    std::vector<uint32_t> gradients;    // of JointProgram::gradients, then past_raising: those that it gives
    bool saves = false;                 // tensors, without which it cannot run again
    bool holds = false;                 // tensors that nothing frees
    int32_t once = -1;                  // one backward of a call comes here, and no other: to the steps with that number
    bool again = false;                 // what it has saved is made again, by a checkpoint's function
    bool draws = false;                 // or has effects: it matters that all gradients come to it at once
    // Those among what it has saved that users can change: of JointProgram::given and of the forward's outputs.
    std::vector<uint32_t> reads_given, reads_outputs;
    // Of which the tensor itself, and no view of it: eager raises where it has lost its history in place.
    std::vector<uint32_t> itself_given, itself_outputs;
    // What a checkpoint's function finds by itself, or a user's own node has as attributes of its ctx, and reads as it is by then.
    std::vector<uint32_t> found_given, found_outputs;
    int32_t below = -1;         // the same node's step in the tape of the level below
    std::string raises;         // what eager raises here
    bool own = false;           // a derivative of the user's
    bool python = false;        // Python code runs here, and reads Python's state as it is by then
    int32_t stale = -1;         // for the reason that this one of JointProgram::given, which it has saved, was written since:
    int64_t expected = 0;       // its version then, counted from the call's begin
    int32_t stale_result = -1;  // or this result is of the memory that was: users write on, and the text counts that
  };
  // What raises whatever its gradient is, above level 0.
  struct Failing {
    uint32_t step;
    bool always;                            // or where a gradient is asked for that is given to, or by way of, one of
    std::vector<uint32_t> next, gradients;  // these, as in Step
    std::function<void()> raise;
  };
  std::vector<Failing> failing;
  std::vector<Step> steps;       // each before those that its gradients go to
  std::vector<char> take_whole;  // by step: all gradients have to come to it at once. A user's derivative, there or behind it, need not be linear
  std::vector<int32_t> roots;    // by JointProgram::roots: where their gradients begin; -1: at none of the program's nodes
  std::vector<std::pair<int32_t, uint32_t>> places;  // by place, where gradients may stop: the step, and which input of it
  std::vector<std::vector<uint32_t>> behind;         // by root, where there are several: those of JointProgram::given that it follows from

  std::vector<Hold> holds;          // by JointProgram::given
  std::vector<Hold> holds_results;  // the same of the forward's outputs

  // What eager's nodes have saved of what the program computes, and this derivative does not read: others may, that are differentiated again or come
  // by fewer gradients.
  std::vector<ir::Value> unread;

  // Results that are views, by number, which eager has saved themselves: assigning to their .data gives them other memory, and it reads that.
  std::vector<uint32_t> views;

  bool own = false;          // some step is a derivative of the user's
  bool stopped = false;      // the derivative that was recorded first ends in front of Python code: none goes through all
  bool hands_out = false;    // hooks of saved tensors are given something: numbers are kept from them
  bool writes_last = false;  // what the program writes last, or a custom op of it does, it does when all of that is saved

  // As the engine goes: from places that have a gradient, by nodes that lead to a gradient that is asked for, or to where it `stops`. A whole
  // backward asks for all.
  Path path(const std::function<bool(size_t)>& has_gradient, const std::function<bool(size_t)>* asked, const std::vector<char>& stops = {}) const;
  int32_t step_of(size_t place) const { return place < roots.size() ? roots[place] : places[place].first; }
  // Those of `edges` to which it comes, whether with a gradient or without.
  std::vector<char> edges_on(const Path&, size_t edges) const;
  bool comes_to_place(const Path&, size_t place) const;
  void find_whole();
  // By step: whether a gradient of the program's follows from it. Not on the way to a leaf that the program makes.
  std::vector<char> gives_gradients() const;
  // The first on the way for which that holds.
  std::optional<size_t> first(const Path&, const std::function<bool(const Step&)>& is) const;
  std::optional<size_t> first_reading(const Path&, bool is_output, uint32_t index) const;
  bool reads(const Path& path, bool is_output, uint32_t index) const { return first_reading(path, is_output, index).has_value(); }
  bool finds(const Path&, bool is_output, uint32_t index) const;  // and reads it nowhere else
  std::optional<size_t> first_reading_itself(const Path&, bool is_output, uint32_t index) const;
};

}  // namespace vitrify
