// Sees whether the state of a CPU generator is set, also to what it is already: a capture that sets one cannot be replayed.
// Meanwhile the generator names another seed. Draws do not read it, and whatever sets the state sets it as well. Captures on several threads share a
// mark.
#pragma once

#include <ATen/ATen.h>

#include <utility>

namespace vitrify {

// Captures that draw take their draws back: one at a time, or the others see the state go back.
class CaptureTurn {
 public:
  CaptureTurn() = default;
  CaptureTurn(const CaptureTurn&) = delete;
  ~CaptureTurn() { give_back(); }
  void take();  // once for a thread; waits for a second at most: who has it may be waiting for us
  void give_back();

 private:
  bool mine_ = false;
};

bool same_bytes(const at::Tensor&, const at::Tensor&);  // of states

class SeedMark {
 public:
  explicit SeedMark(const at::Generator& cpu);  // std::bad_alloc: nothing has changed
  SeedMark(SeedMark&& o) noexcept : g_(std::exchange(o.g_, {})), before_(std::move(o.before_)), mark_(o.mark_) {}
  SeedMark& operator=(SeedMark&&) = delete;
  ~SeedMark();  // the last of those that share a mark takes it off

  bool there() const;  // nobody has set the state
  const at::Generator& generator() const { return g_; }
  const at::Tensor& before() const { return before_; }  // the state, without the mark
  // That state, if what is there now is `where` (undefined: whatever is there). Others that share the mark find it.
  void put_back(const at::Tensor& where) const;

 private:
  mutable at::Generator g_;  // for its mutex
  at::Tensor before_;
  uint64_t mark_ = 0;
};

}  // namespace vitrify
