// Loop IR: one generated kernel. What a code generator reads and the loop interpreter runs.
//
// A kernel runs a space of `outer` loops, in parallel over the flattened iterations; inside, its stages run in order. A stage is a nest
// of `inner` loops (possibly none: then it runs once per outer iteration) around a straight SSA body.
//
//   kernel k(f32* b0, f32* b1, ...; i64 s0) outer(i0 < 2048):
//     stage inner(i1 < 1024) acc(%3 = sum f32):     // reductions become visible after the stage
//       %1 = load f32 b0[1024*i0 + i1]
//       ...
//
// Values. An instruction has a compute type: b8, u8, i8, i16, i32, i64, f32, f64. Storage types f16 and bf16 are held in f32: load widens, store
// rounds to nearest even; `cast` to f16/bf16 rounds a f32 and stays in f32. Integer arithmetic wraps. b8 is 0 or 1.
// Comparisons, isnan and logical ops yield b8. min and max propagate NaN (as ATen's); fmin, fmax do not. Division of integers: see the op table.
// Casting float to int truncates; out of range gives what the host's conversion gives (as eager).
//
// Scope. A value made in a stage with inner loops is visible in that stage's body only; a value made in a stage without inner loops and the results
// of accumulators are visible in every later stage of the same outer iteration. Everything else goes through buffers.
//
// Memory. Buffers do not overlap unless one is marked in-place with another (`inplace_of`), in which case each element is read before it is written
// by the same body. A store in a stage is visible to loads of later stages in the same outer iteration. Scratch buffers are private to one thread,
// sized for one outer iteration.
#pragma once
#include <boost/container/small_vector.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "support/error.h"
#include "support/types.h"
#include "sym/sym.h"

