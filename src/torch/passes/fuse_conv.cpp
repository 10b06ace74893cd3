// 2-d convolutions through oneDNN with packed weights and post-ops, and channels-last values around them.
#include <cmath>

#include "ops/shapes.h"
#include "runtime/winograd.h"
#include "torch/passes/layout.h"
#include "torch/passes/match.h"
#include "torch/passes/passes.h"

namespace vitrify {

using namespace match;

namespace {

// oneDNN packs weights for the batch it is told; any batch works.
std::optional<std::vector<sym::Int>> ints(const Node& n, size_t i) {
  auto* v = std::get_if<std::vector<sym::Int>>(&n.args[i]);
  if (!v) return {};
  std::vector<sym::Int> out = *v;
  if (out.size() == 1) out.push_back(out[0]);
  for (auto x : out)
    if (!x.is_const()) return {};
  return out.size() == 2 ? std::optional(out) : std::nullopt;
}

struct Convolution {
  Node* node;
  Value x, w, b;
  std::vector<sym::Int> stride, padding, dilation;
  int64_t groups;
};

constexpr int64_t kLongChain = 4096;  // products that oneDNN adds one by one
constexpr int64_t kLongPatch = 512;

int64_t products(const Convolution& c) {
  const ir::Dims& w = c.w.type().sizes;
  return (w[1] * w[2] * w[3]).value();
}
// A second chain gives back the accuracy that one this long costs.
bool adds_in_chains(const Convolution& c) { return c.groups == 1 && c.w.type().sizes[1].value() % 2 == 0 && products(c) >= kLongChain; }
// A product of patches that do not overlap: what eager calls for it adds in several chains, and is as fast.
bool is_of_patches(const Convolution& c) {
  const ir::Dims& w = c.w.type().sizes;
  return c.groups == 1 && !w[2].is(1) && w[2] == c.stride[0] && w[3] == c.stride[1] && products(c) >= kLongPatch;
}

constexpr int64_t kLeastSquares = 16;  // of four results: fewer do not pay for transforming the weights in each call

bool multiplies_less(const Convolution& c, const Options& options) {
  const ir::Dims &w = c.w.type().sizes, &out = c.node->outs[0].sizes;
  auto all = [](const std::vector<sym::Int>& of, int64_t value) { return std::ranges::all_of(of, [&](sym::Int i) { return i.is(value); }); };
  return options.winograd && runtime::can_convolve() && c.groups == 1 && w[2].is(3) && w[3].is(3) && all(c.stride, 1) && all(c.padding, 1) &&
         all(c.dilation, 1) && w[0].value() % 16 == 0 && w[1].value() % 16 == 0 &&
         hint_of(out[0]) * std::ceil(hint_of(out[2]) / 2) * std::ceil(hint_of(out[3]) / 2) >= kLeastSquares;
}

std::optional<Convolution> match_conv(Graph& g, Node* n, const PassState& state) {
  if (!is(*n, "aten::convolution") || flag(*n, 6)) return {};
  Convolution c{n, tensor(*n, 0), tensor(*n, 1), tensor(*n, 2), {}, {}, {}, 1};
  if (c.x.type().dim() != 4 || !is_f32_cpu(c.x.type()) || !is_f32_cpu(c.w.type()) || !is_f32_cpu(n->outs[0])) return {};
  auto s = ints(*n, 3), p = ints(*n, 4), d = ints(*n, 5);
  auto groups = integer(*n, 8);
  if (!s || !p || !d || !groups) return {};
  for (size_t i = 1; i < 4; ++i)
    if (!c.x.type().sizes[i].is_const()) return {};
  for (size_t i = 0; i < 4; ++i)
    if (n->outs[0].sizes[i].is(0)) return {};
  if (adds_long_sums(c.w.type()) || !state.is_frozen(c.w) || (c.b && !state.is_frozen(c.b))) return {};
  c.stride = *s;
  c.padding = *p;
  c.dilation = *d;
  c.groups = *groups;
  if (is_of_patches(c)) return {};
  return c;
}

}  // namespace

bool has_packed_weights(Graph& g, const Options& options, PassState& state, const Node* convolution) {
  if (!state.plain_convs) {
    // A copy saves one reading of the weights a call, and where a norm is folded in, one of the result: most for a byte where the result is large.
    struct Wish {
      const Node* conv;
      int64_t bytes;
      double gain;
    };
    std::vector<Wish> wishes;
    for (Node* n : g.nodes())
      if (auto c = match_conv(g, n, state)) {
        const int64_t bytes = c->w.type().numel().value() * 4;
        wishes.push_back({n, bytes, static_cast<double>(hint_of(n->outs[0].numel())) * 4 / static_cast<double>(bytes)});
      }
    std::stable_sort(wishes.begin(), wishes.end(), [](const Wish& a, const Wish& b) { return a.gain > b.gain; });
    state.plain_convs.emplace();
    for (const Wish& w : wishes) {
      if (state.packed_bytes + w.bytes > most_packed(options, state, PackedFor::Convolution))
        state.plain_convs->insert(w.conv);
      else
        state.packed_bytes += w.bytes;
    }
  }
  return !state.plain_convs->contains(convolution);
}

bool fuse_conv(Graph& g, const Options& options, PassState& state) {
  const std::vector<Node*> nodes = g.nodes();
  if (!at::globalContext().userEnabledMkldnn() || std::ranges::none_of(nodes, [](const Node* n) { return is(*n, "aten::convolution"); }))
    return false;
  Uses uses = users(g);
  ChannelsLast values(g);
  ir::NodeMap<size_t> position(g);
  for (size_t i = 0; i < nodes.size(); ++i) position[nodes[i]] = i;
  bool changed = false;
  for (Node* n : nodes) {
    auto c = match_conv(g, n, state);
    if (!c) continue;
    state.fuses(g);
    Node* last = n;  // what the fused call replaces
    Value other;
    std::optional<PostOp> post;
    if (Node* u = sole_user(uses, n); u && u->outs.size() == 1 && u->outs[0].sizes == n->outs[0].sizes) {
      if (auto p = post_op(*u)) {
        post = p;
        last = u;
      } else if (is(*u, "aten::add.Tensor") && number(*u, 2) == 1.0 && tensor(*u, 0) && tensor(*u, 1) && !(tensor(*u, 0) == tensor(*u, 1))) {
        const Value o = tensor(*u, 0).node == n ? tensor(*u, 1) : tensor(*u, 0);
        if (o.type().sizes == n->outs[0].sizes && is_f32_cpu(o.type()) && !(is(*o.node, "aten::convolution") && position[o.node] > position[n])) {
          other = o;
          last = u;
          if (Node* r = sole_user(uses, u); r && is(*r, "aten::relu")) {
            post = post_op(*r);
            last = r;
          }
        }
      }
    }
    const bool sized = is_static(c->x.type().sizes);
    auto packed = [&](Value w) {
      std::vector<sym::Int> input_size(c->x.type().sizes.begin(), c->x.type().sizes.end());
      input_size[1] = w.type().sizes[1] * c->groups;
      ir::TensorType own = w.type();
      if (!ops::is_dense(g.ctx(), own)) own.strides = ir::contiguous_strides(own.sizes);  // it may be expanded
      return insert(g, last, "mkldnn::_reorder_convolution_weight",
                    {w, c->padding, c->stride, c->dilation, sym::Int(c->groups), sized ? ir::Arg(input_size) : ir::Arg(ir::None{})}, own)
          ->out();
    };
    const bool packs = has_packed_weights(g, options, state, n);
    const bool plain = packs && (!post || post->attr == "relu"), by_less = plain && multiplies_less(*c, options);
    const bool in_chains = plain && !by_less && adds_in_chains(*c);
    const Value w = packs && !in_chains && !by_less ? packed(c->w) : c->w;
    ir::TensorType type = last->outs[0];
    const bool is_output = values.is_output(last->out());
    if (!is_output) type.strides = ops::strides_for(ir::MemoryFormat::ChannelsLast, type.sizes);
    const ir::Arg bias = c->b ? ir::Arg(c->b) : ir::Arg(ir::None{});
    Node* fused;
    if (by_less) {
      ir::TensorType own = w.type();
      own.strides = ir::contiguous_strides(own.sizes);
      const Value weights = insert(g, last, "vitrify::winograd_reorder_weight", {w}, own)->out();
      fused = insert(g, last, "vitrify::winograd_convolution", {c->x, other ? ir::Arg(other) : ir::Arg(ir::None{}), weights, bias, post.has_value()},
                     type);
    } else if (in_chains) {
      std::vector<Value> weights;
      ir::TensorType half = w.type();
      half.sizes[1] = c->w.type().sizes[1].value() / 2;
      half.strides = ir::contiguous_strides(half.sizes);
      for (int64_t k : {0, 1})
        weights.push_back(packed(insert(g, last, "aten::narrow_copy", {c->w, sym::Int(1), half.sizes[1] * k, half.sizes[1]}, half)->out()));
      fused = insert(g, last, "vitrify::convolution_in_chains",
                     {c->x, other ? ir::Arg(other) : ir::Arg(ir::None{}), weights, bias, c->padding, c->stride, c->dilation, post.has_value()}, type);
    } else if (other) {
      fused = insert(g, last, "mkldnn::_convolution_pointwise.binary",
                     {c->x, other, w, bias, c->padding, c->stride, c->dilation, sym::Int(c->groups), std::string("add"), ir::None{},
                      post ? ir::Arg(post->attr) : ir::Arg(ir::None{}), scalars(g, {}), ir::None{}},
                     type);
    } else {
      const PostOp p = post.value_or(PostOp{"none", "", {}});
      fused = insert(g, last, "mkldnn::_convolution_pointwise",
                     {c->x, w, bias, c->padding, c->stride, c->dilation, sym::Int(c->groups), p.attr, scalars(g, p.scalars), p.algorithm}, type);
    }
    if (!is_output) {
      values.add(fused->out());
      values.changed(fused->out(), last->outs[0]);
    }
    state.originals->replaced(fused->out(), last->out());
    g.replace_uses(last->out(), fused->out());
    position[fused] = position[last];
    uses = users(g);
    changed = true;
  }
  if (!changed) return false;
  g.remove_dead();
  for (Node* n : std::vector<Node*>(g.nodes())) {
    values.restore(g, *n, {});
    values.follow(*n);
  }
  return true;
}

}  // namespace vitrify
