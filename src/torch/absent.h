// Gradients through some of the results only, made from those through all of them.
#pragma once
#include <optional>
#include <unordered_set>
#include <vector>

#include "torch/split.h"

namespace vitrify {

// Marks roots whose tangents autograd's engine does nothing with but add them to a gradient that comes from elsewhere (JointProgram::Root::added).
// `sums`: ids of the nodes by which the engine adds.
void find_added(JointProgram&, const std::unordered_set<uint32_t>& sums);

// What autograd would record where the tangents of `absent` roots are undefined, all of which are `added`. nullopt: that has to be recorded.
std::optional<BackwardProgram> backward_without(const JointProgram&, const BackwardProgram& all, const std::vector<size_t>& absent);

}  // namespace vitrify
