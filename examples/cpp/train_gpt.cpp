// A small GPT learns to copy: eager, compiled with one line, and with the whole step compiled. No Python in the process.
#include "train.h"

using namespace torch;

constexpr int64_t kWidth = 128, kHeads = 4, kLength = 32, kVocabulary = 64;

struct BlockImpl : nn::Module {
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  BlockImpl()
      : norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        qkv(register_module("qkv", nn::Linear(kWidth, 3 * kWidth))),
        out(register_module("out", nn::Linear(kWidth, kWidth))),
        up(register_module("up", nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", nn::Linear(4 * kWidth, kWidth))) {}
  Tensor forward(Tensor x) {
    const int64_t n = x.size(0), t = x.size(1);
    auto parts = qkv(norm1(x)).view({n, t, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4}).unbind(0);
    Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + out(y.transpose(1, 2).reshape({n, t, kWidth}));
    return x + down(gelu(up(norm2(x))));
  }
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  nn::Embedding token{nullptr}, place{nullptr};
  nn::ModuleList blocks{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
  GptImpl()
      : token(register_module("token", nn::Embedding(kVocabulary, kWidth))),
        place(register_module("place", nn::Embedding(kLength, kWidth))),
        blocks(register_module("blocks", nn::ModuleList())),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        head(register_module("head", nn::Linear(nn::LinearOptions(kWidth, kVocabulary).bias(false)))) {
    for (int i = 0; i < 4; ++i) blocks->push_back(Block());
  }
  Tensor forward(Tensor ids) {
    Tensor x = token(ids) + place(torch::arange(ids.size(1)));
    for (auto& b : *blocks) x = b->as<Block>()->forward(x);
    return head(norm(x)).view({-1, kVocabulary});
  }
};
TORCH_MODULE(Gpt);

// The second half of a sequence repeats the first.
std::pair<Tensor, Tensor> sequences(int step) {
  manual_seed(2000 + step);
  Tensor half = torch::randint(kVocabulary, {16, kLength / 2 + 1});
  Tensor ids = cat({half, half}, 1).slice(1, 0, kLength + 1);
  return {ids.slice(1, 0, kLength).contiguous(), ids.slice(1, 1).reshape({-1})};
}

int main() {
  Gpt net = same_start<Gpt>(), twin = same_start<Gpt>(), third = same_start<Gpt>();
  const optim::AdamWOptions options(1e-3);
  optim::AdamW plain(net->parameters(), options), half(twin->parameters(), options), whole(third->parameters(), options);
  const Curve eager = train(step_of(plain, [&](Tensor x) { return net->forward(x); }), sequences, 200);

  auto fast = vitrify::compile(twin);  // forward and backward
  const int first = report("GPT", eager, train(step_of(half, [&](Tensor x) { return fast(x); }), sequences, 200), 2e-2);

  auto step = vitrify::compile_step(third, whole, loss_of);  // forward, loss, backward and update
  return first + report("GPT step", eager, train([&](Tensor x, Tensor y) { return step(x, y); }, sequences, 200), 2e-2);
}