namespace vitrify::loop {

using sym::Int;

// name (its text spelling), number of SSA operands, class. U: unary arithmetic, B: binary arithmetic (operands and result of `type`),
// C: comparison (result b8), L: logical or bitwise, S: special.
// clang-format off
#define VT_LOOP_OPS(_)                                                                                                       \
  _(constant, 0, S)       /* fimm or iimm by type */                                                                         \
  _(index, 0, S)          /* i64 value of `at` */                                                                            \
  _(load, 0, S)           /* buf[at]; operand a: optional b8 mask, b: value when masked off (both or neither) */             \
  _(load_bit, 0, S)       /* b8: bit at % 8 of byte at / 8 of a u8 buffer nothing here stores; operands as load's */         \
  _(store, 1, S)          /* buf[at] = a; operand b: optional mask */                                                        \
  _(store_add, 1, S)      /* buf[at] += a, atomically unless the kernel is serial */                                         \
  _(check_index, 1, S)    /* faults with IndexOutOfRange unless 0 <= a < at; operand b: optional mask; result: a */          \
  _(cast, 1, S)           /* from the operand's type to `type` */                                                            \
  _(bitcast, 1, S)                                                                                                           \
  _(where, 3, S)          /* a ? b : c */                                                                                    \
  _(fma, 3, S)            /* a * b + c of floats, rounded once on a machine that can */                                      \
  _(reduce, 1, S)         /* feeds accumulator iimm with a (argmax/argmin: a value, b index; a sum of floats that has b: a * */ \
                          /* b as fma, as libraries add up matrix products; mask as operand c, optional) */                 \
  _(neg, 1, U) _(abs, 1, U) _(sign, 1, U) _(sqrt, 1, U) _(rsqrt, 1, U) _(reciprocal, 1, U) _(exp, 1, U) _(exp2, 1, U)        \
  _(expm1, 1, U) _(log, 1, U) _(log2, 1, U) _(log10, 1, U) _(log1p, 1, U) _(sin, 1, U) _(cos, 1, U) _(tan, 1, U)             \
  _(asin, 1, U) _(acos, 1, U) _(atan, 1, U) _(sinh, 1, U) _(cosh, 1, U) _(tanh, 1, U) _(asinh, 1, U) _(acosh, 1, U)          \
  _(atanh, 1, U) _(erf, 1, U) _(erfc, 1, U) _(erfinv, 1, U) _(ndtr, 1, U) _(lgamma, 1, U) _(sigmoid, 1, U) _(floor, 1, U)    \
  _(ceil, 1, U)                                                                                                              \
  _(round, 1, U)          /* half to even */                                                                                 \
  _(trunc, 1, U)                                                                                                             \
  _(add, 2, B) _(sub, 2, B) _(mul, 2, B)                                                                                     \
  _(div, 2, B)            /* floats: IEEE; integers: truncates, faults DivisionByZero */                                     \
  _(floordiv, 2, B)       /* towards minus infinity; as Python for floats (c10::div_floor_floating); integers fault on 0 */  \
  _(fmod, 2, B)           /* C fmod; sign of a */                                                                            \
  _(remainder, 2, B)      /* Python %; sign of b */                                                                          \
  _(pow, 2, B) _(atan2, 2, B) _(hypot, 2, B) _(copysign, 2, B) _(nextafter, 2, B) _(min, 2, B) _(max, 2, B) _(fmin, 2, B)    \
  _(fmax, 2, B)                                                                                                              \
  _(and_, 2, L) _(or_, 2, L) _(xor_, 2, L)                                                                                   \
  _(not_, 1, L)           /* bitwise; on b8 logical */                                                                       \
  _(shl, 2, L)                                                                                                               \
  _(shr, 2, L)            /* arithmetic for signed; amount outside the width: 0 for shl, sign fill for shr (as ATen) */      \
  _(lt, 2, C) _(le, 2, C) _(gt, 2, C) _(ge, 2, C) _(eq, 2, C) _(ne, 2, C) _(isnan, 1, C) _(isinf, 1, C)
// clang-format on

enum class Op : uint8_t {
#define _(n, a, c) n,
  VT_LOOP_OPS(_)
#undef _
};
std::string_view to_string(Op);
int arity(Op);  // SSA operands that must be present
inline bool is_load(Op o) { return o == Op::load || o == Op::load_bit; }
// Bytes that hold n bits: a load_bit of many reads whole words, the last ones beyond the bits.
inline Int bytes_of_bits(Int n) { return sym::ceildiv(n, 8) + 8; }

constexpr int32_t kNoValue = -1;

struct Instr {
  Op op;
  DType type;  // compute type of the result (comparisons: type of the *operands*; the result is b8). load/store: compute type of the value; cast:
               // target, may be f16/bf16 to round
  int32_t a = kNoValue, b = kNoValue, c = kNoValue;  // SSA ids, see Kernel::values
  double fimm = 0;                                   // constant of a float type
  int64_t iimm = 0;                                  // constant of an integer type or b8; accumulator number for reduce
  uint32_t buf = 0;                                  // load, store
  Int at;                                            // element index for load/store; bound for check_index; value for index
  int32_t result = kNoValue;
};

enum class AccumKind : uint8_t {
  Sum,
  Prod,
  Min,
  Max,  // NaN propagates through Min and Max
  Any,
  All,
  ArgMin,
  ArgMax,   // results: value, index (i64); the first of equals, NaN wins
  Welford,  // results: mean, m2 (sum of squared distances), count is numel of the inner space
  Moments,  // the same of sums, in which an infinity stays what it is: Welford's mean turns to NaN after it
};
std::string_view to_string(AccumKind);
int num_results(AccumKind);  // 1 or 2
constexpr bool is_moments(AccumKind k) { return k >= AccumKind::Welford; }

struct Accum {
  AccumKind kind;
  DType type;  // compute type accumulated in
  int32_t results[2] = {kNoValue, kNoValue};
};

struct Loop {
  Int var;     // a Loop symbol
  Int extent;  // iterations
};

struct Stage {
  boost::container::small_vector<Loop, 3> inner;
  std::vector<Accum> accums;
  std::vector<Instr> body;
};

enum class BufferKind : uint8_t { In, Out, InOut, Scratch };
struct Buffer {
  DType dtype;  // storage type
  BufferKind kind = BufferKind::In;
  Int extent;               // elements reachable (bounds checks in the interpreter; size of Scratch)
  int32_t inplace_of = -1;  // this Out buffer may be the same memory as that In buffer
};

// Which loop runs across vector lanes.
enum class VectorAxis : uint8_t {
  Inner,  // the last inner loop of each stage
  Outer,  // the last outer loop: the body runs for W adjacent outer iterations at once (column reductions)
  None,
  Tile,  // as Inner, in squares of the last outer and the inner loop: what lies along the outer one is transposed in registers
};

struct Kernel {
  std::string name;
  std::vector<Buffer> buffers;  // argument order
  std::vector<Int> sizes;       // Size/Unbacked symbols the kernel reads, in argument order
  boost::container::small_vector<Loop, 4> outer;
  std::vector<Stage> stages;
  VectorAxis vector_axis = VectorAxis::Inner;
  int32_t num_values = 0;  // SSA ids are 0..num_values-1
  // An Indirect symbol used in `at` stands for the i64 SSA value paired with it here.
  std::vector<std::pair<Int, int32_t>> indirect;
  std::shared_ptr<sym::Context> ctx;  // owns the expressions
  bool may_fault = false;             // contains check_index or an integer division by what is not a constant other than 0
  bool serial = false;                // never runs on two threads at once: store_add needs no atomics

  Int outer_numel() const;
};

// Does this address step by one element with `down` and by another stride with `across`? In a Tile kernel such loads and stores, when they are not
// masked, go through a transposed square.
bool lies_along(Int at, Int down, Int across);

// Machine code signature. bufs: one pointer per buffer except Scratch, then (if may_fault) an int32_t* to store a KernelFault into, then the
// thread's scratch memory (if any Scratch). Runs flattened outer iterations [begin, end). A kernel without outer loops has exactly one stage,
// whose inner space is flattened instead and no accumulators: [begin, end) are iterations of it.
using KernelFn = void (*)(void* const* bufs, const int64_t* sizes, int64_t begin, int64_t end);

size_t scratch_bytes(const Kernel&, const std::function<int64_t(uint32_t)>& symbol_values);

std::string print(const Kernel&);
Kernel parse(std::string_view, std::shared_ptr<sym::Context>);
// Throws InternalError: SSA ids defined once and in scope where used; operand types agree; buffers and accumulators exist; loop variables in `at` are
// in scope; indirect symbols are paired with an i64 value in scope; a kernel without outer loops obeys the rule above; Out buffers are stored, In
// buffers are not.
void verify(const Kernel&);
// Equal for kernels that generate the same code: names of symbols and of the kernel do not count.
std::vector<uint64_t> canonical_form(const Kernel&);

}  // namespace vitrify::loop
