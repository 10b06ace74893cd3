#include "torch/passes/passes.h"

namespace vitrify {

std::vector<pipeline::Stage> torch_stages(std::shared_ptr<PassState> s) {
  auto stage = [&](const char* name, const char* why, bool (*pass)(ir::Graph&, const Options&, PassState&)) {
    return pipeline::Stage{name, why, [s, pass](ir::Graph& g, const Options& o) { return pass(g, o, *s); }};
  };
  return {
      stage("fold_batch_norm", "before fuse_conv: a normalised convolution becomes a plain one", fold_batch_norm),
      stage("fuse_conv", "needs folded norms; gives convolutions their layout, packed weights and post-ops", fuse_conv),
      stage("fuse_linear", "matrix products by the fastest library, with post-ops", fuse_linear),
      stage("small_matmul", "what fuse_linear left because a call costs more than the work", small_matmul),
      stage("own_attention", "attention by a kernel of our own", own_attention),
      stage("fuse_segments", "gather, message, scatter over edges become sums over neighbours", fuse_segments),
      stage("hoist_frozen", "last: moves whatever depends on weights only out of the call", hoist_frozen),
  };
}

namespace {
const bool named = pipeline::name_stages(torch_stages(nullptr));
}

}  // namespace vitrify
