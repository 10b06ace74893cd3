#include "python/turns.h"

#include "python/guards.h"

namespace vitrify::python {

namespace {

constexpr const char* kName = "vitrify.entry";

void let_go(PyObject* capsule) { delete static_cast<std::shared_ptr<Entry>*>(PyCapsule_GetPointer(capsule, kName)); }

}  // namespace

Turn Turn::next(PyObject* state) {
  Turn turn;
  PyObject* pack = pack_of_checkpoint();
  if (!pack) return turn;
  const Ref module = checked(PyImport_ImportModule("vitrify._checkpoint"));
  const Ref found = checked(PyObject_CallMethod(module.get(), "turn", "OO", pack, state));
  if (found.get() == Py_None) return turn;
  turn.served_ = Ref::borrow(PyTuple_GET_ITEM(found.get(), 0));
  turn.at_ = PyLong_AsSsize_t(PyTuple_GET_ITEM(found.get(), 1));
  turn.again_ = PyTuple_GET_ITEM(found.get(), 2) == Py_True;
  return turn;
}

std::shared_ptr<Entry> Turn::served() const {
  PyObject* by = PyList_GET_ITEM(served_.get(), at_);
  return by == Py_None ? nullptr : *static_cast<std::shared_ptr<Entry>*>(PyCapsule_GetPointer(by, kName));
}

void Turn::note(const std::shared_ptr<Entry>& e) {
  if (!served_ || again_) return;
  PyObject* capsule = PyCapsule_New(new std::shared_ptr<Entry>(e), kName, &let_go);
  if (!capsule) throw PythonError();
  PyList_SetItem(served_.get(), at_, capsule);
}

}  // namespace vitrify::python
