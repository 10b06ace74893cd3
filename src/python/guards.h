// What must still hold for a compiled entry to be valid: thread-local modes, and the Python state the program could reach when it was captured.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "python/tree.h"

namespace vitrify::python {

// As saved_hooks_may_change() and saved_hooks_compute_again() (torch/saved_hooks.h) of hooks of Python.
bool python_hooks_may_change();
bool python_hooks_compute_again();
PyObject* pack_of_checkpoint();  // what such hooks pack with, borrowed; null: others are on, or none

// Everything outside the arguments that decides which ATen ops run: compared as one block.
struct ModeState {
  uint64_t included = 0, excluded = 0;
  uint64_t library = 0;   // library_state()
  uint32_t autograd = 0;  // grad, inference, forward-AD, view replay, anomaly bits
  uint32_t autocast = 0;  // dtypes and cache flag, when autocast is on
  int32_t threads = 0;
  uint16_t default_dtype = 0;
  uint8_t function_modes = 0;
  uint8_t hooks = 0;           // on saved tensors, of others than torch: they may give back something else
  int32_t device_context = 0;  // of torch.set_default_device or `with torch.device()`; -1: a mode of another kind
  bool operator==(const ModeState&) const = default;

  static ModeState current();
  bool grad() const { return autograd & 1; }
  // Why no compiled code may run under these modes; null when it may.
  const char* refusal() const;
};

// A snapshot of reachable Python state. Dicts are watched: while nothing was written to them, check() is a few pointer compares.
class Guards {
 public:
  Guards() = default;
  Guards(const Guards&) = delete;
  ~Guards();
  // keys null: every key.
  void add_dict(PyObject* dict, PyObject* keys_or_none, const std::string& name);
  // Of each dict what is there, or not there, under these names (a set of strings): the attributes of tensors.
  void add_names(PyObject* dicts_and_labels, PyObject* names);
  void add_attributes(PyObject* type, PyObject* keys, const std::string& name);  // those of a class
  void add_object(PyObject*);                                                    // its class and its __dict__ stay
  void add_list(PyObject* list, const std::string& name);                        // same elements
  void add_cell(PyObject* cell, const std::string& name);
  void add_slot(PyObject*, PyObject* member_descriptor, const std::string& name);
  void add_class(PyObject* type);                                      // of the user's: what it has is put back where the program writes it
  void add_type(PyObject* type);                                       // no attribute of the class or its bases changed
  void add_function(PyObject*);                                        // same code and defaults
  void add_buffer(PyObject*, const std::string& name);                 // same bytes
  void add_equal(PyObject*, PyObject* copy, const std::string& name);  // compares equal to the copy
  void watch();                                                        // from now on dict writes are seen

  bool check();
  // After a capture: names of what the program wrote, and the old contents put back.
  std::vector<std::string> undo_writes();
  void visit(int (*f)(PyObject*, void*), void* arg, int& result) const;

  std::atomic<bool> dirty{true};

 private:
  struct Names {
    std::vector<Ref> held;
    std::unordered_set<PyObject*> keys;  // interned
  };
  struct Dict {
    bool counts(PyObject* key) const { return !among || among->keys.contains(key); }
    Ref dict, type;  // of which it holds the attributes
    bool all = true;
    std::vector<std::pair<Ref, Ref>> items;  // value null: absent
    std::unordered_set<PyObject*> keys;      // interned names, when not `all`
    std::shared_ptr<const Names> among;      // `all` that are of these; null: of any name
    std::string name;
  };
  struct Object {
    Ref object;
    PyTypeObject* type;
    uintptr_t dict_word;
  };
  struct List {
    Ref list;
    std::vector<Ref> items;
    std::string name;
  };
  struct Cell {
    Ref cell;
    PyObject** at;
    Ref value;
    std::string name;
  };  // also a slot of an object
  struct Type {
    Ref type;
    unsigned version;
  };
  struct Function {
    Ref function, code, defaults, kwdefaults;
  };
  struct Buffer {
    Ref object;
    std::string bytes, name;
  };
  struct Equal {
    Ref object, copy;
    std::string name;
  };
  bool check_dicts();
  static bool same(const Dict&);

  std::vector<std::unique_ptr<Dict>> dicts_;
  std::vector<Object> objects_;
  std::vector<List> lists_;
  std::vector<Cell> cells_;
  std::vector<Type> types_;
  std::vector<std::pair<Ref, Ref>> classes_;  // and a copy of what each has
  std::vector<Function> functions_;
  std::vector<Buffer> buffers_;
  std::vector<Equal> equals_;
  bool watching_ = false;
  friend int on_dict_event(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*);
};

}  // namespace vitrify::python
