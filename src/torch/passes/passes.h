// Graph passes that need ATen, in the order they run.
#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "ir/graph.h"
#include "pipeline/pipeline.h"
#include "torch/originals.h"
#include "torch/watch.h"

namespace vitrify {

// A part of a graph that depends on captured tensors (or key arguments) only: run once and kept until one of them changes.
struct FrozenGroup {
  std::shared_ptr<ir::Graph> graph;
  std::vector<uint32_t> sources;  // its inputs, as inputs of the main graph
  std::vector<uint32_t> results;  // its outputs: the main graph inputs that hold them
};

// What the passes of one compile share.
struct PassState {
  uint32_t num_args = 0;
  const std::vector<at::Tensor>* captured = nullptr;  // graph inputs from num_args on
  std::vector<char> written;                          // graph inputs the program writes: never frozen
  std::vector<FrozenGroup> groups;
  int64_t packed_bytes = 0;                                        // memory given to packed copies of weights so far
  std::optional<std::unordered_set<const ir::Node*>> plain_convs;  // convolutions that no memory is left for: see has_packed_weights
  std::shared_ptr<Originals> originals;                            // null: nothing is fused

  // True when v follows from captured tensors the program does not write, through pure ops of constant shape.
  bool is_frozen(ir::Value) const;
  // To be called by a pass that puts library calls in the place of ops, before it changes anything.
  void fuses(const ir::Graph& g) {
    if (!originals) originals = std::make_shared<Originals>(g);
  }
};

std::vector<pipeline::Stage> torch_stages(std::shared_ptr<PassState>);

// Bytes that copies of weights may take in all before another is made, which keeps a call's peak within a tenth of eager's. Plain convolutions write
// their weights anew on every call, so theirs may fill packed_weight_mb; plain products read weights where they lie: their copies leave three eighths
// of it, and may take more of a large model (a process of it is large too).
enum class PackedFor : uint8_t { Convolution, Product, Any };
int64_t most_packed(const Options&, const PassState&, PackedFor);

// May this convolution have weights of its own (folded, packed)? Decided once for all of a graph, within most_packed().
bool has_packed_weights(ir::Graph&, const Options&, PassState&, const ir::Node* convolution);

bool fold_batch_norm(ir::Graph&, const Options&, PassState&);
bool fuse_conv(ir::Graph&, const Options&, PassState&);
bool fuse_linear(ir::Graph&, const Options&, PassState&);
bool small_matmul(ir::Graph&, const Options&, PassState&);
bool own_attention(ir::Graph&, const Options&, PassState&);
bool fuse_segments(ir::Graph&, const Options&, PassState&);
bool hoist_frozen(ir::Graph&, const Options&, PassState&);

// --- frozen values at run time

struct FrozenValues {
  std::vector<at::Tensor> values;
  std::vector<uint32_t> sources;
  std::vector<TensorKey> keys;
  bool valid(const at::Tensor* const* inputs) const {
    for (size_t i = 0; i < keys.size(); ++i)
      if (!keys[i].matches(*inputs[sources[i]])) return false;
    return true;
  }
};

class FrozenCache {
 public:
  explicit FrozenCache(FrozenGroup g) : group_(std::move(g)) {}
  const FrozenGroup& group() const { return group_; }
  // Values for these inputs (all of the call's), computed if need be. Any thread. `stale`: values known to be of other inputs, or null.
  std::shared_ptr<const FrozenValues> get(std::span<const at::Tensor* const> inputs, const FrozenValues* stale);

 private:
  FrozenGroup group_;
  std::mutex mutex_;
  std::shared_ptr<const FrozenValues> latest_;
};

}  // namespace vitrify
