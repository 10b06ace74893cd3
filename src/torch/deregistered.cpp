#include "torch/deregistered.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "torch/convert.h"

namespace vitrify {

namespace {

struct Known {
  std::atomic<uint64_t> count = 0;
  std::mutex mutex;
  std::unordered_map<std::string, uint64_t> last;  // by op
  c10::RegistrationHandleRAII* listening = nullptr;
};

class Listener final : public c10::OpRegistrationListener {
 public:
  explicit Listener(Known& known) : known_(known) {}
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    std::lock_guard lock(known_.mutex);
    known_.last[op_name(op.operator_name())] = ++known_.count;
  }

 private:
  Known& known_;
};

Known& known() {
  static Known* k = [] {  // libraries go while the process ends
    auto* k = new Known;
    k->listening = new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>(*k)));
    return k;
  }();
  return *k;
}

}  // namespace

uint64_t deregistrations() { return known().count.load(std::memory_order_acquire); }

bool is_deregistered_since(const std::string& op, uint64_t then) {
  std::lock_guard lock(known().mutex);
  const auto at = known().last.find(op);
  return at != known().last.end() && at->second > then;
}

}  // namespace vitrify
