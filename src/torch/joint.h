// A captured program and its derivative, in one graph.
#pragma once
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <compare>
#include <memory>
#include <unordered_set>
#include <vector>

#include "support/error.h"
#include "torch/program.h"

namespace vitrify {

struct Tape;

struct Gradient {
  uint32_t given;       // of this one of JointProgram::given
  int32_t place = -1;   // or what stops at this place (JointProgram::places)
  ResultSpec how;       // made from values that come with it
  ir::TensorType type;  // as users get it; of a batched one with the dim of the batch
  int32_t batch_dim = -1;
};

// How a tangent comes: not at all, as recorded, or in strides of its own.
struct TangentLayout {
  bool defined = true;
  std::vector<int64_t> strides;    // empty: those recorded
  bool conj = false, neg = false;  // lazy bits: where something looks at them, or at strides that it loses without them
  std::vector<uint32_t> expanded;  // dims of one element, given once
  bool needs_grad = false;         // for gradients of gradients: so does it itself
  int8_t autocast = 0;             // the backward is called under autocast, to this dtype: its number plus one
  int8_t default_dtype = -1;       // what is made by default is of this one by then, and was of another when the program was captured
  int32_t view = -1;               // of Root::views: those after it gave none
  int64_t batch = 0;               // of is_grads_batched: so many in one, whose strides are always its own, along
  int32_t batch_dim = 0;           // this dim
  std::vector<uint32_t> unasked;   // gradients that nobody asks for, where that shows: what leads to them draws, or has gradients itself
  bool stops = false;              // it is none: the gradient that others bring there is handed on, and not gone on with
  bool without = false;            // it is none: a backward comes there without, and runs a derivative of the user's behind it
  bool is_own() const { return !strides.empty() || conj || neg; }
  bool is_expanded(size_t dim) const { return std::find(expanded.begin(), expanded.end(), dim) != expanded.end(); }
  auto operator<=>(const TangentLayout&) const = default;
};

// Level 0 is the user's program. The program of level n + 1 computes the gradients of level n from what that was given and the tangents; gradients of
// gradients are its gradients.
struct JointProgram {
  size_t level = 0;
  c10::ScalarType default_dtype = c10::get_default_dtype_as_scalartype();
  Program program;               // inputs count `given`; `graph` is as recorded and may still grow
  std::vector<ir::Value> given;  // what the forward is given: arguments, captured tensors; above level 0 also what was kept, random values, tangents
  std::unordered_set<ir::Value> unkept;  // of `given`, without a tensor: random values that were not kept, and what written arguments were
  std::vector<ir::Value> results;        // of `given`: what the programs of the levels below have returned, and users can change
  std::vector<ir::Value> outputs;        // what the program returns and writes, then the values of `gradients`
  uint32_t num_forward = 0;              // outputs before the gradients'
  uint32_t begin = 0;                    // ids from here on: nodes recorded by what it computes (above level 0)
  uint32_t backward = 0;                 // ids from here on: nodes recorded while the gradients were computed
  uint32_t end = UINT32_MAX;             // ids from here on: recorded for other gradients, later
  std::vector<uint32_t> begins;          // `backward` of each level below, the lowest first

  // What is behind a place where gradients come in.
  struct Way {
    std::vector<uint32_t> behind;  // places that its gradient comes to
  };
  // A result, the memory that several results are views of, or an input that was written: gradients come back through it.
  struct Root : Way {
    uint32_t output;
    ir::Value tangent;            // graph input: its gradient, of the same type
    std::vector<uint32_t> views;  // results that are its views, if it is none: gradients come first through the last
    int32_t written = -1;         // which of `given`
    std::string refuses;          // what a backward() through it raises, which grad() does not come to
    bool added = false;           // all that is done with the tangent is adding it to another gradient (torch/absent.h)
  };
  // An input of one of eager's nodes of which nobody was given the result, or
  struct Inner : Way {
    ir::Value tangent;
    int32_t view = -1;   // this result, a view: gradients come in through what it is a view of
    int32_t below = -1;  // or this place of the level below, whose gradients may stop where someone looks at them
  };
  // What autograd sees as one node. It begins at the roots of one of eager's nodes to which others lead, or where gradients meet that come from
  // several parts; those in front, the last: at roots to which none leads, all whose gradients meet in the program.
  struct Part {
    std::vector<uint32_t> places;  // its inputs
    std::vector<uint32_t> edges;   // where its gradients go: of `gradients`, then `past_raising`
    std::vector<uint32_t> stops;   // and places, behind any of its roots
  };
  std::vector<Root> roots;                   // empty: nothing needs gradients, `program` is all there is
  std::vector<Inner> inner;                  // places are counted through roots and these
  std::vector<Part> parts;                   // each behind those that lead to it; empty: one has all roots, and nothing to be seen behind them
  uint32_t first_front = 0;                  // of the parts: nothing leads to the roots of those from here on
  std::vector<std::vector<uint32_t>> nodes;  // of a part in front: its roots of one of eager's nodes each, in the order in which those were made
  std::vector<Gradient> gradients;           // only where eager has one
  std::vector<uint32_t> past_raising;        // of `given`: steps lead to them that give them none, or raise
  std::shared_ptr<const Tape> tape, below;   // what eager's autograd does in a backward (torch/tape.h), and that of the level below

  std::vector<std::pair<uint32_t, ir::Value>> assigned;  // of Tape::views, those whose .data it found assigned to: what of `given` it reads for them

  // A value that users can change, as it was when the program of that level ran: what that computed of it is computed again of this, which is given.
  struct Was {
    ir::Value now;
    size_t level;
    ir::Value was;
  };
  std::vector<Was> was;

  size_t places() const { return roots.size() + inner.size(); }
  ir::Value tangent(size_t place) const { return place < roots.size() ? roots[place].tangent : inner[place - roots.size()].tangent; }
  Way& way(size_t place) {
    if (place < roots.size()) return roots[place];
    return inner[place - roots.size()];
  }
  const Way& way(size_t place) const { return const_cast<JointProgram*>(this)->way(place); }
  // Of an autograd node's edges: those of `gradients`, of `past_raising`, and then to places.
  uint32_t edge_to(size_t place) const { return static_cast<uint32_t>(gradients.size() + past_raising.size() + place); }
  uint32_t place_of(ir::Value v) const {  // among `given`
    const auto at = std::find(given.begin(), given.end(), v);
    VT_CHECK(at != given.end(), "a gradient of something that was not given");
    return static_cast<uint32_t>(at - given.begin());
  }
};

}  // namespace vitrify
