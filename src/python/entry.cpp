#include "python/entry.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>
#include <unordered_set>

#include "python/errors.h"
#include "python/symbols.h"
#include "python/turns.h"
#include "support/counters.h"
#include "support/eager.h"
#include "torch/executor.h"
#include "torch/learned.h"
#include "torch/mode.h"
#include "torch/tracer.h"
#include "torch/training.h"

namespace vitrify::python {
namespace {

constexpr int kMaxRefusals = 4;
constexpr size_t kMaxWays = 4;  // plans for one signature, by what its content decides
using Tensors = c10::SmallVector<PyObject*, 16>;

// One call in either of the two forms CPython uses.
struct Call {
  PyObject* const* args;
  size_t nargs;
  PyObject* kwnames = nullptr;  // vectorcall form: values follow the positional arguments
  PyObject* tuple = nullptr;    // tp_call form
  PyObject* dict = nullptr;
  size_t nkw() const { return kwnames ? PyTuple_GET_SIZE(kwnames) : dict ? PyDict_GET_SIZE(dict) : 0; }
};

thread_local Attempt* attempt_here = nullptr;
thread_local std::shared_ptr<Entry>* served_here = nullptr;  // by the innermost call of this thread

PyObject* call_target(PyObject* f, const Call& c) {
  return c.tuple ? PyObject_Call(f, c.tuple, c.dict) : PyObject_Vectorcall(f, c.args, c.nargs, c.kwnames);
}

bool match_call(const Signature& s, const Call& c, Tensors& tensors) {
  if (c.nargs != s.args.size() || c.nkw() != s.kwargs.size()) return false;
  for (size_t i = 0; i < c.nargs; ++i)
    if (!match(s.args[i], c.args[i], &s.metas, tensors)) return false;
  if (s.kwargs.empty()) return true;
  auto one = [&](size_t i, PyObject* name, PyObject* value) {
    auto& [want, tree] = s.kwargs[i];
    return (name == want.get() || same_value(name, want.get())) && match(tree, value, &s.metas, tensors);
  };
  if (c.kwnames) {
    for (size_t i = 0; i < s.kwargs.size(); ++i)
      if (!one(i, PyTuple_GET_ITEM(c.kwnames, i), c.args[c.nargs + i])) return false;
    return true;
  }
  Py_ssize_t pos = 0;
  PyObject *k, *v;
  for (size_t i = 0; PyDict_Next(c.dict, &pos, &k, &v); ++i)
    if (!one(i, k, v)) return false;
  return true;
}

bool repeats(const Tensors& tensors) {
  if (tensors.size() > 16) return std::unordered_set<PyObject*>(tensors.begin(), tensors.end()).size() < tensors.size();
  for (size_t i = 1; i < tensors.size(); ++i)
    if (std::find(tensors.begin(), tensors.begin() + i, tensors[i]) != tensors.begin() + i) return true;
  return false;
}

// Of the tensors that the program has found, the first in that memory.
int32_t captured_in(const Entry& e, const void* storage) {
  const auto at = std::ranges::find(
      e.captured, storage, [](const auto& c) -> const void* { return c.first.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(); });
  return at == e.captured.end() ? -1 : static_cast<int32_t>(at - e.captured.begin());
}

// A run tells apart what overlaps; one tensor by two ways is not what a plan that writes to it was made for.
bool holds_itself(const Entry& e, PyObject* t) {
  return std::ranges::any_of(e.captured, [&](const auto& c) { return c.first.is_same(THPVariable_Unpack(t)); });
}

bool reaches(const Entry& e, PyObject* t) {
  return std::ranges::any_of(e.reached, [&](const auto& r) { return r.first._unsafe_get_target() == THPVariable_Unpack(t).unsafeGetTensorImpl(); });
}

bool aliases_as_captured(const Entry& e, const Tensors& tensors) {
  if (!e.alias_of.empty()) {
    c10::SmallVector<const void*, 16> storages;
    for (PyObject* t : tensors) storages.push_back(THPVariable_Unpack(t).unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    for (size_t i = 0; i < storages.size(); ++i) {
      size_t first = 0;
      while (storages[first] != storages[i]) ++first;
      if (first != e.alias_of[i] || (tensors[first] == tensors[i]) != e.same_object[i]) return false;
      if (e.captured_alias.empty()) continue;
      const int32_t captured = captured_in(e, storages[i]);
      if (captured != e.captured_alias[i] || (captured >= 0 && holds_itself(e, tensors[i])) || (e.freezes && reaches(e, tensors[i]))) return false;
    }
  }
  // Programs, and torch's modules, ask whether one object was given twice.
  return !(e.alias_of.empty() && e.graph && repeats(tensors));
}

// Of one object that was given twice, hooks may have made two, which then have the same elements.
bool elements_as_captured(const Entry& e, const Tensors& tensors) {
  if (aliases_as_captured(e, tensors)) return true;
  if (e.alias_of.empty() ? repeats(tensors) : !e.captured_alias.empty()) return false;
  for (size_t i = 0; i < e.alias_of.size(); ++i) {
    const at::Tensor &t = THPVariable_Unpack(tensors[i]), &first = THPVariable_Unpack(tensors[e.alias_of[i]]);
    if (e.same_object[i] && !t.is_same(first) && !at::equal(t.detach(), first.detach())) return false;
  }
  return true;
}

bool match_entry(const Entry& e, const Signature& signature, const Call& c, Tensors& tensors, std::vector<double>& floats,
                 bool (*alike)(const Entry&, const Tensors&) = aliases_as_captured) {
  tensors.clear();
  if (!match_call(signature, c, tensors)) return false;
  for (auto& [t, meta] : e.captured)
    if (!meta.matches(t.unsafeGetTensorImpl())) return false;
  for (auto& [t, meta] : e.reached)
    if (t.expired() || !meta.matches(t._unsafe_get_target())) return false;
  if (!alike(e, tensors)) return false;
  if (e.guards && !e.guards->check()) return false;
  if (e.live && !e.live->check(tensors, floats)) return false;
  return !e.symbols || e.symbols->check(tensors);
}

// Without the GIL another thread's failure may take the entry's graph: `graph` is the caller's own.
void run_graph(CompiledGraph& graph, const Entry& e, at::ArrayRef<at::Tensor> in, std::vector<at::Tensor>& out, at::ArrayRef<double> floats) {
  if (e.release_gil) {
    pybind11::gil_scoped_release no_gil;
    graph.run_live(in, out, floats);
  } else {
    graph.run_live(in, out, floats);
  }
}

// Eager runs the call, since the program has gone another way, as it may again: unless it mostly does, the plan stays. False: a warning is an error.
bool refused_for_good(Entry& e, const std::string& why) {
  if (++e.refused <= e.served + kMaxRefusals || !e.graph) return true;
  e.graph = nullptr;
  counters().fallbacks.fetch_add(1, std::memory_order_relaxed);
  return PyErr_WarnFormat(error_types().warning, 2, "vitrify: a compiled program runs eagerly from now on, since most of its calls differ: %s",
                          why.c_str()) >= 0;
}

// Null without an exception: the plan failed by a bug of ours before it wrote anything; the entry is eager from now on.
// `failed`: by what an op or the data raised.
PyObject* run_entry(const std::shared_ptr<Entry>& e, const Tensors& tensors, at::ArrayRef<double> floats, Attempt& attempt, bool& failed) {
  HANDLE_TH_ERRORS
  const std::shared_ptr<CompiledGraph> graph = e->graph;
  c10::SmallVector<at::Tensor, 8> in;
  for (PyObject* t : tensors) in.push_back(THPVariable_Unpack(t));
  // One buffer of results per thread; taken out while in use, since an extern may come back here.
  static thread_local std::vector<at::Tensor> spare;
  std::vector<at::Tensor> out = std::move(spare);
  out.clear();
  const uint64_t effects = effects_begun();
  struct Given {
    explicit Given(const Attempt& a) : any(a.effects != nullptr) {
      if (any) give_effects(a.effects);
    }
    ~Given() {
      if (any) give_effects(nullptr);
    }
    bool any;
  } given(attempt);
  try {
    run_graph(*graph, *e, in, out, floats);
  } catch (const capture::RunRefused& refusal) {
    attempt.why = refusal.what();
    if (refusal.effects) attempt.effects = refusal.effects;
    if (dynamic_cast<const capture::WayRefused*>(&refusal))
      attempt.refused.push_back(e);
    else
      refused_for_good(*e, attempt.why);
    return nullptr;
  } catch (const capture::CallRefused& refusal) {
    attempt.why = refusal.what();
    attempt.tells = true;
    return nullptr;
  } catch (const capture::PlanRefused& refusal) {
    if (effects_begun() != effects) {
      attempt.effects = take_effects_of_failure();
      if (!attempt.effects) {
        PyErr_SetString(error_types().compiler, refusal.what());
        return nullptr;
      }
    }
    // The next call is captured again, with what was learned; a program that keeps failing stays eager.
    attempt.why = refusal.what();
    e->graph = nullptr;
    e->stale = true;
    counters().fallbacks.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  } catch (const InternalError& bug) {
    if (effects_begun() != effects) {
      PyErr_SetString(error_types().compiler, bug.what());
      return nullptr;
    }
    e->graph = nullptr;
    note_eager(std::string("internal error: a compiled call failed: ") + bug.what());
    PyErr_WarnFormat(error_types().warning, 2, "vitrify: a compiled call failed and runs eagerly from now on: %s", bug.what());
    return nullptr;
  } catch (...) {
    // Nothing has been written yet. Eager makes the writes that come before the error, and raises it as it does.
    if (effects_begun() != effects) {
      attempt.effects = take_effects_of_failure();
      if (!attempt.effects) throw;
    }
    if (PyErr_Occurred()) throw;  // of a hook on what is saved: warnings given before go past it
    failed = true;
    return nullptr;
  }
  ++e->served;
  if (served_here) *served_here = e;
  const Tree& tree = e->result->tree;
  if (tree.kind == TreeKind::Tensor) {
    PyObject* r = THPVariable_Wrap(std::move(out[0]));
    out.clear();
    spare = std::move(out);
    return r;
  }
  c10::SmallVector<PyObject*, 8> leaves;
  for (auto& t : out) leaves.push_back(THPVariable_Wrap(std::move(t)));
  out.clear();
  spare = std::move(out);
  PyObject* r = rebuild(tree, leaves.data());
  for (PyObject* l : leaves) Py_DECREF(l);
  return r;
  END_HANDLE_TH_ERRORS
}

// Plans that have refused a call which eager runs in the end. False: a warning is an error.
bool settle(const Attempt& attempt) {
  for (auto& e : attempt.refused) {
    e->settled = true;
    if (!refused_for_good(*e, attempt.why)) return false;
  }
  return true;
}

// What has run of the call gives what it gave.
PyObject* call_after(const std::shared_ptr<const Effects>& effects, PyObject* f, const Call& c) {
  if (!effects) return call_target(f, c);
  const Ref door = checked(PyImport_ImportModule("vitrify._door")), mode = checked(PyObject_CallMethod(door.get(), "_CaptureMode", nullptr));
  const Resumed resumed(effects, mode.get());
  return call_target(f, c);
}

PyObject* run_eagerly(State& s, const Call& c, const Attempt& attempt) {
  if (!attempt.why.empty()) note_eager(attempt.why);
  if (attempt.tells && s.told.insert(attempt.why).second &&
      PyErr_WarnFormat(error_types().warning, 2, "vitrify: a call of a compiled program runs eagerly: %s", attempt.why.c_str()) < 0)
    return nullptr;
  counters().eager_calls.fetch_add(1, std::memory_order_relaxed);
  return call_after(attempt.effects, s.original.get(), c);
}

// Null without an exception: no entry matches.
PyObject* try_entries(State& s, const Call& c, Attempt& attempt) {
  ModeState modes = ModeState::current();
  Tensors tensors;
  std::vector<double> floats;
  bool again = true;  // where a plan has refused the call: other threads may have moved the others meanwhile
  for (size_t i = 0; i < s.entries.size() || (again && !attempt.refused.empty()); ++i) {
    if (i >= s.entries.size()) {
      if (s.entries.empty()) break;
      again = false;
      i = 0;
    }
    std::shared_ptr<Entry> e = s.entries[i];  // matching or running may let other threads change the list
    if (!(e->signature->modes == modes) || std::ranges::find(attempt.refused, e) != attempt.refused.end() ||
        !match_entry(*e, *e->signature, c, tensors, floats))
      continue;
    if (i && i < s.entries.size() && s.entries[i] == e) std::swap(s.entries[0], s.entries[i]);
    bool failed = false;
    if (e->graph) {
      const size_t refused = attempt.refused.size();
      PyObject* r = run_entry(e, tensors, floats, attempt, failed);
      if (r || PyErr_Occurred()) return r;
      if (attempt.refused.size() > refused) continue;
      if (e->stale && s.refusals++ < kMaxRefusals) {
        std::erase(s.entries, e);
      } else if (e->stale &&
                 PyErr_WarnFormat(error_types().warning, 2, "vitrify: a compiled program runs eagerly from now on: %s", attempt.why.c_str()) < 0) {
        return nullptr;
      }
    }
    PyObject* r = run_eagerly(s, c, attempt);
    if (r && failed) {  // the program catches the error, or it is ours
      constexpr const char* kWhy = "a compiled call raised what eager does not, or what the program catches";
      counters().fallbacks.fetch_add(1, std::memory_order_relaxed);
      note_eager(kWhy);
      const bool first = e->refused == 0;
      if (!refused_for_good(*e, kWhy) || (first && PyErr_WarnFormat(error_types().warning, 2, "vitrify: %s", kWhy) < 0)) Py_CLEAR(r);
    }
    return r;
  }
  if (attempt.refused.empty()) return nullptr;
  bool more = attempt.refused.size() < kMaxWays && !attempt.captured;
  for (auto& e : attempt.refused) more = more && e->graph && !e->settled;
  if (more) return nullptr;  // for a plan of where the program goes now
  return settle(attempt) ? run_eagerly(s, c, attempt) : nullptr;
}

PyObject* serve(PyObject* self, State& s, const Call& c) {
  Attempt attempt(s);
  if (PyObject* r = try_entries(s, c, attempt); r || PyErr_Occurred()) return r;
  Ref tuple = c.tuple ? Ref::borrow(c.tuple) : Ref::steal(PyTuple_New(c.nargs));
  Ref dict = Ref::steal(c.dict ? PyDict_Copy(c.dict) : PyDict_New());
  if (!tuple || !dict) return nullptr;
  if (!c.tuple) {
    for (size_t i = 0; i < c.nargs; ++i) PyTuple_SET_ITEM(tuple.get(), i, Py_NewRef(c.args[i]));
    for (size_t i = 0; i < c.nkw(); ++i)
      if (PyDict_SetItem(dict.get(), PyTuple_GET_ITEM(c.kwnames, i), c.args[c.nargs + i]) < 0) return nullptr;
  }
  struct Here {
    explicit Here(Attempt* a) : before(std::exchange(attempt_here, a)) {}
    ~Here() { attempt_here = before; }
    Attempt* before;
  } here(&attempt);
  return PyObject_CallFunctionObjArgs(s.miss.get(), self, tuple.get(), dict.get(), nullptr);
}

// A checkpoint's function is called again, and this call of it was served by `e`: again, whatever else would serve it now. Null without an exception:
// not this one. Modes, anomaly detection and settings of the process may be other ones around the backward, and arguments may have got a .grad or
// attributes since.
PyObject* serve_again(State& s, const std::shared_ptr<Entry>& e, const Call& c) {
  const std::shared_ptr<CompiledGraph> graph = e->graph;
  Signature then = *e->signature;
  for (TensorMeta& m : then.metas) m.argument = m.argument && e->live;
  Tensors tensors;
  std::vector<double> floats;
  if (!graph || !is_training(*graph) || !ModeState::current().grad() || !match_entry(*e, then, c, tensors, floats, elements_as_captured))
    return nullptr;
  Attempt attempt(s);
  bool failed = false;
  return run_entry(e, tensors, floats, attempt, failed);
}

PyObject* dispatch(PyObject* self, const Call& c) {
  const Ref alive = Ref::borrow(self);  // other threads may drop it from the function
  State& s = state_of(self);
  if (s.off || capture::has_mode()) return call_target(s.original.get(), c);
  std::shared_ptr<Entry> by;
  const struct Here {
    explicit Here(std::shared_ptr<Entry>* by) : before(std::exchange(served_here, by)) {}
    ~Here() { served_here = before; }
    std::shared_ptr<Entry>* before;
  } here(&by);
  try {
    Turn turn = Turn::next(self);
    if (turn.again()) {
      const std::shared_ptr<Entry> served = turn.served();
      if (!served) {
        Attempt eager(s);
        eager.why = "a checkpoint's function is called again, and ran eagerly the first time";
        return run_eagerly(s, c, eager);
      }
      if (PyObject* r = serve_again(s, served, c); r || PyErr_Occurred()) return r;
    }
    PyObject* r = serve(self, s, c);
    if (r && by) turn.note(by);
    return r;
  } catch (const std::exception& e) {
    if (!PyErr_Occurred()) PyErr_SetString(error_types().error, e.what());
    return nullptr;
  }
}

// ---- the state object

struct StateObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  State* state;
  PyObject* dict;
  PyObject* weakrefs;
};

PyObject* state_vectorcall(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return dispatch(self, {args, (size_t)PyVectorcall_NARGS(nargsf), kwnames && PyTuple_GET_SIZE(kwnames) ? kwnames : nullptr});
}

int state_traverse(PyObject* o, visitproc visit, void* arg) {
  auto* s = (StateObject*)o;
  Py_VISIT(Py_TYPE(o));
  Py_VISIT(s->dict);
  if (!s->state) return 0;
  Py_VISIT(s->state->original.get());
  Py_VISIT(s->state->miss.get());
  int result = 0;
  for (auto& e : s->state->entries) {
    for (auto& t : e->signature->args) t.visit(visit, arg, result);
    for (auto& [k, t] : e->signature->kwargs) t.visit(visit, arg, result);
    if (e->guards && e->guards.use_count() == 1) e->guards->visit(visit, arg, result);
    if (e->live) e->live->visit(visit, arg, result);
    if (e->result && e->result.use_count() == 1) e->result->tree.visit(visit, arg, result);
  }
  return result;
}

int state_clear(PyObject* o) {
  auto* s = (StateObject*)o;
  Py_CLEAR(s->dict);
  if (s->state) {
    auto entries = std::move(s->state->entries);
    s->state->entries.clear();
    s->state->off = true;
    entries.clear();
  }
  return 0;
}

void state_dealloc(PyObject* o) {
  auto* s = (StateObject*)o;
  PyObject_GC_UnTrack(o);
  if (s->weakrefs) PyObject_ClearWeakRefs(o);
  state_clear(o);
  delete s->state;
  PyTypeObject* t = Py_TYPE(o);
  t->tp_free(o);
  Py_DECREF(t);
}

PyObject* state_name() {
  static PyObject* n = PyUnicode_InternFromString("__vitrify__");
  return n;
}

vectorcallfunc& plain_function_vectorcall() {
  static vectorcallfunc f = nullptr;
  return f;
}

PyObject* function_entry(PyObject* f, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  PyObject* state = installed_state(f);
  if (!state) return plain_function_vectorcall()(f, args, nargsf, kwnames);  // the user cleared __dict__
  return state_vectorcall(state, args, nargsf, kwnames);
}

// ---- twins

struct Twin {
  Ref original, state;
};
std::unordered_map<PyObject*, Twin>& twins() {
  static auto* m = new std::unordered_map<PyObject*, Twin>();
  return *m;
}
std::unordered_map<PyTypeObject*, PyTypeObject*>& twin_bases() {
  static auto* m = new std::unordered_map<PyTypeObject*, PyTypeObject*>();
  return *m;
}
PyObject* resync_hook = nullptr;

PyTypeObject* base_of(PyTypeObject* t) {
  auto& bases = twin_bases();
  for (; t; t = t->tp_base) {
    auto it = bases.find(t);
    if (it != bases.end()) return it->second;
  }
  return &PyBaseObject_Type;
}

bool out_of_step(PyObject* twin, const Twin& t) {
  PyObject* o = t.original.get();
  auto it = twin_bases().find(Py_TYPE(twin));
  if (it != twin_bases().end() && it->second != Py_TYPE(o)) return true;
  PyObject **a = _PyObject_GetDictPtr(twin), **b = _PyObject_GetDictPtr(o);
  return a && b && *a != *b;
}

bool resync(PyObject* twin, const Twin& t) {
  if (!out_of_step(twin, t)) return true;
  Ref original = t.original;
  return (bool)Ref::steal(PyObject_CallFunctionObjArgs(resync_hook, twin, original.get(), nullptr));
}

PyObject* twin_tp_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  auto it = twins().find(self);
  if (it == twins().end()) return base_of(Py_TYPE(self))->tp_call(self, args, kwargs);
  if (!resync(self, it->second)) return nullptr;
  Ref state = it->second.state;
  return dispatch(state.get(), {((PyTupleObject*)args)->ob_item, (size_t)PyTuple_GET_SIZE(args), nullptr, args,
                                kwargs && PyDict_GET_SIZE(kwargs) ? kwargs : nullptr});
}

PyObject* twin_tp_getattro(PyObject* self, PyObject* name) {
  auto it = twins().find(self);
  if (it != twins().end() && !resync(self, it->second)) return nullptr;
  return base_of(Py_TYPE(self))->tp_getattro(self, name);
}

PyObject* twin_method_call(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Ref tuple = Ref::steal(PyTuple_New(nargs));
  Ref dict = Ref::steal(PyDict_New());
  if (!tuple || !dict) return nullptr;
  for (Py_ssize_t i = 0; i < nargs; ++i) PyTuple_SET_ITEM(tuple.get(), i, Py_NewRef(args[i]));
  for (Py_ssize_t i = 0; kwnames && i < PyTuple_GET_SIZE(kwnames); ++i)
    if (PyDict_SetItem(dict.get(), PyTuple_GET_ITEM(kwnames, i), args[nargs + i]) < 0) return nullptr;
  return twin_tp_call(self, tuple.get(), dict.get());
}

}  // namespace

