// The derivative through all results of a program.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ir/graph.h"

namespace vitrify {

// Of all that is kept: also what comes to places behind which nothing reads it. Inputs: what is kept, then the tangents.
class Whole {
 public:
  using Snapshots = std::vector<std::pair<uint32_t, uint32_t>>;
  // `now`: of what is kept, a snapshot and what users have in its place, which its own derivatives read.
  Whole(std::shared_ptr<const ir::Graph> graph, Snapshots now) : graph_(std::move(graph)), now_(std::move(now)) {}
  const ir::Graph& graph() const { return *graph_; }
  // By what is kept (so many): whether it is needed as long as gradients may come through those roots that are `live`.
  std::vector<char> needed_through(const std::vector<char>& live, size_t kept) const;

 private:
  std::vector<char> find_needed(const std::vector<char>& live, size_t kept) const;

  std::shared_ptr<const ir::Graph> graph_;
  Snapshots now_;
  mutable std::mutex mutex_;
  mutable std::map<std::vector<char>, std::vector<char>> needed_;  // by which roots are live: each step asks
};

}  // namespace vitrify
