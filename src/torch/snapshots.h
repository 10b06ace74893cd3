// What the backward computes again must read memory that users can change as it was in the forward; what eager has saved of it is read as it is by
// then.
#pragma once
#include <functional>
#include <unordered_map>

#include "ir/node_map.h"

namespace vitrify {

class Snapshots {
 public:
  // `was`: of a value that is no view, as it was; null: as it is. It may insert nodes before the one it is given. Nodes in `layouts` count as views.
  Snapshots(ir::Graph& g, ir::NodeSet layouts, std::function<ir::Value(ir::Value, ir::Node*)> was)
      : g_(g), layouts_(std::move(layouts)), was_(std::move(was)) {}

  // What it was, for a node that comes after `before`. Asked for in the graph's order.
  ir::Value of(ir::Value, ir::Node* before);
  // It reads everything as it was; views read on as they are.
  void redirect(ir::Node*);

 private:
  bool is_view(const ir::Node& n) const;
  ir::Graph& g_;
  ir::NodeSet layouts_;
  std::function<ir::Value(ir::Value, ir::Node*)> was_;
  ir::ValueMap<ir::Value> roots_;
  std::unordered_map<const ir::Node*, ir::Node*> views_;
};

// A copy, to be kept; the same computation once more.
ir::Value copy_before(ir::Graph&, ir::Node* before, ir::Value);
ir::Value again_before(ir::Graph&, ir::Node* before, ir::Value);

}  // namespace vitrify
