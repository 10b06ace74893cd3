// Loop variables, the same ones for every nest: expressions of nests alike, in whatever block, are then one expression.
#pragma once
#include <limits>
#include <unordered_map>
#include <vector>

#include "loop/loop.h"

namespace vitrify::schedule {

// Inner loops are those of a reduction. The two have no variable in common, nor have two places of one nest.
enum class LoopSide : uint8_t { Outer, Inner };

class LoopVars {
 public:
  explicit LoopVars(std::shared_ptr<sym::Context> ctx) : ctx_(std::move(ctx)) {}
  loop::Loop at(LoopSide side, size_t place, sym::Int extent) {
    auto& places = known_[static_cast<size_t>(side)];
    if (places.size() <= place) places.resize(place + 1);
    auto [it, fresh] = places[place].try_emplace(extent);
    if (fresh) {
      sym::Range r{0, std::numeric_limits<int64_t>::max()};
      if (extent.is_const()) r.hi = std::max<int64_t>(extent.value() - 1, 0);
      it->second = ctx_->symbol(sym::SymbolKind::Loop, {}, r);
      if (!extent.is_const()) ctx_->set_loop_extent(it->second, extent);
    }
    return {it->second, extent};
  }

 private:
  std::shared_ptr<sym::Context> ctx_;
  std::vector<std::unordered_map<sym::Int, sym::Int>> known_[2];
};

}  // namespace vitrify::schedule
