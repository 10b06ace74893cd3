// The shape of a nest of Python objects: containers, tensors and plain values. Built once per capture; then matched against the arguments of each
// call (no allocation) or used to rebuild results.
#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "python/ref.h"

namespace vitrify::python {

struct TensorMeta {
  static constexpr int64_t kAny = INT64_MIN;  // a size or stride that symbols decide
  PyTypeObject* type = nullptr;               // Tensor or Parameter: never freed
  uint64_t keys = 0;                          // dispatch keys: layout, conj and neg bits, inference, backend
  caffe2::TypeMeta dtype;
  c10::Device device = c10::kCPU;
  bool requires_grad = false;
  bool leaf = true;   // what needs gradients tells the program whether it is one, and
  int gradient = -1;  // where they go: see gradient_of_leaf()
  bool dual = false;
  bool argument = false;  // not met through the program's variables: then the program may read its .grad and its attributes
  bool has_grad = false;
  bool exact_offset = false, exact_view = false, exact_memory = false;  // facts that the program has read
  bool view = false;
  bool spoiled = false;  // see is_spoiled()
  bool opaque = false;   // sparse, nested, ...: no sizes to compare; such calls run eagerly
  int64_t offset = 0;
  size_t memory = 0;  // bytes
  c10::SmallVector<int64_t, 5> sizes, strides;

  static TensorMeta of(const at::Tensor&, PyTypeObject* type);
  bool matches(const c10::TensorImpl*) const;
};
const at::Tensor& grad_of(const c10::TensorImpl*);  // its .grad, which Tensor::grad() warns of where the tensor is no leaf; or undefined
std::string to_string(const TensorMeta&);           // "f32[4, 8]"

enum class TreeKind : uint8_t {
  Tensor,
  Object,  // the same object (held weakly where its type allows)
  Value,   // equal, of the same type: int, float, str, bytes, complex, dtype, device, slice, range, frozenset...
  Tuple,   // also namedtuples and torch.Size
  List,
  Dict,    // exact dict
  Custom,  // registered with pytree, or a dataclass: flattened by a Python hook
};

struct Tree {
  TreeKind kind = TreeKind::Value;
  uint32_t tensor = 0;  // Tensor: position in the flat list
  bool weak = false;    // Object: `value` is a weak reference
  Ref type;             // exact type of the object
  Ref value;            // Object, Value; Dict: tuple of keys; Custom: context
  Ref rebuild;          // Custom: callable(context, children)
  std::vector<Tree> children;

  void visit(int (*f)(PyObject*, void*), void* arg, int& result) const;
};

struct Flattener {
  std::vector<PyObject*> tensors;     // borrowed
  std::vector<std::string> names;     // one per tensor
  std::vector<PyObject*> objects;     // borrowed: met by identity, and the classes of what is taken apart, whose methods read what they like
  std::vector<PyObject*> containers;  // identities of lists, dicts and custom containers
  bool result = false;                // results may not hold objects made by the program
  PyObject* known = nullptr;          // dict by id: what was there before the program ran, which results give back as it is
  // Throws Unsupported naming the path.
  Tree flatten(PyObject*, const std::string& path, int depth = 0);
};

// Appends the tensors (borrowed) in flat order. False: another shape. Never leaves an exception set.
bool match(const Tree&, PyObject*, const std::vector<TensorMeta>* metas, c10::SmallVectorImpl<PyObject*>& tensors);
// New containers around the given leaves; null with an exception set on failure.
PyObject* rebuild(const Tree&, PyObject* const* leaves);
bool is_plain_tensor(PyObject*);
bool same_value(PyObject* a, PyObject* b);                                         // no program can tell them apart; objects: the same one
bool alike(PyObject* a, PyObject* b);                                              // the same, but objects as their == says
bool same_elements(PyObject* a, PyObject* b, bool (*same)(PyObject*, PyObject*));  // in their order
void set_flatten_hook(PyObject*);                                                  // hook(obj) -> (children, context, rebuild) or None

}  // namespace vitrify::python
