// From one loop kernel to LLVM IR that is already vectorised.
//
// Code is emitted for a *block*: `unroll` vectors of `lanes` adjacent values of one loop variable (or plain scalars: lanes 1). A kernel value is
// uniform (one scalar for the whole block) or varies (one LLVM value per vector). Accumulators and odometers live in allocas, promoted by SROA.
#pragma once
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/Module.h>

#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

#include "codegen/llvm/target.h"
#include "loop/loop.h"

namespace vitrify::codegen::x86 {

using loop::Instr;
using loop::Op;
using sym::Int;

using Value = llvm::Value;

// Vector math on IR values of any lane count. Records the host symbols that the code calls.
class VectorMath {
 public:
  using Resolve = void* (*)(const char*);
  VectorMath(llvm::IRBuilder<>& b, llvm::Module& m, const Target& t, Resolve resolve, std::set<std::string>& symbols)
      : b_(b), m_(m), t_(t), resolve_(resolve), symbols_(symbols) {}
  // An op of the transcendental kind on one or two operands of a float type. Null when `op` is not one.
  Value* emit(Op op, Value* x, Value* y);
  // A function of the host called for every lane; name as in host_function().
  Value* per_lane(const std::string& name, Value* x, Value* y);
  llvm::Value* exp(Value* x);
  static bool is_math(Op);
  // What is emitted from now on calls one function of the module for each op, where it would be written out.
  void share(bool on) { shared_ = on; }

 private:
  Value* call(Op op, Value* x);
  Value* c(Value* like, double v) { return llvm::ConstantFP::get(like->getType(), v); }
  Value* ci(Value* like, int64_t v);  // integer constant of the shape of `like`
  llvm::Type* int_like(Value* x);
  Value* mad(Value* a, Value* b, Value* c);
  Value* poly(Value* x, std::initializer_list<double> highest_first);
  Value* scale(Value* p, Value* n_bits, Value* n, Value* kept = nullptr);  // p * 2^n, or zero where not `kept`
  Value* exp_poly(Value* r);
  Value* abs(Value* x) { return b_.CreateUnaryIntrinsic(llvm::Intrinsic::fabs, x); }
  Value* exp2(Value* x);
  Value* expm1(Value* x);
  Value* log(Value* x, int base);
  Value* log1p(Value* x);
  Value* sincos(Value* x, bool cosine);
  Value* tanh(Value* x);
  Value* erf(Value* x);
  Value* ndtr(Value* x);
  Value* sleef(Op op, Value* x, Value* y);
  llvm::AllocaInst* slot(llvm::Type*);

  llvm::IRBuilder<>& b_;
  llvm::Module& m_;
  const Target& t_;
  Resolve resolve_;
  std::set<std::string>& symbols_;
  bool shared_ = false;
};

// What the code of a function may use.
void set_target(llvm::Function&, const Target&);

// Address of a helper of the JIT by symbol name ("vt_tan_f32"), or null.
void* host_function(const std::string& name);

struct Multi {
  llvm::SmallVector<Value*, 4> v;
  bool uniform = true;
};

struct Block {
  int lanes = 1, unroll = 1;
  Int var = 0;            // the vector loop variable; 0 when scalar
  Value* base = nullptr;  // its value in lane 0 of vector 0
  Value* mask = nullptr;  // active lanes; null: all
};

using AccState = llvm::SmallVector<Value*, 3>;

// Memory of the accumulators of one stage for one block shape.
struct AccSet {
  int lanes = 1, unroll = 1;
  bool masked = false;                        // updates only active lanes of the block, and counts per lane
  std::vector<std::vector<AccState>> slots;   // [accumulator][vector] -> component allocas
  std::vector<std::vector<AccState>> totals;  // second level of f32 sums, or empty
};

class KernelEmitter {
 public:
  KernelEmitter(const loop::Kernel& k, llvm::Module& m, const Target& t, VectorMath::Resolve resolve, std::set<std::string>& symbols);
  void emit(const std::string& symbol);

