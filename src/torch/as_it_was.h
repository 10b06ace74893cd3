// Graphs whose parts are computed at other times than they were recorded: each part reads what users can change as it was by its own time.
#pragma once
#include <functional>
#include <vector>

#include "torch/snapshots.h"
#include "torch/split.h"

namespace vitrify {

// Pointwise work and views fuse into what reads them: as good as free.
bool recomputable(const ir::Node&);

// Values without a tensor, `lost`, and what can be computed of those only; not what is `given`.
class Lost {
 public:
  Lost(const ir::Graph&, const std::vector<ir::Value>& given, const std::vector<ir::Value>& lost);
  bool contains(ir::Value);
  bool makes(ir::Value);  // its node reads one

 private:
  ir::ValueMap<bool> is_;
};

// Of what a program is given: users have it, and can change it unseen.
bool is_visible(const JointProgram&, ir::Value given);

// Of the views that `n` reads, those that were there before the gradients were, as `as` has them.
void read_early_views(Snapshots& as, ir::Node* n, const ir::NodeSet& late);

// In `g`, what is not `late` reads what was kept of it: `given`, values of `saved`, which become those that stand for them.
void read_snapshots(ir::Graph& g, const JointProgram&, const std::vector<Saved>& saved, std::vector<ir::Value>& given, const ir::NodeSet& late);

// In `g`, what the levels below have computed, and is computed again, reads what they have read. `now`: of each of JointProgram::was; `given`: of
// each of JointProgram::given. `level_of`: who has computed a node.
void read_as_was(ir::Graph& g, const JointProgram&, const std::vector<ir::Value>& now, const std::vector<ir::Value>& given,
                 const std::function<int(const ir::Node&)>& level_of);

}  // namespace vitrify
