// The numbers of a plan once the sizes it depends on are known.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/plan.h"

namespace vitrify::runtime {

// Values of the symbols of a plan, some of them known only while it runs.
class SymbolValues {
 public:
  explicit SymbolValues(size_t n = 0) : values_(n), known_(n) {}
  void set(uint32_t id, int64_t v) {
    if (id >= known_.size()) values_.resize(id + 1), known_.resize(id + 1);
    values_[id] = v;
    known_[id] = true;
  }
  bool known(uint32_t id) const { return id < known_.size() && known_[id]; }
  int64_t operator[](uint32_t id) const { return values_[id]; }
  std::optional<int64_t> eval(Int e) const;                                // nullopt: depends on an unknown symbol
  bool eval(const std::vector<Int>& es, std::vector<int64_t>& out) const;  // false: some are unknown

 private:
  std::vector<int64_t> values_;
  std::vector<char> known_;
};

// First and last step that touch each slot; {-1, -1} when none does.
struct Lifetime {
  int32_t first = -1, last = -1;
};
std::vector<Lifetime> lifetimes(const Plan&);

// Memory for blocks of `bytes` each, so that two that are alive at the same step do not overlap: sets their offsets, returns the bytes of all.
struct Block {
  uint32_t slot;
  int64_t bytes;
  Lifetime life;
  int64_t offset = 0;
};
int64_t place(std::vector<Block>&);

// Places the arena slots whose size is known so that two that are alive at the same step do not overlap. Offsets of others are -1.
struct ArenaLayout {
  std::vector<int64_t> offsets;  // per slot
  int64_t bytes = 0;
};
ArenaLayout lay_out_arena(const Plan&, const SymbolValues&);

}  // namespace vitrify::runtime
