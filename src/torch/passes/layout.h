// Channels-last values around 2-d convolutions.
#pragma once
#include <functional>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "ir/graph.h"

namespace vitrify {

// Whether ATen gives this 2-d convolution (or its derivative) to oneDNN, whose kernels take and give channels-last as they are (at::native,
// ConvParams::use_mkldnn). `input`: which argument is the input; weight and the rest follow it. Float32 of sizes that are not constant: no.
bool taken_by_onednn(std::span<const ir::Arg> args, size_t input);

// Whether so many products make one element of the result that the layout decides the error: oneDNN's channels-last kernels add them one by one, the
// others in blocks.
bool adds_long_sums(const ir::TensorType& weight);

// Values whose strides are channels-last, and where that leads.
class ChannelsLast {
 public:
  explicit ChannelsLast(ir::Graph&);
  bool has(ir::Value v) const { return values_.contains(v); }
  void add(ir::Value v) { values_.insert(v); }
  bool is_output(ir::Value v) const { return outputs_.contains(v); }
  // Makes the 4-d results of `n` channels-last where what it reads is, unless users see them.
  void follow(ir::Node& n);

  // v was recorded in this type, and has got another.
  void changed(ir::Value v, const ir::TensorType& recorded);
  bool is_changed(ir::Value v) const { return recorded_.contains(v); }
  // Gives a call that may look at memory what it reads as that was recorded: the one place where that is seen to.
  void restore(ir::Graph&, ir::Node&, const std::function<void(ir::Node* copy, const ir::Node* reader)>& made);

 private:
  bool is_neutral(ir::Value) const;
  std::unordered_map<ir::Value, ir::TensorType> recorded_;
  std::unordered_map<ir::Value, ir::Value> restored_;
  std::unordered_set<ir::Value> values_, outputs_;
  std::unordered_set<const ir::Node*> shown_;  // views that custom ops are given: they look past them, at what they are views of
  std::unordered_set<ir::Value> neutral_;      // the same number over each image: as good in any layout
};

// Convolutions of a graph with static sizes, and their derivatives, in channels-last layout; `made` hears of each copy between layouts and of the
// node it was made for. Graph inputs and outputs stay as they are. Returns whether anything changed.
bool convolve_channels_last(ir::Graph&, const std::function<void(ir::Node* copy, const ir::Node* reader)>& made);

}  // namespace vitrify
