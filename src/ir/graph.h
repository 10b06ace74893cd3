// Graph IR: a functional program of ATen ops.
//
// Semantics. A graph is a list of nodes in execution order; a node applies an op, named as ATen names it ("aten::add.Tensor"), to
// arguments in the order of its schema (keyword-only ones included, none left out), and has zero or more tensor results. Every value
// is immutable; nothing aliases (a view op is a new value with the same elements). What a node computes is by definition what ATen
// computes for the same call in eager mode. A type's strides are what eager's result has; a pass may change the strides of a
// private value, never of a graph output. Effects of the program (writes to inputs, results that alias inputs) are listed in Graph
// outputs: each mutated input has its final value there, and whoever runs the graph writes it back.
//
// Three ops are the graph's own: "graph::input" (attribute: index), "graph::constant" (index into Graph::constants, an opaque
// payload) and "graph::output" is not a node but Graph::outputs.
#pragma once
#include <boost/container/small_vector.hpp>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "support/error.h"
#include "support/types.h"
#include "sym/sym.h"

namespace vitrify::ir {

using sym::Int;
using Dims = boost::container::small_vector<Int, 5>;

struct TensorType {
  DType dtype = DType::F32;
  Device device;
  Dims sizes;
  Dims strides;                    // in elements, as eager's result has
  uint8_t opaque_scalar_type = 0;  // at::ScalarType number when dtype is Opaque
  bool wrapped_number = false;     // a 0-d tensor made from a Python number (type promotion treats it as a scalar)

  size_t dim() const { return sizes.size(); }
  Int numel() const;
  bool is_contiguous() const;  // row-major, proved
  bool operator==(const TensorType&) const = default;
};
Dims contiguous_strides(const Dims& sizes);

struct Node;

// One result of a node. A null node stands for an undefined or absent tensor.
struct Value {
  Node* node = nullptr;
  uint32_t index = 0;
  explicit operator bool() const { return node != nullptr; }
  bool operator==(const Value&) const = default;
  const TensorType& type() const;
};

struct None {
  bool operator==(const None&) const = default;
};
enum class MemoryFormat : int8_t { Contiguous, Preserve, ChannelsLast, ChannelsLast3d };
enum class Layout : int8_t { Strided, Other };
struct Complex {
  double re, im;
  bool operator==(const Complex&) const = default;
};
// An argument ATen takes that the IR does not look into (generator, stream, script object): index into Graph::constants.
struct OpaqueArg {
  uint32_t index;
  bool operator==(const OpaqueArg&) const = default;
};

using AnyArg = std::variant<None, Value, std::vector<Value>, Int, std::vector<Int>, double, std::vector<double>, bool, std::vector<bool>, std::string,
                            std::vector<Complex>, Complex, DType, Device, MemoryFormat, Layout, OpaqueArg>;
// What may throw is copied outside of the variant: libstdc++ destroys one of so many alternatives whose copy constructor has thrown as if it held
// something.
struct Arg : AnyArg {
  using AnyArg::AnyArg;
  Arg(const Arg& o)
      : AnyArg(
            std::visit([](const auto& x) { return AnyArg(std::in_place_type<std::decay_t<decltype(x)>>, std::decay_t<decltype(x)>(x)); }, o.any())) {}
  Arg(Arg&&) noexcept = default;
  Arg& operator=(const Arg& o) { return *this = Arg(o); }
  Arg& operator=(Arg&&) noexcept = default;
  ~Arg() = default;
  const AnyArg& any() const { return *this; }
  bool operator==(const Arg& o) const { return any() == o.any(); }
};

// Facts about an op that hold for every call. Set by the tracer from the schema and the table of src/ops.
enum OpFlags : uint32_t {
  kPure = 0,
  kRandom = 1 << 0,           // draws from a generator: order is kept, no CSE, no folding
  kEffect = 1 << 1,           // anything else that may not be removed, merged or moved across another effect (custom ops, asserts)
  kView = 1 << 2,             // result shares memory with argument 0 in eager
  kDataDependent = 1 << 3,    // result sizes depend on values
  kCopiesMemory = 1 << 7,     // eager copies what holds argument 0 and writes into that: elements that share memory there share it in the result
  kOneDtype = 1 << 8,         // eager refuses operands of two dtypes; its Meta kernel takes them
  kGivesContiguous = 1 << 9,  // contiguous memory, however argument 0 lies
  kLooksAtOffset = 1 << 10,   // where in its memory argument 0 begins
  kStartsAligned = 1 << 12,   // refuses an argument 0 that does not begin at a multiple in its memory: an element is made of several
};

struct Op {
  std::string name;  // "aten::add.Tensor", "aten::relu", "mkldnn::_linear_pointwise"
  uint32_t flags = kPure;
};

struct Node {
  uint32_t id = 0;  // dense in creation order, never reused; printed as %id
  const Op* op = nullptr;
  std::vector<Arg> args;
  boost::container::small_vector<TensorType, 1> outs;
  uint32_t source = 0;          // index into Graph::sources: where the user wrote it (0: unknown)
  bool as_contiguous = false;   // a pass has it lie otherwise: eager's is contiguous, and values that follow from the layout are as there
  const void* owner = nullptr;  // identity of the graph it belongs to; null once erased
  Value out(uint32_t i = 0) { return {this, i}; }
};

}  // namespace vitrify::ir

