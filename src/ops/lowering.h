// From graph ops to loops: what an op's lowering rule is written in.
//
// A rule gets lowered operands (Tensor: a function from an index to an element, maybe backed by a buffer), and returns lowered results. A Map costs
// nothing until somebody needs its memory; reductions, scatters and extern calls make buffers. The scheduler (src/schedule) fuses the loops made
// here.
#pragma once
#include <boost/container/small_vector.hpp>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "ir/graph.h"
#include "loop/loop.h"

namespace vitrify::ops {

using ir::Dims;
using sym::Int;
using Index = boost::container::small_vector<Int, 5>;

class Body;

// An SSA value under construction. Arithmetic on two Vals needs equal types (VT_CHECK); use cast().
struct Val {
  Body* body = nullptr;
  int32_t id = loop::kNoValue;
  DType type = DType::F32;  // compute type: never F16/BF16
  Val lit(double v) const;  // constant of this value's type
};

// A straight SSA body with value numbering and constant folding of trivial cases (x+0 of integers, x*1, cast to the same type, where(const)).
class Body {
 public:
  Val constant(DType compute_type, double v);
  Val constant_int(DType compute_type, int64_t v);
  Val index(Int e);  // i64
  Val load(uint32_t buffer, DType storage, Int at);
  Val load_masked(uint32_t buffer, DType storage, Int at, Val mask, Val other);
  Val load_bit(uint32_t buffer, Int at);                        // see loop::Op::load_bit
  Val op(loop::Op, DType type, Val a, Val b = {}, Val c = {});  // type as in loop::Instr
  Val check_index(Val i, Int bound, Val mask = {});             // i64; faults as eager raises IndexError
  Int indirect(Val i64_value, Int bound);                       // use a loaded value (already checked, non-negative, < bound) inside an index
  // As ATen indexes: negative values wrap once, out of range faults. Returns a symbol usable in an index.
  Int checked_index(Val i, Int bound);
  // While a mask is set, loads made through Tensor::at read 0 where it is false and never touch memory there (cat, pad, pooling).
  Val masked(Val mask, const std::function<Val()>& f, Val other);
  // What an expression gave last, if that was at this index and under the mask of now: it would give the same again, and those that read one
  // expression twice, one after the other, would be walked as a tree.
  std::optional<Val> given(int32_t expression, const Index&);
  void give(int32_t expression, const Index&, Val);
  // Nothing is added from here on: drops what only that needs.
  void close() {
    cse_ = {};
    def_ = {};
    given_ = {};
  }

  std::vector<loop::Instr> instrs;
  std::vector<std::pair<Int, int32_t>> indirects;
  int32_t num_values = 0;
  bool may_fault = false;
  std::shared_ptr<sym::Context> ctx;

