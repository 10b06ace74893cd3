// Matrix products by the fastest library on this processor, with pointwise post-ops.
#include "runtime/gemm.h"
#include "torch/passes/match.h"
#include "torch/passes/passes.h"

namespace vitrify {

using namespace match;

namespace {

// Multiply-adds below which a call of oneDNN costs more than it saves.
constexpr double kMinWork = 2.5e6;

// ATen computes f32 products with MKL, which takes slower paths on processors of other makers: there oneDNN is faster, on weights as they are
// and on transposed ones alike. On Intel's, oneDNN's cost per call decides against it, and packed weights help MKL; weights that there is no room to
// pack are faster multiplied by src/runtime/gemm.h, which copies them while it computes.
enum class Library : uint8_t { Aten, OneDnn, Mkl };
struct Choice {
  Library library = Library::Aten;
  bool own = false;        // what the library does not take
  bool own_small = false;  // what is too small for the library
};
Choice choose_library(const Options& o) {
  if (o.gemm == "aten") return {};
  if (o.gemm == "onednn") return {Library::OneDnn};
  if (o.gemm == "mkl") return {at::hasMKL() ? Library::Mkl : Library::Aten};
  if (o.gemm == "vitrify") return {Library::Aten, true};
#if defined(__x86_64__)
  const bool own = runtime::can_multiply();
  if (__builtin_cpu_is("intel")) return {at::hasMKL() ? Library::Mkl : Library::Aten, own, own};
  if (__builtin_cpu_supports("avx2")) return {Library::OneDnn, false, own};
#endif
  return {};
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
bool is_reshape(const Node& n) {
  return (is(n, "aten::view") || is(n, "aten::_unsafe_view") || is(n, "aten::reshape")) && n.outs[0].is_contiguous() &&
         tensor(n, 0).type().is_contiguous();
}

// [K,N] -> [N,K]: the operand of a transpose, or a transpose of ours before `at`.
Value rows_of_weight(Rewriter& r, Node* at, Value b) {
  Node* bn = b.node;
  const bool transposed =
      is(*bn, "aten::t") || (is(*bn, "aten::permute") && bn->outs[0].dim() == 2) || (is(*bn, "aten::transpose.int") && bn->outs[0].dim() == 2);
  if (transposed) {
    const Value w = tensor(*bn, 0);
    if (w.type().sizes[0] == b.type().sizes[1] && w.type().sizes[1] == b.type().sizes[0] && !(w.type().strides == b.type().strides)) return w;
  }
  ir::TensorType t = b.type();
  std::swap(t.sizes[0], t.sizes[1]);
  std::swap(t.strides[0], t.strides[1]);
  return r.insert(at, "aten::t", {b}, t, ir::kView)->out();
}

struct Found {
  Node* node;
  Product p;
  double work;
  bool packed = false;
};

void use_mkl(Rewriter& r, const Found& f, Originals& originals) {
  Node* n = f.node;
  const Value w = rows_of_weight(r, n, f.p.b);
  const sym::Int rows = f.p.a.type().sizes[0];
  const Value packed = r.insert(n, "mkl::_mkl_reorder_linear_weight", {w, rows}, dense(DType::F32, w.type().sizes))->out();
  Node* fused = r.insert(n, "mkl::_mkl_linear", {f.p.a, packed, w, f.p.bias ? ir::Arg(f.p.bias) : ir::Arg(ir::None{}), rows}, n->outs[0]);
  originals.replaced(fused->out(), n->out());
  r.replace(n->out(), fused->out());
}

bool has_dense_rows(const ir::TensorType& t) { return t.strides[1].is(1); }

// Rows of an operand from which a weight is read often enough, and up to which MKL's plain product is no faster (measured on Cascade Lake).
constexpr double kMinRows = 32, kMaxRows = 512;
constexpr double kMinColumns = 16;  // kVectorColumns in src/ops/matmul.cpp

// vitrify::product copies operands of other strides first.
bool suits_own(const Product& p) {
  const double rows = hint_of(p.a.type().sizes[0]);
  if (rows < kMinRows || rows > kMaxRows) return false;
  ir::TensorType transposed = p.b.type();
  std::swap(transposed.strides[0], transposed.strides[1]);
  return has_dense_rows(p.a.type()) && (has_dense_rows(p.b.type()) || has_dense_rows(transposed));
}

// A product by a weight that changes, as nn.Linear has it, too wide for src/ops/matmul.cpp to make loops of it: where one is small MKL is no faster
// than multiply(), but brings 2.5 MiB of its code into memory.
bool by_changing_weight(Graph& g, const PassState& state, const Product& p) {
  return !has_dense_rows(p.b.type()) && hint_of(p.b.type().sizes[1]) >= kMinColumns && !state.is_frozen(p.b) && suits_own(p);
}

// Of rows with gaps between them its product takes hundreds of times as long as ATen's, which copies them.
bool suits_onednn(const Product& p) {
  ir::TensorType transposed = p.b.type();
  std::swap(transposed.sizes[0], transposed.sizes[1]);
  std::swap(transposed.strides[0], transposed.strides[1]);
  return p.b.type().is_contiguous() || transposed.is_contiguous();
}

// With the pointwise op that follows it, through a reshape that nobody else reads. Not with a residual: the kernel of the next norm reads it anyway.
void use_onednn(Graph& g, Rewriter& r, const Found& f, const Uses& uses, Originals& originals) {
  Node* n = f.node;
  Value w = rows_of_weight(r, n, f.p.b);
  if (f.packed) {
    const sym::Int rows = f.p.a.type().sizes[0];
    w = r.insert(n, "mkldnn::_reorder_linear_weight", {w, rows.is_const() ? ir::Arg(rows) : ir::Arg(ir::None{})}, dense(DType::F32, w.type().sizes))
            ->out();
  }
  const ir::Arg bias = f.p.bias ? ir::Arg(f.p.bias) : ir::Arg(ir::None{});
  Node* reshape = nullptr;
  Node* u = sole_user(uses, n);
  if (u && is_reshape(*u)) {
    reshape = u;
    u = sole_user(uses, u);
  }
  if (auto post = u ? post_op(*u) : std::nullopt; post && u->outs[0] == tensor(*u, 0).type()) {
    Node* fused = r.insert(n, "mkldnn::_linear_pointwise", {f.p.a, w, bias, post->attr, scalars(g, post->scalars), post->algorithm}, n->outs[0]);
    r.replace(n->out(), fused->out());
    r.replace(u->out(), reshape ? reshape->out() : fused->out());
    for (Node* of : {fused, reshape})
      if (of) originals.replaced(of->out(), u->out());  // perhaps in other sizes
    return;
  }
  Node* fused = r.insert(n, "mkldnn::_linear_pointwise", {f.p.a, w, bias, std::string("none"), scalars(g, {}), std::string()}, n->outs[0]);
  originals.replaced(fused->out(), n->out());
  r.replace(n->out(), fused->out());
}

}  // namespace

bool fuse_linear(Graph& g, const Options& options, PassState& state) {
  const auto [library, own, own_small] = choose_library(options);
  if (library == Library::Aten && !own) return false;
  const Uses uses = users(g);
  std::vector<Found> found;
  for (Node* n : g.nodes()) {
    auto p = match_product(*n);
    if (!p) continue;
    const double work = hint_of(p->a.type().sizes[0]) * hint_of(p->a.type().sizes[1]) * hint_of(p->b.type().sizes[1]);
    if (work >= kMinWork || (own_small && by_changing_weight(g, state, *p))) found.push_back({n, *p, work});
  }
  // Packed copies where a byte of them saves most. MKL packs for one number of rows.
  std::vector<Found*> wanted;
  for (Found& f : found)
    if (library != Library::Aten && f.work >= kMinWork && state.is_frozen(f.p.b) && (library != Library::Mkl || f.p.a.type().sizes[0].is_const()))
      wanted.push_back(&f);
  std::stable_sort(wanted.begin(), wanted.end(),
                   [](Found* x, Found* y) { return hint_of(x->p.a.type().sizes[0]) > hint_of(y->p.a.type().sizes[0]); });
  for (Found* f : wanted) {
    const int64_t bytes = f->p.b.type().numel().value() * 4;
    if (state.packed_bytes + bytes > most_packed(options, state, PackedFor::Product)) continue;
    state.packed_bytes += bytes;
    f->packed = true;
  }
  if (found.empty()) return false;
  state.fuses(g);
  Rewriter rewriter(g);
  for (const Found& f : found) {
    if (library == Library::OneDnn && f.work >= kMinWork && (f.packed || suits_onednn(f.p)))
      use_onednn(g, rewriter, f, uses, *state.originals);
    else if (f.packed)
      use_mkl(rewriter, f, *state.originals);
    else if (f.work < kMinWork || (own && suits_own(f.p))) {
      Node* fused = rewriter.insert(f.node, "vitrify::product", {f.p.a, f.p.b, f.p.bias ? ir::Arg(f.p.bias) : ir::Arg(ir::None{})}, f.node->outs[0]);
      state.originals->replaced(fused->out(), f.node->out());
      rewriter.replace(f.node->out(), fused->out());
    }
  }
  return rewriter.finish();
}

}  // namespace vitrify
