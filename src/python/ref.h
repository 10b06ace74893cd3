// Owning reference to a Python object. The GIL must be held wherever one is made, copied or dropped.
#pragma once
#include <torch/csrc/python_headers.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace vitrify::python {

class Ref {
 public:
  Ref() = default;
  Ref(const Ref& o) : p_(Py_XNewRef(o.p_)) {}
  Ref(Ref&& o) noexcept : p_(std::exchange(o.p_, nullptr)) {}
  Ref& operator=(Ref o) noexcept {
    std::swap(p_, o.p_);
    return *this;
  }
  ~Ref() { Py_XDECREF(p_); }
  static Ref steal(PyObject* p) {
    Ref r;
    r.p_ = p;
    return r;
  }
  static Ref borrow(PyObject* p) { return steal(Py_XNewRef(p)); }
  PyObject* get() const { return p_; }
  PyObject* release() { return std::exchange(p_, nullptr); }
  explicit operator bool() const { return p_ != nullptr; }

 private:
  PyObject* p_ = nullptr;
};

// A Python exception is set; unwinds to the nearest C entry point.
struct PythonError : std::exception {};
// An object the door does not model: the call runs eagerly, for this reason.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline Ref checked(PyObject* p) {
  if (!p) throw PythonError();
  return Ref::steal(p);
}

}  // namespace vitrify::python