// ---- signatures, results, entries

std::shared_ptr<Signature> Signature::of(PyObject* args, PyObject* kwargs) {
  auto s = std::make_shared<Signature>();
  s->modes = ModeState::current();
  Flattener f;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) s->args.push_back(f.flatten(PyTuple_GET_ITEM(args, i), fmt::format("argument {}", i)));
  Py_ssize_t pos = 0;
  PyObject *k, *v;
  while (kwargs && PyDict_Next(kwargs, &pos, &k, &v))
    s->kwargs.emplace_back(Ref::borrow(k), f.flatten(v, fmt::format("argument '{}'", PyUnicode_Check(k) ? PyUnicode_AsUTF8(k) : "?")));
  for (PyObject* t : f.tensors) {
    s->metas.push_back(TensorMeta::of(THPVariable_Unpack(t), Py_TYPE(t)));
    s->tensors.push_back(Ref::borrow(t));
  }
  s->names = std::move(f.names);
  s->containers = std::move(f.containers);
  for (PyObject* o : f.objects) s->objects.push_back(Ref::borrow(o));
  return s;
}

std::shared_ptr<Result> Result::of(PyObject* o, const std::vector<PyObject*>& argument_containers, PyObject* known) {
  auto r = std::make_shared<Result>();
  Flattener f;
  f.result = true;
  f.known = known;
  r->tree = f.flatten(o, "the result");
  for (PyObject* c : f.containers)
    if (std::find(argument_containers.begin(), argument_containers.end(), c) != argument_containers.end())
      throw Unsupported("the result holds a container that was passed in");
  for (PyObject* t : f.tensors) r->tensors.push_back(Ref::borrow(t));
  return r;
}

