// What the tracer needs to know of an op, worked out once per capture from its schema and tags.
#pragma once
#include "ops/lowering.h"
#include "torch/convert.h"

namespace vitrify::capture {

enum class OpKind : uint8_t {
  Pass,         // not part of the program (profiler marks, our own ops): runs as it is
  Refuse,       // cannot be captured: `why`
  Composite,    // ATen decomposes it
  Pure,         // new results, nothing written
  View,         // results share memory with argument 0
  InPlaceView,  // changes the metadata of argument 0: t_(), unsqueeze_()
  Write,        // writes into arguments
  Effect,       // no result, kept in order
  Special,      // handled by name in the tracer
};

struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& h) : op(h) {}
  c10::OperatorHandle op;
  std::string name;  // "aten::add_.Tensor"
  OpKind kind = OpKind::Pure;
  std::string why;
  std::vector<ArgKind> args;
  uint32_t flags = 0;
  const ops::OpRow* row = nullptr;
  bool multi_result_view = false;
  bool sees_autocast = false;     // its kernel calls ops that autocast casts
  bool taken_apart_seen = false;  // Composite: with no mode to be seen it would do its work without ops
  // Write: positions of written arguments, and the op that computes the new values. Its results: those of this op that are not written arguments,
  // then (or only) one per written argument.
  std::vector<size_t> writes;
  const OpInfo* functional = nullptr;    // null: a custom op, called on copies of what it writes
  std::vector<size_t> functional_args;   // position here per argument of `functional`
  const OpInfo* out_of_place = nullptr;  // InPlaceView: the view op
};

class OpTable {
 public:
  const OpInfo& get(const c10::OperatorHandle&);
  const OpInfo* find(std::string_view name);  // null when torch has no such op

 private:
  void classify(OpInfo&);
  void find_functional(OpInfo&);
  std::unordered_map<const void*, std::unique_ptr<OpInfo>> ops_;  // by schema address
};

}  // namespace vitrify::capture
