// Sets of nodes and maps from nodes and values of one graph, dense by id: a pass asks them about every argument of every node.
#pragma once
#include <initializer_list>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ir/graph.h"

namespace vitrify::ir {

class NodeSet {
 public:
  NodeSet() = default;
  explicit NodeSet(const Graph& g) { in_.resize(g.next_id()); }
  bool insert(const Node* n) {  // true if it was not there
    if (n->id >= in_.size()) in_.resize(n->id + 1);
    return !std::exchange(in_[n->id], 1);
  }
  bool contains(const Node* n) const { return n->id < in_.size() && in_[n->id]; }

 private:
  std::vector<char> in_;
};

template <class T>
class NodeMap {
 public:
  NodeMap() = default;
  explicit NodeMap(const Graph& g) { of_.resize(g.next_id()); }
  T& operator[](const Node* n) {  // T() where nothing was put
    if (n->id >= of_.size()) of_.resize(n->id + 1);
    return of_[n->id];
  }
  const T& at(const Node* n) const {
    static const T none{};
    return n->id < of_.size() ? of_[n->id] : none;
  }

 private:
  std::vector<T> of_;
};

// Iterates over (value, T) in the order in which they were put.
template <class T>
class ValueMap {
 public:
  ValueMap() = default;
  explicit ValueMap(const Graph& g) {
    first_.resize(g.next_id());
    entries_.reserve(g.next_id());
  }
  ValueMap(std::initializer_list<std::pair<Value, T>> all) {
    for (const auto& [v, t] : all) emplace(v, t);
  }
  bool emplace(Value v, T t) {  // false, and nothing done, where there is one already
    uint32_t& place = v.index == 0 ? slot(v.node) : others_[v];
    if (place) return false;
    entries_.emplace_back(v, std::move(t));
    place = static_cast<uint32_t>(entries_.size());
    return true;
  }
  T& operator[](Value v) {
    if (!contains(v)) emplace(v, T{});
    return *find(v);
  }
  const T* find(Value v) const {
    const uint32_t place = place_of(v);
    return place ? &entries_[place - 1].second : nullptr;
  }
  T* find(Value v) { return const_cast<T*>(std::as_const(*this).find(v)); }
  bool contains(Value v) const { return place_of(v) != 0; }
  const T& at(Value v) const {
    const T* t = find(v);
    VT_CHECK(t, "a value that the map does not have");
    return *t;
  }
  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  uint32_t& slot(const Node* n) {
    if (n->id >= first_.size()) first_.resize(n->id + 1);
    return first_[n->id];
  }
  uint32_t place_of(Value v) const {
    if (v.index == 0) return v.node->id < first_.size() ? first_[v.node->id] : 0;
    const auto at = others_.find(v);
    return at == others_.end() ? 0 : at->second;
  }
  std::vector<std::pair<Value, T>> entries_;
  std::vector<uint32_t> first_;  // by node: place of its first result among the entries, from 1
  std::unordered_map<Value, uint32_t> others_;
};

// How often each value is used (graph outputs count), by node and result index.
using UseCounts = boost::container::small_vector<uint32_t, 1>;
NodeMap<UseCounts> count_uses(const Graph&);

}  // namespace vitrify::ir
