// A backward under transforms of torch.func: to each it is one op with a rule, as ATen's ops have one for each, the innermost transform first. What
// the rules leave are tensors for which a plan runs as it does without transforms.
#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace vitrify {

bool any_transform();  // on this thread

// While it lives, no transform is active on this thread, or all but the innermost.
class WithoutTransforms {
 public:
  explicit WithoutTransforms(bool all = true);
  ~WithoutTransforms();
  WithoutTransforms(const WithoutTransforms&) = delete;
  WithoutTransforms& operator=(const WithoutTransforms&) = delete;

 private:
  struct Before;
  std::unique_ptr<Before> before_;
};

struct TransformedOp {
  std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)> run;  // of tensors of no transform, with none active
  bool repeats = true;                                                  // to run several times for one does nothing else
  bool linear = true;                                                   // in what it is given, all together
};
// None: a transform has no rule for such an op.
std::optional<std::vector<at::Tensor>> under_transforms(const TransformedOp&, std::vector<at::Tensor> given);

}  // namespace vitrify
