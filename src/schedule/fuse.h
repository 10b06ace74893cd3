// Fusion: loop nests into groups that become one kernel each.
//
// A group has one iteration space: outer loops (parallel) and, if it reduces, inner loops. Its parts are
//   Point       over outer x inner
//   Reduce      over inner, one result per outer iteration
//   OuterPoint  over outer only
// Two groups merge when their spaces have a common refinement, every value passed between them is read at the index it was written at, and no third
// item stands between them. Groups that share no buffer merge only when both are small.
#pragma once
#include <memory>

#include "ops/lowering.h"

namespace vitrify::schedule {

enum class PartKind : uint8_t { Point, Reduce, OuterPoint };

struct Part {
  PartKind kind;
  ops::LoopNode node;  // indices in the group's loop variables; node.ranges and rranges are not used any more
};

struct Group {
  std::vector<Part> parts;               // in program order
  std::vector<loop::Loop> outer, inner;  // a group that does not reduce has everything in outer
  bool reduces = false;
  bool closed = false;                   // never merges: scatters
  const ops::ExternNode* ext = nullptr;  // or this
  size_t first_item = 0;
  // Of the loops and parts above: Fuser::measure.
  sym::Int outer_numel = 1, numel = 1;
  int64_t instrs = 0;
  bool small = false;  // so little work that starting a kernel counts: worth merging with any other group of the same space
};

struct FuseOptions {
  bool enabled = true;
  int threads = 2;
};

// Groups in an order in which they can run.
std::vector<Group> fuse(const ops::LoopProgram&, const FuseOptions&);

}  // namespace vitrify::schedule
