// A tensor that is not held. Eager's nodes hold what they have saved, and read it as it is by then; of ours, one may be behind the tensor itself.
#pragma once
#include <ATen/ATen.h>

#include <memory>

namespace vitrify {

class Followed {
 public:
  explicit Followed(const at::Tensor&);
  // The tensor. When nobody has it any more: what it was at last, if it had been given other memory by then, else undefined.
  at::Tensor now() const;
  at::Tensor elsewhere() const;  // the same, where it does not lie any more as it did; else undefined

  struct End;

 private:
  std::shared_ptr<End> end_;
};

}  // namespace vitrify
