// Cuts a joint program into what runs forward, what runs backward, and what the one keeps for the other.
#pragma once
#include <memory>
#include <vector>

#include "support/options.h"
#include "torch/joint.h"
#include "torch/whole.h"

namespace vitrify {

// A value the forward keeps for the backward.
struct Saved {
  enum class Kind : uint8_t { Given, Result, Private, Sizes } kind;  // Sizes: of something given, whose elements nobody reads
  uint32_t index;                                                    // of JointProgram::given, of the forward's outputs, or which of the private ones
  ir::Value value;                                                   // in the graph as recorded
  ir::Dims strides;                                                  // as kept: passes may have chosen others than were recorded
  bool bits = false;                                                 // kept as bits (torch/bits.h)
  bool snapshot =
      false;  // private, or given and as memory, and what was computed of it is computed again; the derivative itself reads what users have
  bool is_as_it_was() const { return snapshot && kind == Kind::Private; }
};

struct BackwardProgram {
  std::shared_ptr<ir::Graph> graph;   // inputs: what is kept, then the tangents that are defined
  std::vector<ResultSpec> results;    // from the outputs of `graph`
  std::vector<uint32_t> gradients;    // per result: which of JointProgram::gradients, or the edge to where it stops
  std::vector<ir::TensorType> types;  // of the gradients, as users get them
  std::vector<int32_t> batch_dims;    // of those that are batched; -1: is not
  std::vector<uint32_t> saved;        // which of Split::saved its inputs are; from its size on, which of JointProgram::given
  // What eager would have saved for these gradients, whether we keep it or not: indices of JointProgram::given, and of the forward's outputs.
  std::vector<uint32_t> reads_given, reads_outputs;
};

struct Split {
  Program
      forward;  // results: a value for each output of the joint program's forward (undefined where only a write needs it), then the private values
  std::vector<Saved> saved;
  int64_t kept_bytes = 0;    // of the private ones
  BackwardProgram backward;  // for all tangents
  std::shared_ptr<const Whole> whole;
};

Split split(const JointProgram&, const Options&);

// Gradients end at results in front of what raises, and no derivative through all results says what those read.
bool ends_between(const JointProgram&);

// For other gradients, taken from the trace later (`values`, nodes from id `first` on) for these tangents (null: none), out of what a split keeps.
BackwardProgram backward_from(const JointProgram&, const std::vector<Saved>&, const std::vector<ir::Value>& tangents, std::vector<Gradient>,
                              const std::vector<ir::Value>& values, uint32_t first);

}  // namespace vitrify