std::shared_ptr<Entry> Entry::make(std::shared_ptr<Signature> s, std::shared_ptr<Guards> g, std::shared_ptr<CompiledGraph> graph,
                                   std::shared_ptr<Result> result, const std::vector<at::Tensor>& watched_grads, std::vector<Live::Float> floats,
                                   const std::vector<at::Tensor>& reached) {
  auto e = std::make_shared<Entry>();
  e->guards = std::move(g);
  e->graph = std::move(graph);
  e->result = std::move(result);
  std::vector<uint32_t> alias_of;
  std::vector<bool> same_object;
  bool aliased = false;
  std::unordered_map<const void*, uint32_t> first;
  for (uint32_t i = 0; i < s->tensors.size(); ++i) {
    const at::Tensor& t = THPVariable_Unpack(s->tensors[i].get());
    uint32_t at = t.has_storage() ? first.emplace(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), i).first->second : i;
    alias_of.push_back(at);
    same_object.push_back(s->tensors[at].get() == s->tensors[i].get());
    if (at != i) {
      aliased = true;
      s->metas[i].exact_offset = s->metas[at].exact_offset = true;
    }
  }
  e->same_object = std::move(same_object);
  if (!e->graph && aliased) e->alias_of = alias_of;  // the reason may be just that
  if (e->graph) {
    const Program& p = e->graph->program();
    bool looks_at_memory = false;
    const auto read = [&](uint32_t input, TensorMeta& m) {
      for (const InputFact& f : p.facts) {
        if (f.input != input || f.fact == Fact::Sought || f.fact == Fact::Crossed) continue;
        m.exact_view = m.exact_view || f.fact == Fact::View;
        m.exact_memory = m.exact_memory || f.fact == Fact::Memory;
        m.exact_offset = m.exact_offset || f.fact != Fact::View;
        looks_at_memory = looks_at_memory || f.fact == Fact::Memory;
      }
    };
    for (uint32_t i = 0; i < s->metas.size(); ++i) read(i, s->metas[i]);
    for (uint32_t i = 0; i < p.captured.size(); ++i)
      if (const at::Tensor& t = p.captured[i]; t.defined()) {
        e->captured.emplace_back(t, TensorMeta::of(t, nullptr));
        read(p.num_args + i, e->captured.back().second);
      }
    std::unordered_set<const c10::TensorImpl*> held;
    for (const auto& [t, _] : e->captured) held.insert(t.unsafeGetTensorImpl());
    for (const at::Tensor& t : reached)
      if (!held.contains(t.unsafeGetTensorImpl())) e->reached.emplace_back(t.getIntrusivePtr(), TensorMeta::of(t, nullptr));
    // Without a write, inputs that start to overlap change nothing, but to whom gradients go.
    const bool aliases_count = !p.mutations.empty() || looks_at_memory || p.goes_back || p.freezes;
    e->freezes = p.freezes;
    if (aliased || aliases_count) e->alias_of = std::move(alias_of);
    if (aliases_count)
      for (const Ref& t : s->tensors)
        e->captured_alias.push_back(captured_in(*e, THPVariable_Unpack(t.get()).unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()));
    for (auto* n : p.graph->nodes())
      if (n->op->flags & ir::kLooksAtOffset)
        for (auto& m : s->metas) m.exact_offset = true;
    e->symbols = Symbols::of(p.graph, s->metas);
    e->release_gil = e->graph->estimated_us() > 50;
  }
  const Program* p = e->graph ? &e->graph->program() : nullptr;
  if (!watched_grads.empty() || !floats.empty() || (p && (!p->live.empty() || !p->grad_writes.empty() || p->numbers)))
    e->live = std::make_unique<Live>(e->graph, s->tensors, watched_grads, std::move(floats));
  s->tensors.clear();
  s->objects.clear();
  e->signature = std::move(s);
  return e;
}

