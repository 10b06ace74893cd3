// ResNet-18 written with the LibTorch C++ API, compiled with one line. No Python in the process.
#include "compare.h"

using namespace torch;

struct BasicBlockImpl : nn::Module {
  nn::Conv2d conv1{nullptr}, conv2{nullptr};
  nn::BatchNorm2d bn1{nullptr}, bn2{nullptr};
  nn::Sequential down{nullptr};
  BasicBlockImpl(int64_t in, int64_t out, int64_t stride)
      : conv1(register_module("conv1", nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false)))),
        conv2(register_module("conv2", nn::Conv2d(nn::Conv2dOptions(out, out, 3).padding(1).bias(false)))),
        bn1(register_module("bn1", nn::BatchNorm2d(out))),
        bn2(register_module("bn2", nn::BatchNorm2d(out))) {
    if (stride != 1 || in != out)
      down = register_module("down", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)), nn::BatchNorm2d(out)));
  }
  Tensor forward(Tensor x) {
    Tensor y = relu(bn1(conv1(x)));
    y = bn2(conv2(y));
    return relu(y + (down ? down->forward(x) : x));
  }
};
TORCH_MODULE(BasicBlock);

struct ResNetImpl : nn::Module {
  nn::Conv2d conv1{nullptr};
  nn::BatchNorm2d bn1{nullptr};
  nn::Sequential layers{nullptr};
  nn::Linear fc{nullptr};
  ResNetImpl()
      : conv1(register_module("conv1", nn::Conv2d(nn::Conv2dOptions(3, 64, 7).stride(2).padding(3).bias(false)))),
        bn1(register_module("bn1", nn::BatchNorm2d(64))),
        layers(register_module("layers", nn::Sequential())),
        fc(register_module("fc", nn::Linear(512, 1000))) {
    int64_t in = 64;
    for (int64_t out : {64, 128, 256, 512})
      for (int i = 0; i < 2; ++i) {
        layers->push_back(BasicBlock(in, out, i == 0 && out != 64 ? 2 : 1));
        in = out;
      }
  }
  Tensor forward(Tensor x) {
    x = max_pool2d(relu(bn1(conv1(x))), 3, 2, 1);
    x = layers->forward(x);
    return fc(x.mean({2, 3}));
  }
};
TORCH_MODULE(ResNet);

int main() {
  manual_seed(0);
  NoGradGuard no_grad;
  ResNet net;
  net->eval();
  manual_seed(0);
  ResNet wide;  // the same weights in float64
  wide->eval();
  wide->to(kFloat64);
  Tensor x = torch::randn({4, 3, 224, 224});

  auto fast = vitrify::compile(net);

  return compare("resnet18", [&] { return net->forward(x); }, [&] { return fast(x); }, [&] { return wide->forward(x.to(kFloat64)); });
}
