// Placeholder tensors. A fake has a real tensor's metadata and dispatch keys and no data; what it stands for is a value of the graph, reached through
// the state of its storage and the view ops that lead from there to it (functionalize.h).
#pragma once
#include "ir/graph.h"
#include "torch/compat.h"
#include "torch/program.h"

namespace vitrify::capture {

struct OpInfo;

// All results of one call of a multi-result view.
struct ViewCallResults {
  std::vector<ir::TensorType> types;
  uint64_t call = 0;         // of the capture, from 1
  ir::Node* made = nullptr;  // gives them at `generation` of the storage
  uint64_t generation = 0;
};
// One step of a view path: `op` applied to its parent. Args are those after `self`.
struct ViewStep {
  const OpInfo* op = nullptr;
  std::vector<c10::IValue> args;
  int32_t result = -1;  // which result of a multi-result view
  std::shared_ptr<ViewCallResults> results;
};

// Memory that one or more fakes look at.
struct StorageState {
  uint64_t trace = 0;  // the capture it belongs to
  std::shared_ptr<sym::Context> ctx;
  c10::Storage storage;  // shared by its fakes, so that eager's aliasing checks agree
  ir::Value base;        // current contents, in the root's geometry
  ir::TensorType type;   // the root's geometry
  int64_t offset = 0;
  uint64_t generation = 0;           // writes so far
  int32_t input = -1;                // graph input whose memory this is
  int32_t shared_with = -1;          // another input that shares memory with it
  bool resized = false;              // an input's, which the program has given another size
  bool has_views = false;            // made where gradients are followed
  bool shrunk = false;               // eager's memory holds more than the value does
  bool in_part = false;              // and begins elsewhere, as an operand's did
  std::optional<c10::Scalar> known;  // value of a 0-d constant, while never written
  bool zeros = false;                // eager's zeros without memory: what they are multiplied with does not matter, inf and NaN included
};

// The backward under way on this thread, from 1; 0: none.
class InRound {
 public:
  explicit InRound(uint32_t round) : before_(std::exchange(now_, round)) {}
  ~InRound() { now_ = before_; }
  InRound(const InRound&) = delete;
  static uint32_t now() { return now_; }

 private:
  static inline thread_local uint32_t now_ = 0;
  uint32_t before_;
};

// A node of the tree of views of one storage; the root has no parent.
struct View {
  std::shared_ptr<StorageState> storage;
  std::shared_ptr<View> parent;
  ViewStep step;
  ir::TensorType type;
  int64_t offset = 0;  // storage offset in elements
  ir::Value cached;    // the value at `generation` of the storage
  uint64_t generation = 0;
  const OpInfo* in_place = nullptr;  // made by this op (t_(), unsqueeze_()): the same object as its parent
  bool own_versions = false;         // .data: writes to it count for nothing else
  ViewMode mode = view_mode();
  const OpInfo* apart = nullptr;    // made by this op, which autograd takes for no view: nor are writes to this writes to its parent's history
  uint32_t round = InRound::now();  // the backward that has made it
};

class FakeImpl final : public c10::TensorImpl {
 public:
  FakeImpl(std::shared_ptr<View> view, c10::DispatchKeySet keys, caffe2::TypeMeta dtype);
  void set_geometry();       // copies sizes, strides and offset from the view
  at::Tensor meta();         // a meta tensor with the same metadata, symbols at their hints
  at::Tensor zeros() const;  // a tensor as it lies, with its bits
  c10::IntArrayRef hint_sizes() const { return now().sizes_default(); }
  c10::IntArrayRef hint_strides() const { return now().strides_default(); }
  void specialize() const;         // guards every symbol of the metadata
  void specialize_offset() const;  // guards every symbol that says where in its memory it begins

  // Only called while some size or stride is symbolic, or the offset may follow from one; the base class holds the hints.
  c10::IntArrayRef sizes_custom() const override;
  c10::IntArrayRef strides_custom() const override;
  int64_t size_custom(int64_t d) const override;
  int64_t numel_custom() const override;
  c10::SymIntArrayRef sym_sizes_custom() const override;
  c10::SymIntArrayRef sym_strides_custom() const override { return sym_strides_; }
  c10::SymInt sym_size_custom(int64_t d) const override;
  c10::SymInt sym_numel_custom() const override;
  int64_t storage_offset_custom() const override;
  c10::SymInt sym_storage_offset_custom() const override;
  c10::SymBool sym_is_contiguous_custom(at::MemoryFormat) const override;
  c10::SymBool sym_is_non_overlapping_and_dense_custom() const override { return now().is_non_overlapping_and_dense_default(); }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion&, bool allow_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&&, bool allow_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>&) override;

  std::shared_ptr<View> view;

 private:
  std::optional<sym::Int> place() const;  // where in its memory it begins, where that follows from sizes
  void set_hints();
  const FakeImpl& now() const;  // the same, with hints as they are
  uint64_t hinted_ = 0;
  at::Tensor meta_;
  c10::SymDimVector sym_sizes_, sym_strides_;
};

FakeImpl* as_fake(const at::Tensor&);  // null for real and undefined tensors
FakeImpl* as_fake(const c10::TensorImpl*);
bool is_whole(const View&);                 // shows all memory of its storage, from where that begins
bool reads_placeholder(const c10::Error&);  // raised where the data of a fake's storage was asked for
c10::Storage make_storage(c10::Device, const ir::TensorType&, int64_t offset);
at::Tensor make_fake(std::shared_ptr<View>, c10::DispatchKeySet keys);

}  // namespace vitrify::capture