template <>
struct std::hash<vitrify::ir::Value> {
  size_t operator()(const vitrify::ir::Value& v) const { return std::hash<const void*>()(v.node) * 31 + v.index; }
};

namespace vitrify::ir {

inline const TensorType& Value::type() const { return node->outs[index]; }
inline bool is_input(const Node& n) { return n.op->name == "graph::input"; }
inline bool is_constant(const Node& n) { return n.op->name == "graph::constant"; }

// Where an input comes from, for text and messages; the guards live with the door that made the graph.
enum class InputKind : uint8_t { Argument, Parameter, Buffer, Captured, Tangent, Saved };
struct Input {
  Value value;
  InputKind kind = InputKind::Argument;
  std::string name;  // "x", "layer1.0.conv1.weight"; for people
};

template <class T>
class ValueMap;  // ir/node_map.h

class Graph {
 public:
  Graph();
  explicit Graph(std::shared_ptr<sym::Context>);  // shares the symbols of another graph
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;
  ~Graph();

  sym::Context& ctx() { return *ctx_; }
  std::shared_ptr<sym::Context> shared_ctx() const { return ctx_; }

  // --- building; each checks its arguments (VT_CHECK) so that a malformed node cannot exist
  const Op* op(std::string_view name, uint32_t flags_if_new = kPure);  // interned
  Value add_input(InputKind, std::string name, TensorType);
  Value add_constant(TensorType, std::shared_ptr<void> payload);
  Node* append(const Op*, std::vector<Arg>, boost::container::small_vector<TensorType, 1> outs);
  Node* insert_before(Node* at, const Op*, std::vector<Arg>, boost::container::small_vector<TensorType, 1> outs);
  void replace_uses(Value from, Value to);    // in every node and in outputs; one sweep over the graph
  void replace_uses(const ValueMap<Value>&);  // many at once in one sweep; chains a -> b -> c are followed
  void erase(Node*);                          // must have no uses
  // Removes every node whose results are unused and which has no effect and draws no random numbers; returns how many. Inputs stay.
  size_t remove_dead();

  const std::vector<Node*>& nodes() const { return order_; }  // execution order, inputs and constants first
  void set_order(std::vector<Node*>);                         // same set, another valid order
  uint32_t next_id() const { return next_id_; }               // of the node made next
  std::vector<Input> inputs;
  std::vector<Value> outputs;  // null Value: undefined result
  std::vector<std::shared_ptr<void>> constants;
  std::vector<std::string> sources{""};  // "file.py:12 in forward"
  std::string name = "graph";

 private:
  void check_replacement(Value from, Value to) const;
  friend class TextReader;
  Node* make(uint32_t id, const Op*, std::vector<Arg>, boost::container::small_vector<TensorType, 1> outs);
  void check(const Op*, const std::vector<Arg>&, const boost::container::small_vector<TensorType, 1>&) const;
  void add_header(Node*);

  std::shared_ptr<sym::Context> ctx_;
  std::unique_ptr<char> identity_;  // its address stays the same when the graph moves
  std::deque<Node> storage_;
  std::vector<Node*> order_;
  struct NameHash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::unordered_map<std::string, std::unique_ptr<Op>, NameHash, std::equal_to<>> ops_;
  uint32_t next_id_ = 0;
  size_t header_ = 0;  // inputs and constants at the front of order_
};

// Calls f(Value&) for every tensor argument, in order, null ones skipped.
template <class F>
void for_each_input(Node& n, F&& f) {
  for (Arg& a : n.args) {
    if (auto* v = std::get_if<Value>(&a)) {
      if (*v) f(*v);
    } else if (auto* l = std::get_if<std::vector<Value>>(&a)) {
      for (Value& v : *l)
        if (v) f(v);
    }
  }
}

// --- text (src/ir/print.cpp, parse.cpp); grammar in docs/text-ir.md. print(parse(print(g))) == print(g).
std::string print(const Graph&);
std::string print(const Node&);
Graph parse(std::string_view text);  // throws Error with line and column; constants come back with null payloads

// Ids of the nodes with kRandom or kEffect, in order: what verify() takes as `before`.
std::vector<uint32_t> effect_order(const Graph&);

// --- verify (src/ir/verify.cpp). Throws InternalError naming the node and the rule broken:
//  1. every value used is defined earlier in order and belongs to this graph;
//  2. sizes and strides of a type have the same length, sizes are provably not negative;
//  3. inputs[i].value is the result of the graph::input node with index i, and nothing else makes graph::input nodes;
//  4. constants exist; outputs exist; ids are unique;
//  5. a node with kRandom or kEffect keeps its relative order (checked against `before` when given).
void verify(const Graph&, const std::vector<uint32_t>* effect_order_before = nullptr);

}  // namespace vitrify::ir
