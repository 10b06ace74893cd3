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

// Views and versions. Those that call from further down stay there.
class Counted {
 public:
  explicit Counted(bool composite) : below_(std::exchange(deep_, deep_ || !composite)) {
    if (deep_ || !c10::impl::tls_is_dispatch_key_excluded(kKey)) return;
    c10::impl::tls_set_dispatch_key_excluded(kKey, false);
    changed_ = true;
  }
  ~Counted() {
    if (changed_) c10::impl::tls_set_dispatch_key_excluded(kKey, true);
    deep_ = below_;
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  static constexpr auto kKey = c10::DispatchKey::ADInplaceOrView;
  static inline thread_local bool deep_ = false;
  bool below_, changed_ = false;
};

// Casts; also of those that lie below autograd. An op that autocast has a kernel for calls all that it is made of without it; any other leaves it on,
// but a mode is called without it.
class Cast {
 public:
  Cast(bool composite, bool has_kernel) : outer_(std::exchange(off_, off_ || !composite || has_kernel)) {
    if (!c10::impl::tls_is_dispatch_key_excluded(kKey) || !asked_for()) return;
    c10::impl::tls_set_dispatch_key_excluded(kKey, false);
    changed_ = true;
  }
  ~Cast() {
    if (changed_) c10::impl::tls_set_dispatch_key_excluded(kKey, true);
    off_ = outer_;
  }
  Cast(const Cast&) = delete;
  Cast& operator=(const Cast&) = delete;

  static constexpr auto kKey = c10::DispatchKey::AutocastCPU;
  // By the program, around the op that it calls.
  static bool asked_for() {
    if (off_) return false;
    const at::impl::RestorePythonTLSSnapshot as_the_program_has_it;
    return !c10::impl::tls_is_dispatch_key_excluded(kKey);
  }

 private:
  static inline thread_local bool off_ = false;
  bool outer_, changed_ = false;
};

}  // namespace vitrify