bool Entry::holds(const at::TensorImpl* t) const {
  return std::ranges::any_of(captured, [&](const auto& c) { return c.first.unsafeGetTensorImpl() == t; }) || (live && live->holds(t));
}

bool Entry::dead() const {
  bool gone = false;
  auto scan = [&](auto& self, const Tree& t) -> void {
    if (t.kind == TreeKind::Object && t.weak && PyWeakref_GET_OBJECT(t.value.get()) == Py_None) gone = true;
    for (auto& c : t.children) self(self, c);
  };
  for (auto& t : signature->args) scan(scan, t);
  for (auto& [k, t] : signature->kwargs) scan(scan, t);
  return gone;
}

// ---- objects

PyTypeObject* state_type() {
  static PyTypeObject* type = [] {
    static PyMemberDef members[] = {{"__vectorcalloffset__", Py_T_PYSSIZET, offsetof(StateObject, vectorcall), Py_READONLY, nullptr},
                                    {"__dictoffset__", Py_T_PYSSIZET, offsetof(StateObject, dict), Py_READONLY, nullptr},
                                    {"__weaklistoffset__", Py_T_PYSSIZET, offsetof(StateObject, weakrefs), Py_READONLY, nullptr},
                                    {nullptr}};
    static PyGetSetDef getset[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr}, {nullptr}};
    static PyType_Slot slots[] = {{Py_tp_dealloc, (void*)state_dealloc},
                                  {Py_tp_traverse, (void*)state_traverse},
                                  {Py_tp_clear, (void*)state_clear},
                                  {Py_tp_call, (void*)PyVectorcall_Call},
                                  {Py_tp_members, members},
                                  {Py_tp_getset, getset},
                                  {0, nullptr}};
    static PyType_Spec spec = {"vitrify._C.State", sizeof(StateObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    return (PyTypeObject*)PyType_FromSpec(&spec);
  }();
  return type;
}

State& state_of(PyObject* o) { return *((StateObject*)o)->state; }

PyObject* make_state(PyObject* original, PyObject* miss) {
  auto* o = (StateObject*)state_type()->tp_alloc(state_type(), 0);
  if (!o) return nullptr;
  o->vectorcall = state_vectorcall;
  o->state = new State{Ref::borrow(original), Ref::borrow(miss), {}, false};
  return (PyObject*)o;
}

PyObject* call_entries(PyObject* self, PyObject* args, PyObject* kwargs, bool& hit) {
  Call c{((PyTupleObject*)args)->ob_item, (size_t)PyTuple_GET_SIZE(args), nullptr, args, PyDict_GET_SIZE(kwargs) ? kwargs : nullptr};
  State& s = state_of(self);
  Attempt fresh(s);
  PyObject* r = try_entries(s, c, attempt_here && attempt_here->state == &s ? *attempt_here : fresh);
  hit = r || PyErr_Occurred();
  return r;
}

void settle(PyObject* self) {
  if (const Attempt* a = attempt_of(self); a && !settle(*a)) throw PythonError();
}

Attempt* attempt_of(PyObject* self) { return attempt_here && attempt_here->state == &state_of(self) ? attempt_here : nullptr; }

PyObject* call_eagerly(PyObject* self, PyObject* args, PyObject* kwargs) {
  Call c{((PyTupleObject*)args)->ob_item, (size_t)PyTuple_GET_SIZE(args), nullptr, args, PyDict_GET_SIZE(kwargs) ? kwargs : nullptr};
  const Attempt* a = attempt_of(self);
  return call_after(a ? a->effects : nullptr, state_of(self).original.get(), c);
}

bool has_entry(PyObject* self, PyObject* args, PyObject* kwargs) {
  Call c{((PyTupleObject*)args)->ob_item, (size_t)PyTuple_GET_SIZE(args), nullptr, args, PyDict_GET_SIZE(kwargs) ? kwargs : nullptr};
  ModeState modes = ModeState::current();
  Tensors tensors;
  std::vector<double> floats;
  auto entries = state_of(self).entries;
  const Attempt* attempt = attempt_of(self);
  return std::any_of(entries.begin(), entries.end(), [&](auto& e) {
    if (attempt && std::ranges::find(attempt->refused, e) != attempt->refused.end()) return false;
    return e->signature->modes == modes && match_entry(*e, *e->signature, c, tensors, floats);
  });
}

void install(PyObject* function, PyObject* state) {
  auto* f = (PyFunctionObject*)function;
  if (!plain_function_vectorcall()) plain_function_vectorcall() = f->vectorcall;
  if (!f->func_dict) f->func_dict = checked(PyDict_New()).release();
  if (PyDict_SetItem(f->func_dict, state_name(), state) < 0) throw PythonError();
  PyFunction_SetVectorcall(f, function_entry);
}

PyObject* installed_state(PyObject* function) {
  auto* f = (PyFunctionObject*)function;
  if (!PyFunction_Check(function) || f->vectorcall == plain_function_vectorcall() || !f->func_dict) return nullptr;
  PyObject* s = PyDict_GetItemWithError(f->func_dict, state_name());
  return s && Py_TYPE(s) == state_type() ? s : nullptr;
}

void arm_twin_type(PyObject* type, PyObject* base, PyObject* hook) {
  auto* t = (PyTypeObject*)type;
  twin_bases()[t] = (PyTypeObject*)base;
  Py_INCREF(type);
  Py_INCREF(base);
  t->tp_call = twin_tp_call;
  t->tp_getattro = twin_tp_getattro;
  Py_XSETREF(resync_hook, Py_NewRef(hook));
}

void link_twin(PyObject* twin, PyObject* original, PyObject* state) { twins()[twin] = {Ref::borrow(original), Ref::borrow(state)}; }

void unlink_twin(PyObject* twin) {
  auto it = twins().find(twin);
  if (it == twins().end()) return;
  Twin dead = std::move(it->second);  // dropping them may run user code
  twins().erase(it);
}

PyObject* twin_original(PyObject* twin) {
  auto it = twins().find(twin);
  return it == twins().end() ? nullptr : it->second.original.get();
}

PyObject* twin_state(PyObject* twin) {
  auto it = twins().find(twin);
  return it == twins().end() ? nullptr : it->second.state.get();
}

PyObject* twin_call_descriptor() {
  static PyMethodDef def = {"__call__", (PyCFunction)(void*)twin_method_call, METH_FASTCALL | METH_KEYWORDS, "Runs the compiled module."};
  return PyDescr_NewMethod(&PyBaseObject_Type, &def);
}

}  // namespace vitrify::python
