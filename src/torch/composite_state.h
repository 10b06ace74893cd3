// What the kernel of a composite runs in. Autograd takes no composite of inference tensors apart: it arrives below where views, versions and casts
// are made, and what it calls must see them all the same.
#pragma once

#include <ATen/core/PythonFallbackKernel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <utility>

namespace vitrify {

// Of kernels that are made of other ops: in the order in which they are taken.
inline constexpr std::array kCompositeKeys{c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::CompositeExplicitAutograd,
                                           c10::DispatchKey::CompositeExplicitAutogradNonFunctional};

// Opens a key that is excluded for what a composite calls, where it is wanted there. Where a composite is not `seen`, nothing that it calls is.
template <c10::DispatchKey kExcluded, bool (*kWanted)()>
class Opened {
 public:
  static constexpr auto kKey = kExcluded;
  explicit Opened(bool seen) : outer_(std::exchange(shut_, shut_ || !seen)) {
    if (!c10::impl::tls_is_dispatch_key_excluded(kKey) || !asked_for()) return;
    c10::impl::tls_set_dispatch_key_excluded(kKey, false);
    changed_ = true;
  }
  ~Opened() {
    if (changed_) c10::impl::tls_set_dispatch_key_excluded(kKey, true);
    shut_ = outer_;
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  static bool asked_for() { return !shut_ && kWanted(); }

 private:
  static inline thread_local bool shut_ = false;
  bool outer_, changed_ = false;
};

inline bool always() { return true; }
// By the program, around the op that it calls: a mode is called without it.
inline bool autocast_is_on() {
  const at::impl::RestorePythonTLSSnapshot as_the_program_has_it;
  return !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU);
}

// Views and versions. What calls from further down stays there.
using Counted = Opened<c10::DispatchKey::ADInplaceOrView, always>;
// Casts; also of composites that lie below autograd. An op that autocast has a kernel for calls all that it is made of without it; any other leaves
// it on.
using Cast = Opened<c10::DispatchKey::AutocastCPU, autocast_is_on>;

// A composite writes the text of an error that it need not raise: the sizes in it are nothing that the program reads.
class TextUnread {
 public:
  TextUnread() : outer_(std::exchange(now_, true)) {}
  ~TextUnread() { now_ = outer_; }
  TextUnread(const TextUnread&) = delete;
  TextUnread& operator=(const TextUnread&) = delete;

  static bool now() { return now_; }

 private:
  static inline thread_local bool now_ = false;
  bool outer_;
};

// Lazy bits, which lie above where the composite arrived: what it calls is given numbers without them.
using Conjugates = Opened<c10::DispatchKey::Conjugate, always>;
using Negatives = Opened<c10::DispatchKey::Negative, always>;

}  // namespace vitrify
