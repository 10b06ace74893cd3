// A convolutional network learns digits drawn here (no download): eager, compiled with one line, and with the whole step compiled. No Python in the
// process.
#include "train.h"

using namespace torch;

struct CnnImpl : nn::Module {
  nn::Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  nn::BatchNorm2d bn1{nullptr}, bn2{nullptr}, bn3{nullptr};
  nn::Linear fc{nullptr};
  CnnImpl()
      : conv1(register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 32, 3).padding(1).bias(false)))),
        conv2(register_module("conv2", nn::Conv2d(nn::Conv2dOptions(32, 64, 3).padding(1).bias(false)))),
        conv3(register_module("conv3", nn::Conv2d(nn::Conv2dOptions(64, 64, 3).padding(1).bias(false)))),
        bn1(register_module("bn1", nn::BatchNorm2d(32))),
        bn2(register_module("bn2", nn::BatchNorm2d(64))),
        bn3(register_module("bn3", nn::BatchNorm2d(64))),
        fc(register_module("fc", nn::Linear(64, 10))) {}
  Tensor forward(Tensor x) {
    x = max_pool2d(relu(bn1(conv1(x))), 2);
    x = max_pool2d(relu(bn2(conv2(x))), 2);
    x = relu(bn3(conv3(x)));
    return fc(x.mean({2, 3}));
  }
};
TORCH_MODULE(Cnn);

// Seven segments, shifted and noisy: digit `y` of each row, 16 by 16.
std::pair<Tensor, Tensor> digits(int step) {
  static const int segments[10] = {0b1110111, 0b0100100, 0b1011101, 0b1101101, 0b0101110, 0b1101011, 0b1111011, 0b0100101, 0b1111111, 0b1101111};
  manual_seed(1000 + step);
  const int64_t n = 64;
  Tensor y = torch::randint(10, {n}), x = torch::randn({n, 1, 16, 16}) * 0.3, shift = torch::randint(5, {n, 2});
  auto at = x.accessor<float, 4>();
  for (int64_t i = 0; i < n; ++i) {
    const int bits = segments[y[i].item<int64_t>()];
    const int64_t r = shift[i][0].item<int64_t>(), c = shift[i][1].item<int64_t>();
    auto draw = [&](int bit, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
      if (bits >> bit & 1)
        for (int64_t a = r0; a <= r1; ++a)
          for (int64_t b = c0; b <= c1; ++b) at[i][0][r + a][c + b] += 1;
    };
    draw(0, 1, 1, 2, 6), draw(3, 6, 6, 2, 6), draw(6, 11, 11, 2, 6);
    draw(1, 1, 6, 2, 2), draw(2, 1, 6, 6, 6), draw(4, 6, 11, 2, 2), draw(5, 6, 11, 6, 6);
  }
  return {x, y};
}

int main() {
  Cnn net = same_start<Cnn>(), twin = same_start<Cnn>(), third = same_start<Cnn>();
  const optim::AdamWOptions options(1e-3);
  optim::AdamW plain(net->parameters(), options), half(twin->parameters(), options), whole(third->parameters(), options);
  const Curve eager = train(step_of(plain, [&](Tensor x) { return net->forward(x); }), digits, 60);

  auto fast = vitrify::compile(twin);  // forward and backward
  const int first = report("CNN", eager, train(step_of(half, [&](Tensor x) { return fast(x); }), digits, 60), 2e-2);

  auto step = vitrify::compile_step(third, whole, loss_of);  // forward, loss, backward and update
  return first + report("CNN step", eager, train([&](Tensor x, Tensor y) { return step(x, y); }, digits, 60), 2e-2);
}
