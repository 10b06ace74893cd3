// Symbolic 64-bit integers: tensor sizes, strides and the index expressions of loops.
//
// An Int is either a constant (no allocation, no context) or a pointer to a hash-consed expression in normal form, so that
// structural equality is pointer equality. Normal form: a sum of monomials (coefficient * product of atoms), where an atom is
// a symbol or one of FloorDiv, Mod, Min, Max over normal forms. It is not a computer algebra system.
//
// Arithmetic is exact integer arithmetic (no overflow modelled); floordiv and mod round towards minus infinity (as Python's).
// A Context owns every expression made from its symbols and must outlive them; it is not thread-safe (one per compile).
#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace vitrify::sym {

class Context;
struct Node;

class Int {
 public:
  constexpr Int(int64_t v = 0) : value_(v) {}
  constexpr Int(int v) : value_(v) {}
  explicit Int(const Node* n) : node_(n) {}
  bool is_const() const { return node_ == nullptr; }
  int64_t value() const { return value_; }  // constants only
  bool is(int64_t v) const { return !node_ && value_ == v; }
  const Node* node() const { return node_; }
  bool operator==(const Int& o) const { return node_ == o.node_ && value_ == o.value_; }
  size_t hash() const { return std::hash<const void*>()(node_) * 31 + std::hash<int64_t>()(value_); }

 private:
  const Node* node_ = nullptr;
  int64_t value_ = 0;  // 0 when node_ is set
};

Int operator+(Int, Int);
Int operator-(Int, Int);
Int operator-(Int);
Int operator*(Int, Int);
Int floordiv(Int a, Int b);  // b != 0
Int mod(Int a, Int b);       // sign of b, as Python
Int min(Int, Int);
Int max(Int, Int);
Int ceildiv(Int a, Int b);
inline Int& operator+=(Int& a, Int b) { return a = a + b; }
inline Int& operator*=(Int& a, Int b) { return a = a * b; }

struct Range {
  int64_t lo = std::numeric_limits<int64_t>::min(), hi = std::numeric_limits<int64_t>::max();  // inclusive
};

enum class SymbolKind : uint8_t {
  Size,      // a dimension or Python int known by its hint; becomes a kernel argument
  Unbacked,  // known only when the plan runs (nonzero); no hint
  Loop,      // a loop variable
  Indirect,  // a value loaded by the kernel and used as an index
};

struct Symbol {
  uint32_t id = 0;  // dense within its context; str() prints s<id>, u<id>, i<id>, v<id> by kind
  SymbolKind kind = SymbolKind::Size;
  std::optional<int64_t> hint;
  Range range;
  int64_t multiple_of = 1;
};

// A condition found true of the hints while compiling, that the compiled code depends on.
struct Guard {
  enum class Kind : uint8_t { EqZero, NeZero, GeZero } kind;
  Int expr;
};

class Context {
 public:
  Context();
  ~Context();
  Context(const Context&) = delete;
  Int symbol(SymbolKind kind, std::optional<int64_t> hint = {}, Range range = {});
  const Symbol& symbol_info(Int s) const;  // s must be a bare symbol
  Symbol& mutable_symbol_info(Int s);
  // Fact 0 <= s < extent for a Loop or Indirect symbol; the extent may be symbolic (it must not contain s).
  void set_loop_extent(Int loop_symbol, Int extent);
  size_t num_symbols() const;
  Int symbol_at(uint32_t id) const;  // the bare symbol with that id
  bool dynamic() const;              // some symbol is a size, of an argument or found while running

  // Decides a == b / a < b / a <= b for the compile: proved from the facts if possible, otherwise by the hints and recorded as a guard.
  bool guard_eq(Int a, Int b);
  bool guard_lt(Int a, Int b);
  bool guard_le(Int a, Int b);
  int64_t specialize(Int a);  // guards a == hint(a) and returns it
  // e as the facts and the guards so far leave it: a constant where they fix its value. Rules tell dims of size 1 by their being constants.
  Int settled(Int e) const;
  const std::vector<Guard>& guards() const;

  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

bool is_symbol(Int);                     // a bare symbol
std::optional<Range> bounds(Int);        // interval of e; nullopt if nothing is known (overflowing bounds count as unknown)
std::optional<bool> known_eq(Int, Int);  // proved from facts, never from hints
std::optional<bool> known_le(Int, Int);
std::optional<bool> known_lt(Int, Int);
bool known_multiple(Int e, int64_t k);  // k divides e, proved
bool has_hint(Int);
int64_t hint(Int);  // value at the hints; VT_CHECK fails for unbacked, loop and indirect symbols
int64_t eval(Int, const std::function<int64_t(uint32_t symbol_id)>&);
Int substitute(Int e, std::span<const std::pair<Int, Int>> map);  // symbol -> expression, simultaneous, re-simplified
bool contains(Int e, Int symbol);
void free_symbols(Int e, std::vector<Int>& out);  // each once, in order of first appearance
// If e == coeff * s + rest with neither coeff nor rest containing s: {coeff, rest}.
std::optional<std::pair<Int, Int>> affine_in(Int e, Int s);

// Structure, for code generators: walks e as a tree of the operations below.
enum class ExprOp : uint8_t { Const, Symbol, Add, Mul, FloorDiv, Mod, Min, Max };
struct View {
  ExprOp op;
  int64_t value = 0;  // Const
  const Symbol* symbol = nullptr;
  std::vector<Int> args;  // Add, Mul: two or more; others: two
};
View view(Int e);

std::string str(Int);                                  // "4*s0 + i2//8"; parses back
std::optional<Int> parse(Context&, std::string_view);  // symbols must exist in the context already

}  // namespace vitrify::sym

template <>
struct std::hash<vitrify::sym::Int> {
  size_t operator()(const vitrify::sym::Int& i) const { return i.hash(); }
};