 private:
  using Body = std::function<void()>;
  // -- structure (emit_kernel.cpp)
  void prologue();
  void emit_rows();                                           // outer iterations one by one, inner loops across lanes
  void emit_runs(const loop::Loop* loops, int n, bool flat);  // lanes across the last of `loops`
  void emit_tiles();                                          // squares of the last outer and the inner loop (emit_tile.cpp)
  void emit_stage(const loop::Stage&);                        // inner loops across lanes
  // The first `count` stages of a row; the last loop of the row before runs within `lead` (emit_trailing.cpp).
  struct Trailing {
    const loop::Stage* last;
    std::map<int32_t, llvm::AllocaInst*> of_row;  // values of that row that the loop reads, by SSA id
    Value* row = nullptr;                         // that row
  };
  void emit_stages(size_t count, const loop::Stage* lead = nullptr, const Trailing* = nullptr);
  const loop::Stage* leads_last() const;
  std::optional<DType> row_value(int32_t id) const;
  void emit_trailing_rows(const loop::Stage& lead);
  void emit_trailing(const Trailing&);
  std::vector<const Instr*> reads_of_rows(const loop::Stage& asks) const;
  enum class Near { L2 = 2, L1 = 3 };  // as the intrinsic counts
  void prefetch(Value* p, Near);
  void prefetch_ahead(const std::vector<const Instr*>& loads, Int var, int64_t steps, Near = Near::L1);
  void prefetch_column(const loop::Stage&, int64_t rows_ahead = 8);
  bool sums_long_columns() const;  // emit_columns.cpp
  void emit_columns(const loop::Loop& columns, int unroll, Value* from, Value* to);
  void emit_stage_in_block(const loop::Stage&);  // inner loops sequential
  void emit_body(const loop::Stage&, AccSet* accs);
  // Runs `run(from, to)` for each piece of [begin, end) in which only the last of `loops` moves; the others' symbols are set.
  void split_runs(const loop::Loop* loops, int n, const std::function<void(Value* from, Value* to)>& run);
  void for_loop(Value* lo, Value* hi, Value* step, const std::function<void(Value*)>& body);
  void nest(const loop::Loop* loops, int n, const Body& body);
  // Covers [lo, hi) of `var` by blocks of unroll*W, W, and a masked or scalar tail.
  enum class Phase { Main, Middle, Tail };
  void vector_run(Int var, Value* lo, Value* hi, int lanes, int unroll, const std::function<void(Phase)>& body, const Body& after_chunk = {},
                  int64_t chunk_steps = 0);
  bool masked_throughout(const loop::Loop* loops, int n) const;
  int choose_unroll(const std::vector<loop::Stage>&, bool reduction, Int lanes_along) const;
  void if_then(Value* cond, const Body&);
  llvm::AllocaInst* make_slot(llvm::Type*, const char* name);
  // -- indices and memory (emit_memory.cpp)
  bool varies(Int) const;
  Value* scalar_index(Int, int u);
  Value* vector_index(Int, int u, llvm::Type* element);
  Value* make_scalar_index(Int, int u);
  Value* make_vector_index(Int, int u, llvm::Type* element);
  class IndexScope;
  using Bounds = std::pair<__int128, __int128>;
  Bounds range_of(Int) const;
  Bounds find_range(Int) const;
  bool fits32(Int) const;
  bool find_fits32(Int) const;
  Value* floor_div(Value* a, Value* b, bool non_negative, bool want_mod);
  Multi load(const Instr&);
  Multi load_bit(const Instr&);
  void store(const Instr&);
  void store_vector(Value* v, Value* p, uint32_t buf);
  void store_add(const Instr&);
  Value* load_one(const Instr&, int u, Value* mask, Value* other);
  Value* load_strided(const Instr&, int u, int64_t stride);
  Value* lane_pointers(const Instr&, int u);
  Value* element_pointer(const Instr&, int u);
  Value* widen(Value* raw, DType storage);
  Value* narrow(Value* v, DType storage);
  template <class I>
  I* tag(I* inst, uint32_t buf, bool is_load);
  Value* dummy_pointer();
  // -- operations (emit_ops.cpp)
  void emit_instr(const Instr&, AccSet*);
  Value* op_value(const Instr&, Value* a, Value* b, Value* c, DType ta, DType tb, int u);
  Value* int_op(const Instr&, Value* a, Value* b);
  Value* int_divide(Op, DType, Value* a, Value* b, int u);
  Value* float_op(const Instr&, Value* a, Value* b);
  Value* compare(Op, DType, Value* a, Value* b);
  Value* cast(Value* v, DType from, DType to);
  Value* round_to_storage(Value* f32, DType storage);
  Value* constant(DType, const Instr&);
  Multi check_index(const Instr&);
  void fault(Value* failed, KernelFault, Value* leave = nullptr);  // leave: nothing that comes next may run
  Value* float_max(Value* a, Value* b, bool is_max);
  Value* fenced(Value* v);
  Value* fma(Value* a, Value* b, Value* c);
  // -- reductions (emit_reduce.cpp)
  AccSet make_accs(const loop::Stage&, int lanes, int unroll, bool two_level, bool masked = false);
  void reset(const loop::Stage&, AccSet&);
  void update(const loop::Stage&, AccSet&, const Instr&);
  AccState join_moments(AccSet&, size_t accum, size_t u);
  void flush(const loop::Stage&, AccSet&);
  AccState combine(const loop::Accum&, const AccState&, const AccState&);
  AccState read(const loop::Accum&, AccSet&, size_t acc, int u);
  void sum_again(const loop::Stage&, size_t accum, std::vector<AccState>& states);
  AccState fold_lanes(const loop::Accum&, AccState);
  void publish(const loop::Accum&, const std::vector<AccState>& per_vector, bool uniform);
  std::vector<Value*> identity(const loop::Accum&, int lanes);
  static bool wants_two_level(const loop::Stage&);

