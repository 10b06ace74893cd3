// Matrix products by the fastest library on this processor, with pointwise post-ops.
#include "torch/passes/match.h"
#include "torch/passes/passes.h"

namespace vitrify {

using namespace match;

namespace {

// Multiply-adds below which a call of oneDNN costs more than it saves.
constexpr double kMinWork = 2.5e6;

// ATen computes f32 products with MKL, which takes slower paths on processors of other makers: there oneDNN is 2 to 3 times faster, on weights as they
// are and on transposed ones alike. On Intel's, both are near the peak and oneDNN's cost per call decides against it.
bool onednn_is_faster() {
#if defined(__x86_64__)
  return !__builtin_cpu_is("intel") && __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

struct Product {
  Value a, b, bias;  // [M,K], [K,N], [N]
};

std::optional<Product> match_product(const Node& n) {
  Product p;
  if (is(n, "aten::mm")) {
    p = {tensor(n, 0), tensor(n, 1), {}};
  } else if (is(n, "aten::addmm")) {
    p = {tensor(n, 1), tensor(n, 2), tensor(n, 0)};
    if (number(n, 3) != 1.0 || number(n, 4) != 1.0) return {};
    const auto& t = p.bias.type();
    if (t.dim() != 1 || !(t.sizes[0] == n.outs[0].sizes[1]) || !is_f32_cpu(t)) return {};
  } else {
    return {};
  }
  if (!is_f32_cpu(p.a.type()) || !is_f32_cpu(p.b.type()) || !is_f32_cpu(n.outs[0])) return {};
  for (Value v : {p.a, p.b})
    for (auto s : v.type().sizes)
      if (s.is(0)) return {};
  return p;
}

// Elements in row-major order before and after.
bool is_reshape(const Node& n) { return (is(n, "aten::view") || is(n, "aten::_unsafe_view") || is(n, "aten::reshape")) && n.outs[0].is_contiguous() && tensor(n, 0).type().is_contiguous(); }

}  // namespace

bool fuse_linear(Graph& g, const Options& options, PassState& state) {
  if (!onednn_is_faster()) return false;
  bool changed = false;
  Uses uses = users(g);
  const std::vector<Node*> nodes = g.nodes();
  struct Found {
    Node* node;
    Product p;
    double work;
    bool packed = false;
  };
  std::vector<Found> found;
  for (Node* n : nodes) {
    auto p = match_product(*n);
    if (!p) continue;
    const double work = hint_of(p->a.type().sizes[0]) * hint_of(p->a.type().sizes[1]) * hint_of(p->b.type().sizes[1]);
    if (work >= kMinWork) found.push_back({n, *p, work});
  }
  // Packed copies where a byte of them saves most.
  std::vector<Found*> wanted;
  for (Found& f : found)
    if (state.is_frozen(g, f.p.b)) wanted.push_back(&f);
  std::stable_sort(wanted.begin(), wanted.end(), [](Found* x, Found* y) { return hint_of(x->p.a.type().sizes[0]) > hint_of(y->p.a.type().sizes[0]); });
  for (Found* f : wanted) {
    const int64_t bytes = f->p.b.type().numel().value() * 4;
    if (state.packed_bytes + bytes > options.packed_weight_mb << 20) continue;
    state.packed_bytes += bytes;
    f->packed = true;
  }

  for (Found& f : found) {
    Node* n = f.node;
    // [K,N] -> [N,K]: the operand of a transpose, or a transpose of ours
    Node* bn = f.p.b.node;
    const bool transposed = is(*bn, "aten::t") || (is(*bn, "aten::permute") && bn->outs[0].dim() == 2) || (is(*bn, "aten::transpose.int") && bn->outs[0].dim() == 2);
    Value w = transposed && tensor(*bn, 0).type().sizes[0] == f.p.b.type().sizes[1] && tensor(*bn, 0).type().sizes[1] == f.p.b.type().sizes[0] &&
                      !(tensor(*bn, 0).type().strides == f.p.b.type().strides)
                  ? tensor(*bn, 0)
                  : Value{};
    if (!w) {
      ir::TensorType t = f.p.b.type();
      std::swap(t.sizes[0], t.sizes[1]);
      std::swap(t.strides[0], t.strides[1]);
      w = insert(g, n, "aten::t", {f.p.b}, t, ir::kView)->out();
    }
    if (f.packed) {
      const ir::TensorType packed = dense(DType::F32, w.type().sizes);
      w = insert(g, n, "mkldnn::_reorder_linear_weight", {w, f.p.a.type().sizes[0].is_const() ? ir::Arg(f.p.a.type().sizes[0]) : ir::Arg(ir::None{})}, packed)->out();
    }
    // A pointwise op that follows, through reshapes nobody else reads.
    Node* reshape = nullptr;
    Node* post_node = nullptr;
    std::optional<PostOp> post;
    Node* u = sole_user(uses, n);
    if (u && is_reshape(*u)) {
      reshape = u;
      u = sole_user(uses, u);
    }
    if (u && (post = post_op(*u)) && u->outs[0] == tensor(*u, 0).type()) post_node = u;
    else post.reset();
    const PostOp p = post.value_or(PostOp{"none", "", {}});
    Node* fused = insert(g, n, "mkldnn::_linear_pointwise",
                         {f.p.a, w, f.p.bias ? ir::Arg(f.p.bias) : ir::Arg(ir::None{}), p.attr, scalars(g, p.scalars), p.algorithm}, n->outs[0]);
    g.replace_uses(n->out(), fused->out());
    if (post_node) g.replace_uses(post_node->out(), reshape ? reshape->out() : fused->out());
    changed = true;
  }
  if (changed) g.remove_dead();
  return changed;
}

}  // namespace vitrify
