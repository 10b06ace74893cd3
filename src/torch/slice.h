// Parts of a graph that follow from few inputs, as graphs of their own.
#pragma once
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ir/node_map.h"
#include "ir/views.h"

namespace vitrify {

struct Slice {
  std::shared_ptr<ir::Graph> graph;  // shares the symbols of the graph it was cut from
  std::vector<uint32_t> sources;     // its inputs, as inputs of that graph
};

// A copy of everything `outs` need.
Slice slice(const ir::Graph&, const std::vector<ir::Value>& outs);

// A copy of everything `outs` and the nodes `also` need, where `given` (graph inputs, or any values) are its inputs, in that order, used or not.
// Null outputs stay null. `copies`, if asked for: what each value became.
std::shared_ptr<ir::Graph> extract(const ir::Graph&, const std::vector<ir::Value>& outs, const std::vector<ir::Value>& given,
                                   const std::vector<ir::Node*>& also = {}, ir::ValueMap<ir::Value>* copies = nullptr);

using ir::is_input;
uint32_t input_index(const ir::Node&);  // of a graph::input
using ir::root_of;

// What the values follow from: their nodes, and all nodes behind them, but for those behind `ends`.
ir::NodeSet nodes_behind(const ir::Graph&, const std::vector<ir::Value>&, const std::vector<ir::Value>& ends = {});

// Puts each node of `again` right before the first that needs it, where the order does not matter: what is computed again lives as short as it can.
void compute_late(ir::Graph&, const ir::NodeSet& again);

std::unordered_set<uint32_t> symbols_in(const ir::Graph&);  // ids of those that sizes, strides and arguments mention

// Values from which those `symbols` can be read that are a size of something in the graph for which `may` holds, and of none of `given`.
std::vector<ir::Value> carriers(const ir::Graph&, const std::vector<ir::Value>& given, const std::unordered_set<uint32_t>& symbols,
                                const std::function<bool(ir::Value)>& may = {});

// True when v follows, through pure ops, from integer inputs on the CPU (and nothing else) for which `may_read` holds; at least one.
bool follows_from_integers(const ir::Graph&, ir::Value v, const std::function<bool(uint32_t input)>& may_read);

bool reads_content(const ir::Node&);  // ops of ours that may read arguments: their key is their content

// The same computation, by structure.
bool same_computation(const ir::Value&, const ir::Value&);

}  // namespace vitrify