 private:
  Val emit(loop::Instr, DType result_type);
  int32_t mask_ = loop::kNoValue;
  const loop::Instr* constant_of(Val) const;  // its defining instruction if it is a constant
  std::unordered_map<uint64_t, std::vector<size_t>> cse_;
  std::vector<size_t> def_;  // instruction that defines each value
  struct Given {
    Index at;
    int32_t mask = loop::kNoValue, id = loop::kNoValue;
    DType type = DType::F32;
  };
  std::unordered_map<int32_t, Given> given_;
};

Val operator+(Val, Val);
Val operator-(Val, Val);
Val operator*(Val, Val);
Val operator/(Val, Val);
Val operator-(Val);
Val operator<(Val, Val);
Val operator<=(Val, Val);
Val operator>(Val, Val);
Val operator>=(Val, Val);
Val eq(Val, Val);
Val ne(Val, Val);
Val operator&(Val, Val);
Val operator|(Val, Val);
Val operator!(Val);
inline Val operator+(Val a, double b) { return a + a.lit(b); }
inline Val operator-(Val a, double b) { return a - a.lit(b); }
inline Val operator*(Val a, double b) { return a * a.lit(b); }
inline Val operator/(Val a, double b) { return a / a.lit(b); }
inline Val operator+(double a, Val b) { return b.lit(a) + b; }
inline Val operator-(double a, Val b) { return b.lit(a) - b; }
inline Val operator*(double a, Val b) { return b.lit(a) * b; }
inline Val operator/(double a, Val b) { return b.lit(a) / b; }
Val unary(loop::Op, Val);
Val binary(loop::Op, Val, Val);
Val where(Val cond, Val a, Val b);
Val fma(Val a, Val b, Val c);       // a * b + c; of floats rounded once, as eager's kernels are where they write it in one expression
Val cast(Val, DType storage_type);  // to F16/BF16: rounds, stays f32
Val logical(Val);                   // x != 0, b8

using Elem = std::function<Val(Body&, const Index&)>;

// A lowered tensor. `at` gives the element at a logical index in compute_type(dtype).
struct Tensor {
  DType dtype = DType::F32;
  Dims sizes;
  Elem at;
  int32_t buffer = -1;  // >= 0: element index = offset + sum(index[d] * strides[d]) of that buffer, and `at` is exactly that load
  Dims strides;
  Int offset = 0;
  int32_t lazy = -1;  // identity of an un-materialised map, so that it is realised at most once
  int cost = 0;       // instructions per element of the un-materialised expression
  int reads = 1;      // loads per element
  explicit operator bool() const { return static_cast<bool>(at); }
};

enum class BufferRole : uint8_t { Input, Constant, Intermediate, Output };
enum class MadeBy : uint8_t {
  Kernel,
  Call,        // an extern call, which brings the memory
  PlacedCall,  // one that leaves its result in memory of the plan (runtime::writes_into_slot)
};
struct BufferInfo {
  DType dtype;
  Device device;
  Dims sizes, strides;  // as allocated; a fixed layout once `frozen`
  Int extent;           // elements
  BufferRole role = BufferRole::Intermediate;
  MadeBy made_by = MadeBy::Kernel;
};

// One loop nest before scheduling. Writes one or more buffers over `ranges`; reductions over `rranges` store their results after the inner loops.
struct LoopNode {
  std::vector<loop::Loop> ranges;
  std::vector<loop::Loop> rranges;  // empty: a map
  Body body;                        // loads, arithmetic; for maps also stores; for reductions `reduce` instructions
  std::vector<loop::Accum> accums;
  std::vector<loop::Instr> epilogue;    // after the reduction, per outer iteration: arithmetic on accumulator results and stores
  std::vector<uint32_t> writes, reads;  // buffer ids
  bool scatter = false;                 // stores at indirect places; may collide (store_add) or depends on a previous fill of the buffer
  const ir::Node* origin = nullptr;
};

// An extern call: the ATen op itself on materialised operands.
struct ExternNode {
  const ir::Node* node = nullptr;
  std::vector<Tensor> operands;   // one per tensor argument in for_each_input order; each backed by a buffer
  std::vector<uint32_t> results;  // buffer per result (only tensors that are used or must exist)
};

struct Item {
  std::optional<LoopNode> loop;
  std::optional<ExternNode> ext;
};

struct LoopProgram {
  std::vector<BufferInfo> buffers;
  std::vector<Item> items;                     // execution order
  std::vector<uint32_t> inputs;                // buffer per graph input
  std::vector<uint32_t> constants;             // buffer per graph constant
  std::vector<std::optional<Tensor>> outputs;  // buffer-backed (a view into an input is possible), in the strides the graph promises
  std::shared_ptr<sym::Context> ctx;
};

class Lowering {
 public:
  virtual ~Lowering() = default;
  sym::Context& ctx() { return *ctx_; }

  virtual Tensor get(const ir::Value&) = 0;  // operand as lowered so far
  virtual uint32_t uses(const ir::Value&) const = 0;

  // --- makers
  virtual Tensor map(DType, Dims sizes, Elem f, int cost = 1, int reads = 1) = 0;  // nothing is computed yet
  virtual Tensor realize(const Tensor&) = 0;                                       // the same elements in a buffer (itself if it has one)
  virtual Tensor realize_as(const Tensor&, const Dims& strides) = 0;               // in a fresh buffer of exactly these strides
  // Reduces x over `dims` (each kept as size 1 if keepdim). f maps each element before accumulation (identity if null). acc_type is a compute type.
  // Results: one tensor per num_results(kind), of dtype `out` (index results are I64).
  virtual std::vector<Tensor> reduce(loop::AccumKind, const Tensor& x, std::span<const int64_t> dims, bool keepdim, DType acc_type, DType out,
                                     const std::function<Val(Val)>& f = {}) = 0;
  // Sums of a * b over `dims`, each step rounded once, as libraries add up matrix products. (The product of a program that is summed is a number of
  // its own, and rounded.)
  virtual Tensor sum_of_products(const Tensor& a, const Tensor& b, std::span<const int64_t> dims, DType type) = 0;
  // A fresh buffer filled with `init`, then for every index of `space`, body(b, index) gives {target index, value}; stored or added there.
  struct Write {
    Index target;
    Val value;
    Val mask;
  };
  virtual Tensor scatter(const Tensor& init, Dims space, bool accumulate, const std::function<Write(Body&, const Index&)>& f) = 0;
  // Several producers write disjoint slices of one buffer along `dim`.
  virtual Tensor concat(const std::vector<Tensor>&, int64_t dim) = 0;

