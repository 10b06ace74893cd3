// Attention on processors with AVX-512: an op of our own with the schema of ATen's takes its place.
#include "runtime/gemm.h"
#include "torch/passes/match.h"
#include "torch/passes/passes.h"

namespace vitrify {

using namespace match;

bool own_attention(Graph& g, const Options& options, PassState& state) {
  if (!runtime::can_multiply() || (options.gemm != "auto" && options.gemm != "vitrify")) return false;
  bool changed = false;
  for (Node* n : g.nodes())
    if (is(*n, "aten::_scaled_dot_product_flash_attention_for_cpu") && number(*n, 3).value_or(0) == 0 && is_f32_cpu(n->outs[0])) {
      state.fuses(g);
      n->op = g.op("vitrify::attention");
      changed = true;
    }
  return changed;
}

}  // namespace vitrify
