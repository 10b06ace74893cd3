// What sizes a call has. A derivative that is taken after the door has read the guards may assume more of them, and is then for some calls only.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "ir/graph.h"
#include "sym/known.h"
#include "torch/program.h"

namespace vitrify {

// What a derivative takes to be known of sizes, some of which it finds itself while it runs.
struct Assumed : sym::Known {
  std::vector<uint32_t> found;  // symbols
};

class CallSizes {
 public:
  using Note = std::function<void(ir::Value, const at::Tensor&)>;
  CallSizes() = default;  // those that the trace has
  // `each`: gives values of the trace with what they are in the call, of which sizes are read.
  CallSizes(const sym::Context& ctx, std::function<void(const Note&)> each) : ctx_(&ctx), each_(std::move(each)) {}
  const std::vector<std::optional<int64_t>>& by_symbol() const;
  std::vector<int64_t> values(std::span<const sym::Int>) const;
  // Beyond what was known `before`. What is found by a run that looks at it does; of another size that nobody knows nothing does.
  bool hold(const Assumed&, const sym::Known& before) const;

 private:
  const sym::Context* ctx_ = nullptr;
  std::function<void(const Note&)> each_;
  mutable std::optional<std::vector<std::optional<int64_t>>> found_;
};

// Whether its arguments hold some that differ from call to call; with those of a call in their place.
bool has_sizes(const std::vector<ResultSpec::ViewOp>&);
std::vector<sym::Int> sizes_in(const c10::IValue&);  // of an argument that is an integer or several
std::vector<ResultSpec::ViewOp> path_in(std::vector<ResultSpec::ViewOp>, const CallSizes&);

}  // namespace vitrify