  // -- values
  llvm::Type* compute_llvm(DType) const;
  llvm::Type* storage_llvm(DType) const;
  llvm::Type* vec(llvm::Type* t, int lanes) const { return lanes == 1 ? t : llvm::FixedVectorType::get(t, lanes); }
  Value* splat(Value* v) { return block_.lanes == 1 ? v : b_.CreateVectorSplat(block_.lanes, v); }
  Value* get(int32_t id, int u, bool widen);
  Value* and_mask(Value* user);  // with the block's own mask; either may be null
  Value* i64(int64_t v) { return b_.getInt64(v); }
  int value_lanes(Value* v) const;
  Value* any(Value* mask);
  void define(int32_t id, DType type, Multi m) {
    values_[id] = std::move(m);
    types_[id] = type;
  }

  const loop::Kernel& k_;
  llvm::Module& m_;
  llvm::LLVMContext& cx_;
  const Target& t_;
  llvm::IRBuilder<> b_;
  VectorMath math_;
  llvm::Function* fn_ = nullptr;
  llvm::BasicBlock* entry_ = nullptr;
  int lanes_ = 1;
  bool masked_only_ = false;  // blocks without a mask are not emitted
  Block block_;
  std::vector<Multi> values_;
  std::vector<DType> types_;
  std::vector<Value*> buffers_;
  Value* fault_ = nullptr;
  Value* dummy_ = nullptr;
  std::map<uint32_t, Value*> symbols_;    // scalar i64 by symbol id
  std::map<uint32_t, Int> extents_;       // of loop symbols
  std::map<uint32_t, int32_t> indirect_;  // SSA id by symbol id
  mutable std::unordered_map<Int, Bounds> ranges_;
  mutable std::unordered_map<Int, bool> fits32_;
  std::map<std::tuple<const sym::Node*, int, llvm::Type*>, Value*> made_;  // parts of the index that is made
  int index_depth_ = 0;
  std::vector<llvm::MDNode*> scope_, noalias_;  // by buffer
  std::vector<bool> read_only_;
  std::vector<const Instr*> ahead_;     // loads of the next row that the loop being emitted asks for
  const Trailing* trailing_ = nullptr;  // in the loop being emitted
  std::vector<bool> streams_;           // written past the caches: larger than them, and not read here
};

template <class I>
I* KernelEmitter::tag(I* inst, uint32_t buf, bool is_load) {
  inst->setMetadata(llvm::LLVMContext::MD_alias_scope, scope_[buf]);
  inst->setMetadata(llvm::LLVMContext::MD_noalias, noalias_[buf]);
  if (is_load && read_only_[buf]) inst->setMetadata(llvm::LLVMContext::MD_invariant_load, llvm::MDNode::get(cx_, {}));
  return inst;
}

}  // namespace vitrify::codegen::x86