  // --- views of a lowered tensor (buffer-backed stays buffer-backed where strides can express it)
  Tensor view(const Tensor&, Dims sizes, const std::function<Index(const Index&)>& to_source);
  Tensor expand(const Tensor&, const Dims& sizes);
  Tensor permute(const Tensor&, std::span<const int64_t> perm);
  Tensor reshape(const Tensor&, const Dims& sizes);
  Tensor slice(const Tensor&, int64_t dim, Int start, Int length, Int step);
  Tensor select(const Tensor&, int64_t dim, Int index);
  Tensor unsqueeze(const Tensor&, int64_t dim);
  Tensor squeeze(const Tensor&, int64_t dim);  // a dim of size 1
  Tensor cast(const Tensor&, DType);           // value conversion (.to)
  Tensor full(DType, Dims sizes, double v);

 protected:
  std::shared_ptr<sym::Context> ctx_;
};

// The arguments of a node, with the checks and conversions rules need. Index i is the schema position.
struct Args {
  const ir::Node& n;
  Lowering& L;
  Tensor tensor(size_t i) const { return L.get(std::get<ir::Value>(n.args[i])); }
  bool none(size_t i) const { return std::holds_alternative<ir::None>(n.args[i]); }
  bool is_tensor(size_t i) const {
    auto* v = std::get_if<ir::Value>(&n.args[i]);
    return v && *v;
  }
  Int integer(size_t i) const { return std::get<Int>(n.args[i]); }
  int64_t constant_int(size_t i) const {
    Int v = integer(i);
    return v.is_const() ? v.value() : L.ctx().specialize(v);
  }
  bool boolean(size_t i) const { return std::get<bool>(n.args[i]); }
  // A Scalar argument (int, float or bool) as a double; nullopt for complex.
  std::optional<double> scalar(size_t i) const;
  std::vector<Int> ints(size_t i) const { return std::get<std::vector<Int>>(n.args[i]); }
  std::vector<int64_t> constant_ints(size_t i) const;
  int64_t dim(size_t i, size_t rank) const;                // wrapped
  std::vector<int64_t> dims(size_t i, size_t rank) const;  // empty or None: all
  const std::string& string(size_t i) const { return std::get<std::string>(n.args[i]); }
  const ir::TensorType& out(size_t i = 0) const { return n.outs[i]; }
};
int64_t wrap_dim(int64_t d, size_t rank);
// Meta kernels let some ops pass with a dim that the tensor does not have: the call is eager's to refuse.
struct NoSuchDim final : std::exception {
  const char* what() const noexcept override { return "an op has a dim that its tensor does not have"; }
};
int64_t checked_dim(int64_t d, size_t rank);

// Fills results (one per n.outs) and returns true, or returns false or throws NoSuchDim: the node becomes an extern call. Must not touch anything
// then.
using LowerFn = bool (*)(const Args&, std::vector<Tensor>& results);

// Result types of a call, or nullopt if the rule does not cover these arguments (then ATen's Meta kernel is asked, on hints).
using ShapeFn = std::optional<boost::container::small_vector<ir::TensorType, 1>> (*)(sym::Context&, std::span<const ir::Arg> args);

struct OpRow {
  const char* name;            // "aten::gelu"
  uint32_t flags;              // ir::OpFlags
  ShapeFn shape;               // may be null
  LowerFn lower;               // null: always extern
  bool draws_by_size = false;  // its numbers follow from the generator and from the sizes of its operands, whatever those hold
  int filled = 0;              // all elements are argument `filled`, or one of these; of an argument 0 that is a tensor only the type is read
};
constexpr int kZeros = -1, kOnes = -2, kNothing = -3;  // kNothing: nobody has written the memory
const OpRow* find_op(std::string_view name);
bool is_extern(std::string_view name);       // has no lowering: always a call
bool is_elementwise(std::string_view name);  // has a lowering that reads each element of its operands once, or none: it fuses into whatever reads it
std::vector<const OpRow*> all_ops();

// Each family is one file that gives its rows; src/ops/table.cpp lists the families.
std::span<const OpRow> pointwise_rows();   // pointwise.cpp: arithmetic, comparison, math, casts, where, clamp, copies
std::span<const OpRow> activation_rows();  // activation.cpp: relu, gelu, silu, hardswish, ...
std::span<const OpRow> reduction_rows();   // reduction.cpp: sum, mean, amax, argmax, any, all, prod, var, norm, ...
std::span<const OpRow> norm_rows();    // norm.cpp: native_layer_norm, native_batch_norm (eval), group_norm, rms_norm, softmax, log_softmax, losses
std::span<const OpRow> view_rows();    // view.cpp
std::span<const OpRow> create_rows();  // create.cpp: full, arange, zeros_like, eye, ...
std::span<const OpRow> concat_rows();  // concat.cpp: cat, stack, pad, roll, flip, repeat
std::span<const OpRow> index_rows();   // index.cpp: embedding, gather, index, index_select, scatter, masked_fill, ...
std::span<const OpRow> pool_rows();    // pool.cpp: max/avg/adaptive pooling, upsample
std::span<const OpRow> extern_rows();  // extern.cpp: shape rules of ops that stay whole (mm, conv, sdpa, ...)

}  // namespace vitrify::ops
