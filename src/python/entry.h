// The hot path: from a Python call to a compiled plan. No Python code runs on a hit.
#pragma once
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "python/guards.h"
#include "python/live.h"
#include "python/tree.h"
#include "torch/compiled.h"
#include "torch/effects.h"

namespace vitrify::python {

// What the arguments of a call look like, and the modes it was made under.
struct Signature {
  ModeState modes;
  std::vector<Tree> args;
  std::vector<std::pair<Ref, Tree>> kwargs;  // in the caller's order
  std::vector<TensorMeta> metas;
  std::vector<Ref> tensors;  // the real ones; dropped once compiled
  std::vector<std::string> names;
  std::vector<Ref> objects;
  std::vector<PyObject*> containers;  // identities only

  static std::shared_ptr<Signature> of(PyObject* args, PyObject* kwargs);
};

struct Result {
  Tree tree;
  std::vector<Ref> tensors;
  // `known`: dict by id of what was there before the program ran.
  static std::shared_ptr<Result> of(PyObject*, const std::vector<PyObject*>& argument_containers, PyObject* known);
};

class Symbols;
struct State;

struct Entry {
  std::shared_ptr<Signature> signature;
  std::shared_ptr<Guards> guards;
  std::vector<std::pair<at::Tensor, TensorMeta>> captured;  // live tensors besides the arguments
  // Others, which no op reads and the plan does not hold: the program may have asked for a dtype or a size.
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::TensorImpl>, TensorMeta>> reached;
  std::shared_ptr<CompiledGraph> graph;  // null: these calls run eagerly
  std::shared_ptr<Result> result;
  std::unique_ptr<Live> live;           // null: nothing is read anew
  std::shared_ptr<Symbols> symbols;     // null: static sizes
  std::vector<uint32_t> alias_of;       // per tensor: first one with the same storage; empty: not checked
  std::vector<bool> same_object;        // per tensor: whether that one is the very object
  std::vector<int32_t> captured_alias;  // per tensor: first of `captured` with the same storage, -1: none; empty: not checked
  bool stale = false;                   // recorded wrongly: to be captured again
  uint64_t served = 0, refused = 0;     // calls that ran, and that content led another way
  bool settled = false;                 // what it refuses runs eagerly: a plan captured for such a call did not serve it
  bool release_gil = false;
  bool freezes = false;  // as Program's

  // Fixes metadata checks to what the program depends on.
  static std::shared_ptr<Entry> make(std::shared_ptr<Signature>, std::shared_ptr<Guards>, std::shared_ptr<CompiledGraph>, std::shared_ptr<Result>,
                                     const std::vector<at::Tensor>& watched_grads, std::vector<Live::Float> floats,
                                     const std::vector<at::Tensor>& reached);
  bool dead() const;  // can never match again
  bool holds(const at::TensorImpl*) const;
};

struct State {
  Ref original, miss;
  std::vector<std::shared_ptr<Entry>> entries;
  bool off = false;            // everything eager
  int refusals = 0;            // plans that did not fit what ATen gave
  std::set<std::string> told;  // why single calls ran eagerly: each is said once
};

PyTypeObject* state_type();  // made at first use
State& state_of(PyObject* state_object);
PyObject* make_state(PyObject* original, PyObject* miss);

// A call under way: the plans that have refused it, and what their custom ops gave. The innermost of this thread, or null.
struct Attempt {
  explicit Attempt(State& s) : state(&s) {}
  State* state;
  std::vector<std::shared_ptr<Entry>> refused;
  bool captured = false;  // once more, since they have
  std::string why;
  bool tells = false;  // it is the user's to know
  std::shared_ptr<const Effects> effects;
};
Attempt* attempt_of(PyObject* state_object);
void settle(PyObject* state_object);  // no more plans for what the call has been refused for
// The call under way by the callable itself; what its custom ops have given they give again.
PyObject* call_eagerly(PyObject* state_object, PyObject* args, PyObject* kwargs);

// Runs a matching entry; `hit` says whether there was one.
PyObject* call_entries(PyObject* state, PyObject* args, PyObject* kwargs, bool& hit);
bool has_entry(PyObject* state, PyObject* args, PyObject* kwargs);

void install(PyObject* function, PyObject* state);  // gives a function object its own vectorcall
PyObject* installed_state(PyObject* function);      // borrowed, or null

// Twins of modules.
void arm_twin_type(PyObject* type, PyObject* base, PyObject* resync);
void link_twin(PyObject* twin, PyObject* original, PyObject* state);
void unlink_twin(PyObject* twin);
PyObject* twin_original(PyObject* twin);  // borrowed, or null
PyObject* twin_state(PyObject* twin);
PyObject* twin_call_descriptor();

}  // namespace vitrify::python
