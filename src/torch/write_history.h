// What autograd sees of writes in place.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/autograd/edge.h>

#include <string>
#include <string_view>

#include "ir/graph.h"

namespace vitrify {

// What eager raises of what was written since, where it unpacks what it has saved, whether a gradient comes or not.
constexpr std::string_view kChanged = "one of the variables needed for gradient computation has been modified by an inplace operation: [";
// That error, for a tensor of that type which a backward needs. `of`: which output of which node it is, or nothing.
[[noreturn]] void refuse_changed(const ir::TensorType&, const at::Tensor& now, const std::string& of, int64_t version, int64_t expected);
// Such a text, of a tensor that was written so often since.
std::string with_writes(std::string says, int64_t more);
// And for one that had a history then and has none now.
[[noreturn]] void refuse_detached();

// Leaves, and some views, may not be written in a way that gradients follow: CallRefused, since eager says which, and why.
void check_written(const at::Tensor&);
// The same of a view, whose write eager's gradients follow to its base, past its own node and those of views on the way. `past_it`: what the program
// returns follows from the write by way of another view: eager's gradients do not come through this one.
void check_written_view(const at::Tensor&, bool past_it);

// The tensor was written in place, in a way that gradients follow: eager's history for it. `before`: where its gradient went.
void rebase(const at::Tensor&, torch::autograd::Edge region, const torch::autograd::Edge& before);

}  // namespace vitrify
