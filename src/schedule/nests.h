// Loop nests and their buffers: what the makers of ops::Lowering give. lower_graph.h runs the rules of a graph's nodes over them.
#pragma once
#include <deque>
#include <utility>

#include "ops/lowering.h"
#include "schedule/loop_vars.h"
#include "schedule/lower_graph.h"

namespace vitrify::schedule {

using namespace ops;

class Nests : public Lowering {
 public:
  Tensor map(DType dtype, Dims sizes, Elem f, int cost = 1, int reads = 1) override;
  Tensor realize(const Tensor& t) override;
  Tensor realize_as(const Tensor& t, const Dims& strides) override;
  std::vector<Tensor> reduce(loop::AccumKind kind, const Tensor& x0, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                             const std::function<Val(Val)>& f) override;
  Tensor sum_of_products(const Tensor& a, const Tensor& b, std::span<const int64_t> dims, DType type) override;
  Tensor scatter(const Tensor& init, Dims space, bool accumulate, const std::function<Write(Body&, const Index&)>& f) override;
  Tensor concat(const std::vector<Tensor>& parts, int64_t dim) override;

 protected:
  struct Lazy {
    Elem f;
    std::optional<Tensor> realized;
    Dims strides;   // wanted when realised
    int steps = 0;  // ops it has gone through since somebody looked at its indices
  };

  // How much an expression costs for each element.
  struct Price {
    int ops = 0, reads = 0;
    bool heavy = false;
    int divisions = 0;    // and other index arithmetic beside sums and products, each once
    uint32_t weight = 0;  // of the largest index
    int depth = 0;        // of the maps it is made of
  };

  Nests(std::shared_ptr<sym::Context> ctx, const LowerOptions& o) : options_(o), vars_(ctx) {
    ctx_ = std::move(ctx);
    program_.ctx = ctx_;
  }

  uint32_t new_buffer(DType dtype, const Dims& sizes, const Dims& strides);
  Tensor buffer_tensor(uint32_t buf);
  // A nest over the dims of `sizes` in the given order (outermost first); dims of size 1 get no loop.
  LoopNode nest(const Dims& sizes, const std::vector<size_t>& order);
  Index index_of(const LoopNode& n, const Dims& sizes);
  static std::vector<size_t> memory_order(const Dims& sizes, const Dims& strides);
  void write_map(const Tensor& from, const Tensor& to);
  void push(LoopNode n);
  // One element of t, in a body of its own: dim d of its index is probe_[d].
  Body probe(const Tensor& t);
  // The same with the loops of a nest, whose extents are known.
  Body probe_in_nest(const Tensor& t);
  static void price_indices(const Body&, Price&);
  // Dense strides in the order of what t is made of: nests that read both walk them alike, and fuse.
  Dims natural_strides(const Tensor& t);
  Price price(const Tensor& t);
  bool should_split(const Tensor& x, std::span<const int64_t> dims);
  // How many parts so many elements are reduced in, and how many whole elements each of them has.
  static std::pair<int64_t, int64_t> parts_of(int64_t elements);
  // x with its reduced dims as two, [kept..., part, within], from element `first` of them on; those past the end read as the accumulator's neutral
  // value.
  Tensor in_parts(const Tensor& x, std::span<const int64_t> dims, int64_t first, int64_t parts, int64_t chunk, loop::AccumKind kind, DType acc,
                  const std::function<Val(Val)>& f);
  Tensor keep_dims(Tensor t, std::span<const int64_t> dims);
  std::pair<Tensor, Tensor> joined_moments(loop::AccumKind kind, const Tensor& x, std::span<const int64_t> dims, DType acc,
                                           const std::function<Val(Val)>& f);
  std::vector<Tensor> split_moments(loop::AccumKind kind, const Tensor& x, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                                    const std::function<Val(Val)>& f);
  // `factor`: of sum_of_products.
  std::vector<Tensor> reduce_nest(loop::AccumKind kind, const Tensor& x0, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                                  const std::function<Val(Val)>& f, const Tensor* factor = nullptr);
  // Non-overlapping and dense, provably: some order of the dims makes it contiguous.
  static bool is_dense(const ir::TensorType& t);

  LowerOptions options_;
  LoopVars vars_;
  LoopProgram program_;
  std::deque<Lazy> lazies_;
  std::unordered_map<Int, size_t> loop_dim_;
  std::vector<Int> probe_;
  int depth_ = 0, deepest_ = 0;        // maps whose element is being made
  Dims concat_strides_;                // of the result that is lowered
  const ir::Node* current_ = nullptr;  // that is lowered
};

}  // namespace vitrify::schedule
