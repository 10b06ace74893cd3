// View ops of a program, run for real around its compiled part.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "torch/compat.h"
#include "torch/convert.h"
#include "torch/program.h"

namespace vitrify {

// One view op, resolved once.
class ViewCall {
 public:
  explicit ViewCall(const ResultSpec::ViewOp&);
  at::Tensor operator()(const at::Tensor& self) const;
  std::vector<at::Tensor> all(const at::Tensor& self) const;
  size_t result() const { return result_ < 0 ? 0 : static_cast<size_t>(result_); }
  uint64_t call() const { return call_; }

 private:
  c10::OperatorHandle op_;
  std::vector<c10::IValue> args_;
  int32_t result_;
  uint64_t call_;
  bool own_versions_;
  std::optional<ViewMode> mode_;
  int8_t creation_;
};
using ViewPath = std::vector<ViewCall>;
ViewPath resolve(const std::vector<ResultSpec::ViewOp>&);
at::Tensor follow(const ViewPath&, at::Tensor);

// An input gets what the program has written to it, one of its graph's `outputs`: its memory, unless that is there already, and its version. `path`:
// the mutation's, resolved. Below autograd.
void write_back(const Mutation&, const ViewPath& path, const at::Tensor& input, const std::vector<at::Tensor>& outputs, bool memory = true);
void count_writes(const Mutation&, const at::Tensor& input, int64_t counted = 0);

// Makes what a program returns from the outputs of its graph and from its inputs.
class ResultMaker {
 public:
  explicit ResultMaker(const std::vector<ResultSpec>&);
  // In the mode of the call: views are made in it, unless the program made them in another.
  // turn: those of that ResultSpec::turn, which are not made again. unseen: nobody sees of what they are views, and memory at which one looks alone
  // is taken as it is.
  void make(const std::vector<at::Tensor>& outputs, const std::vector<const at::Tensor*>& inputs, std::vector<at::Tensor>& results,
            std::optional<uint32_t> turn = {}, bool unseen = false) const;

 private:
  // What a path makes of an output that lies as `of`.
  struct Laid {
    struct Layout {
      std::vector<int64_t> sizes, strides;
      int64_t offset = 0;
      bool operator==(const Layout&) const = default;
      bool is_of(const at::Tensor&) const;
    } of, to;
  };
  std::shared_ptr<const Laid> laid_of(size_t result, const at::Tensor& output) const;
  at::Tensor memory_of(size_t result, const at::Tensor& output) const;
  void keep_calls();
  void find_alone();
  at::Tensor view(size_t result, at::Tensor of, std::vector<std::vector<at::Tensor>>& calls) const;

  std::vector<ResultSpec> specs_;
  std::vector<ViewPath> paths_;
  std::vector<uint32_t> order_;  // in which they are made: each after what it is a view of
  // Results that the program took from one call (split, unbind) are taken from one: there may be many, and gradients meet there. By result and step
  // of its path: where the results of that call are kept meanwhile, or -1.
  std::vector<std::vector<int32_t>> kept_;
  size_t kept_calls_ = 0;
  std::vector<char> alone_;  // by result: a view of an output that no other is made of
  struct Memo {
    std::mutex mutex;
    std::vector<std::shared_ptr<const Laid>> laid;  // by result, as it was last
  };
  std::shared_ptr<Memo> memo_;
};

}  // namespace vitrify
