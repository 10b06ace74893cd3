// How the gradients that a compiled backward is given are laid out.
#pragma once
#include <ATen/ATen.h>

#include <unordered_set>

#include "torch/joint.h"

namespace vitrify {

namespace capture {
struct View;
}

using Layouts = std::vector<TangentLayout>;

// Of a gradient: it is the tangent of place ResultSpec::index itself, or a view of it.
inline bool is_of_tangent(const ResultSpec& how) { return how.kind == ResultSpec::Kind::Input || how.kind == ResultSpec::Kind::ViewOfInput; }

// The sizes that each call says (CallSizes), by symbol.
std::unordered_set<uint32_t> said_by(const std::vector<const ir::TensorType*>&);
// The steps from `of`, or from all of its memory, where they can be made again: each call says the sizes that are among their arguments, so that no
// guard has to. Eager's have made views.
std::optional<std::vector<ResultSpec::ViewOp>> path_between(const capture::View* of, const capture::View& v,
                                                            const std::unordered_set<uint32_t>& said);

// Whether any comes in strides or in an order of its own.
bool is_other(const Layouts&);
Layouts as_recorded(Layouts);
// exactly: where there is but one element as well.
// Memory that kernels can read. Otherwise it is a transform's (vmap), sparse, or a subclass: ops take it as they do in eager.
bool is_plain(const at::Tensor&);
bool all_plain(const std::vector<at::Tensor>&);  // that are defined
bool is_recorded(const at::Tensor&, const ir::TensorType& recorded, bool exactly = false);
// Neither as recorded nor, where sizes differ from call to call, without gaps in that order: plans for that layout are given a copy.
bool lies_otherwise(const at::Tensor&, const ir::TensorType& recorded);
// Behind the lazy bits of `like`, or with them again.
at::Tensor turned(at::Tensor, const at::Tensor& like);
// Notes strides that were not recorded. Where sizes differ from call to call, those that do not follow from the sizes are left as recorded, but for
// what looks at them: that needs them as they are, and the lazy bits too.
void take_strides(const at::Tensor&, const ir::TensorType& recorded, TangentLayout&, bool looked_at);
// The strides and lazy bits as they are.
void take_numbers(const at::Tensor&, TangentLayout&);
bool has_bits(const at::Tensor&);  // also where it is a batch
at::Tensor batch_without_bits(const at::Tensor&);
// How one comes that is_grads_batched made of several; false: it is something else than memory, or has lazy bits.
bool take_batch(const at::Tensor&, TangentLayout&);
// Of gradients alike, laid out as they are: an expanded one has its elements once.
at::Tensor batch_of(const std::vector<at::Tensor>&);
// What is_grads_batched gives, and kernels can read: all of it; how many there are; one of each; and the other way round, of the gradients for each.
bool is_batch(const std::vector<at::Tensor>& tangents);
int64_t size_of_batch(const std::vector<at::Tensor>& tangents);
int64_t size_of_any_batch(const std::vector<at::Tensor>& tangents);  // also where torch.func's transforms are within; -1: there is none
std::vector<at::Tensor> one_of_batch(std::vector<at::Tensor> tangents, int64_t which);
bool has_dims_of_one(const std::vector<at::Tensor>&);  // whose strides in a batch are ATen's affair
std::vector<at::Tensor> as_batch(const std::vector<std::vector<at::Tensor>>& each);
// As the plan for that layout wants it.
at::Tensor laid_out(const at::Tensor&, const ir::TensorType& recorded, const TangentLayout&);

}  // namespace vitrify
