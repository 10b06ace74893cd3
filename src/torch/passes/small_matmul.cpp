// Gives small products with a frozen weight that weight in [K,N] order, so that the loop nest they become (src/ops/matmul.cpp) reads dense rows.
#include "torch/passes/match.h"
#include "torch/passes/passes.h"

namespace vitrify {

using namespace match;

namespace {
constexpr double kMaxWork = 600'000;  // as in src/ops/matmul.cpp
}

bool small_matmul(Graph& g, const Options&, PassState& state) {
  bool changed = false;
  for (Node* n : std::vector<Node*>(g.nodes())) {
    const bool mm = is(*n, "aten::mm"), addmm = is(*n, "aten::addmm");
    if (!mm && !addmm) continue;
    const size_t at = mm ? 1 : 2;
    const Value w = tensor(*n, at), x = tensor(*n, at - 1);
    if (!w || !x || !is_f32_cpu(w.type()) || !state.is_frozen(w) || w.type().strides[1].is(1)) continue;
    const double work = hint_of(x.type().sizes[0]) * hint_of(x.type().sizes[1]) * hint_of(w.type().sizes[1]);
    if (work == 0 || work > kMaxWork || !is_static(w.type().sizes) || hint_of(w.type().sizes[1]) < 16) continue;
    ir::TensorType dense = w.type();
    dense.strides = ir::contiguous_strides(dense.sizes);
    Node* copy = insert(g, n, "aten::clone", {w, ir::MemoryFormat::Contiguous}, dense);
    n->args[at] = copy->out();
    changed = true;
  }
  return changed;
}

}  // namespace vitrify
