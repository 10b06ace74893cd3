// convolution -> batch norm with fixed statistics becomes a convolution with other weights. The new weights are ordinary nodes on the old ones.
#include "ops/shapes.h"
#include "torch/passes/match.h"
#include "torch/passes/passes.h"

namespace vitrify {

using namespace match;

namespace {

struct Norm {
  Value input, weight, bias, mean, var;
  double eps;
};

std::optional<Norm> fixed_norm(const Node& n) {
  size_t eps = 0;
  if (is(n, "aten::_native_batch_norm_legit_no_training")) eps = 6;
  if ((is(n, "aten::native_batch_norm") || is(n, "aten::_native_batch_norm_legit") || is(n, "aten::cudnn_batch_norm")) && !flag(n, 5)) eps = 7;
  if (!eps || !number(n, eps)) return {};
  Norm m{tensor(n, 0), tensor(n, 1), tensor(n, 2), tensor(n, 3), tensor(n, 4), *number(n, eps)};
  if (!m.input || !m.mean || !m.var) return {};
  return m;
}

}  // namespace

bool fold_batch_norm(Graph& g, const Options& options, PassState& state) {
  const std::vector<Node*> nodes = g.nodes();
  if (std::ranges::none_of(nodes, [](const Node* n) { return fixed_norm(*n).has_value(); })) return false;
  const Uses uses = users(g);
  const auto counts = ir::count_uses(g);
  bool changed = false;
  for (Node* n : nodes) {
    auto norm = fixed_norm(*n);
    if (!norm) continue;
    Node* conv = norm->input.node;
    if (!is(*conv, "aten::convolution") || flag(*conv, 6) || sole_user(uses, conv) != n) continue;
    if (!has_packed_weights(g, options, state, conv)) continue;  // its folded weights would be made again on every call
    // the saved statistics are for a backward pass
    const auto& used = counts.at(n);
    if (std::any_of(used.begin() + 1, used.end(), [](uint32_t c) { return c != 0; })) continue;
    const Value w = tensor(*conv, 1), b = tensor(*conv, 2);
    auto ok = [&](Value v) { return !v || (state.is_frozen(v) && is_f32_cpu(v.type())); };
    if (!ok(w) || !ok(b) || !ok(norm->weight) || !ok(norm->bias) || !ok(norm->mean) || !ok(norm->var) || !is_f32_cpu(n->outs[0])) continue;

    state.fuses(g);
    const ir::TensorType row = dense(DType::F32, norm->mean.type().sizes);
    auto one = [&](const char* op, Value a) { return insert(g, n, op, {a}, row)->out(); };
    auto two = [&](const char* op, Value a, Value c) {
      const bool product = std::string_view(op) == "aten::mul.Tensor";
      return insert(g, n, op, product ? std::vector<ir::Arg>{a, c} : std::vector<ir::Arg>{a, c, sym::Int(1)}, row)->out();
    };
    Value scale = one("aten::rsqrt", insert(g, n, "aten::add.Scalar", {norm->var, norm->eps, sym::Int(1)}, row)->out());
    if (norm->weight) scale = two("aten::mul.Tensor", scale, norm->weight);
    ir::Dims column{row.sizes[0]};
    for (size_t d = 1; d < w.type().dim(); ++d) column.push_back(1);
    const Value wide =
        insert(g, n, "aten::view", {scale, std::vector<sym::Int>(column.begin(), column.end())}, dense(DType::F32, column), ir::kView)->out();
    const ir::TensorType product = ops::is_dense(g.ctx(), w.type()) ? w.type() : dense(DType::F32, w.type().sizes);  // the weight may be expanded
    const Value weight = insert(g, n, "aten::mul.Tensor", {w, wide}, product)->out();
    Value bias = b ? two("aten::sub.Tensor", b, norm->mean) : one("aten::neg", norm->mean);
    bias = two("aten::mul.Tensor", bias, scale);
    if (norm->bias) bias = two("aten::add.Tensor", bias, norm->bias);

    std::vector<ir::Arg> args = conv->args;
    args[1] = weight;
    args[2] = bias;
    const Value folded = insert(g, n, "aten::convolution", std::move(args), n->outs[0])->out();
    state.originals->replaced(folded, n->out());
    g.replace_uses(n->out(), folded);
    changed = true;
  }
  if (changed) g.remove_dead();
  return changed;
}

}  // namespace vitrify
