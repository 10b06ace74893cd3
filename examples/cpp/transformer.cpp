// A GPT-like transformer written with the LibTorch C++ API, compiled with one line. No Python in the process.
#include "compare.h"

using namespace torch;

struct BlockImpl : nn::Module {
  int64_t heads;
  nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  nn::Linear qkv{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};
  BlockImpl(int64_t dim, int64_t h)
      : heads(h),
        ln1(register_module("ln1", nn::LayerNorm(nn::LayerNormOptions({dim})))),
        ln2(register_module("ln2", nn::LayerNorm(nn::LayerNormOptions({dim})))),
        qkv(register_module("qkv", nn::Linear(dim, 3 * dim))),
        proj(register_module("proj", nn::Linear(dim, dim))),
        up(register_module("up", nn::Linear(dim, 4 * dim))),
        down(register_module("down", nn::Linear(4 * dim, dim))) {}
  Tensor forward(Tensor x) {
    const int64_t b = x.size(0), s = x.size(1), d = x.size(2);
    auto parts = qkv(ln1(x)).view({b, s, 3, heads, d / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    Tensor a = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + proj(a.transpose(1, 2).reshape({b, s, d}));
    return x + down(gelu(up(ln2(x)), "tanh"));
  }
};
TORCH_MODULE(Block);

struct TransformerImpl : nn::Module {
  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::Sequential blocks{nullptr};
  nn::LayerNorm ln{nullptr};
  nn::Linear head{nullptr};
  TransformerImpl(int64_t vocab, int64_t length, int64_t dim, int64_t heads, int64_t layers)
      : tokens(register_module("tokens", nn::Embedding(vocab, dim))),
        positions(register_module("positions", nn::Embedding(length, dim))),
        blocks(register_module("blocks", nn::Sequential())),
        ln(register_module("ln", nn::LayerNorm(nn::LayerNormOptions({dim})))),
        head(register_module("head", nn::Linear(nn::LinearOptions(dim, vocab).bias(false)))) {
    for (int64_t i = 0; i < layers; ++i) blocks->push_back(Block(dim, heads));
  }
  Tensor forward(Tensor ids) {
    Tensor x = tokens(ids) + positions(torch::arange(ids.size(1)));
    return head(ln(blocks->forward(x)));
  }
};
TORCH_MODULE(Transformer);

static Transformer make() {
  manual_seed(0);
  Transformer t(8000, 128, 384, 6, 6);
  t->eval();
  return t;
}

int main() {
  NoGradGuard no_grad;
  Transformer net = make(), wide = make();
  wide->to(kFloat64);
  Tensor ids = torch::randint(0, 8000, {2, 128});

  auto fast = vitrify::compile(net);

  return compare("transformer", [&] { return net->forward(ids); }, [&] { return fast(ids); }, [&] { return wide->forward(ids); });
}
