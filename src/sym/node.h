// Representation behind sym.h; private to src/sym.
#pragma once
#include <atomic>
#include <boost/container/small_vector.hpp>
#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "support/error.h"
#include "sym/sym.h"

namespace vitrify::sym {

__extension__ typedef __int128 i128;
constexpr int64_t kNegInf = std::numeric_limits<int64_t>::min();  // as Range::lo
constexpr int64_t kPosInf = std::numeric_limits<int64_t>::max();  // as Range::hi

enum class Kind : uint8_t { Symbol, FloorDiv, Mod, Min, Max, Sum };
using Atoms = boost::container::small_vector<const Node*, 2>;  // sorted, with repetition

struct Term {
  int64_t coef = 0;
  Atoms atoms;
};
using Terms = boost::container::small_vector<Term, 3>;

// A linear combination of monomials: what every Int is, seen uniformly.
struct Poly {
  Terms terms;  // sorted by compare_atoms, coefficients not zero
  int64_t k = 0;
};

struct Node {
  Kind kind = Kind::Sum;
  bool exact = false;      // FloorDiv without remainder, proved
  bool has_loops = false;  // a loop or indirect symbol inside
  uint16_t depth = 0;
  uint32_t weight = 1;  // nodes of the tree that it stands for, at most kHeavy
  uint32_t symbol = 0;
  const Symbol* info = nullptr;  // of the symbol, which other threads may look for while one is added
  Context::Impl* ctx = nullptr;
  uint64_t hash = 0;
  uint64_t symbols_mask = 0;  // bit id % 64 of every symbol inside
  Int a, b;                   // FloorDiv, Mod, Min, Max
  Poly sum;                   // Sum
  mutable Range range;
  mutable uint32_t range_epoch = 0;  // 0: not computed
};

constexpr uint32_t kHeavy = 1u << 20;
constexpr uint32_t kLight = 64;  // trees up to this weight are walked as such; of the others each node is visited once

struct NodeHash {
  size_t operator()(const Node* n) const { return n->hash; }
};
struct NodeEqual {
  bool operator()(const Node* x, const Node* y) const;
};

struct Context::Impl {
  std::deque<Node> nodes;
  std::unordered_set<const Node*, NodeHash, NodeEqual> table;
  std::deque<Symbol> symbols;
  std::vector<const Node*> symbol_nodes;
  std::vector<std::optional<Int>> extents;
  std::vector<Guard> guards;
  std::atomic<bool> dynamic = false;
  uint32_t epoch = 1;   // of the facts; bumped when one changes
  uint64_t hinted = 0;  // the same of hints
  int proof_depth = 0;
  int proof_steps = 0;  // of the proof under way; beyond a bound nothing more is proved
  // Quotients and remainders made since the facts changed last.
  struct Division {
    Kind kind;
    Int a, b;
    bool operator==(const Division&) const = default;
  };
  struct DivisionHash {
    size_t operator()(const Division& d) const { return (d.a.hash() * 31 + d.b.hash()) * 2 + (d.kind == Kind::Mod); }
  };
  std::unordered_map<Division, Int, DivisionHash> divisions;
  uint32_t divisions_epoch = 0;

  const Node* intern(Node&&);
  Int atom(Kind, Int a, Int b);
};

// --- arithmetic.cpp
int compare(Int, Int);  // a structural order, the same in every context
int compare_atoms(const Atoms&, const Atoms&);
Context::Impl* context_of(Int a, Int b);  // at least one is not constant
Poly poly(Int);
Int from_poly(Context::Impl*, Poly&&);  // terms sorted, merged
Int from_term(Context::Impl*, const Term&);
void add_term(Poly&, const Term&);
Atoms multiply_atoms(const Atoms&, const Atoms&);
bool divide_atoms(const Atoms& a, const Atoms& b, Atoms& quotient);  // a / b as multisets
bool divide_atom(const Atoms& a, const Node* by, Atoms& quotient);
struct Overflow : Error {
  using Error::Error;
};
int64_t checked_add(int64_t, int64_t);  // throw Overflow
int64_t checked_mul(int64_t, int64_t);
int64_t floordiv_const(int64_t, int64_t);
int64_t mod_const(int64_t, int64_t);

// Nodes that a walk has met. Small trees are walked as trees, which costs less than to keep a set.
class Seen {
 public:
  explicit Seen(const Node* root) : on_(root->weight > kLight) {}
  bool again(const Node* n) { return on_ && !set_.insert(n).second; }

 private:
  bool on_;
  std::unordered_set<const Node*> set_;
};

// --- divide.cpp
std::optional<Int> exact_quotient(Int a, Int b);  // a / b when b divides a as polynomials (b one monomial)

// --- facts.cpp
Range range_of(Int);  // kNegInf / kPosInf where unbounded
bool prove_nonneg(Int);
inline bool prove_positive(Int e) { return prove_nonneg(e - 1); }
inline bool prove_in(Int e, Int bound) { return prove_nonneg(e) && prove_nonneg(bound - 1 - e); }  // 0 <= e < bound

}  // namespace vitrify::sym
