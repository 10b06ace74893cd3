// When ATen's kernel is asked what it gives, on zeros: its Meta kernel says another size or layout.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <string>
#include <vector>

#include "ir/graph.h"
#include "torch/compat.h"
#include "torch/op_info.h"

namespace vitrify {

constexpr double kMostZeros = 1 << 20;  // elements of operands with which a kernel is asked

struct Operands {
  bool other = false, here = true;  // some are not row-major; all are on the CPU
  bool places = false;              // int32 beside floats, of which nobody knows whether a kernel trusts it to be places in memory
  double elements = 0;
  bool can_be_made_up() const { return here && !places && elements <= kMostZeros; }
};
Operands look_at(const capture::OpInfo&, const std::vector<ir::Arg>&);

// Calls the op's kernel on values that nobody has given it: each such call goes through here. Throws NotAsked where the kernel would take them for
// places in memory.
struct NotAsked : CaptureError {
  using CaptureError::CaptureError;
};
void call_on_made_up(const capture::OpInfo&, compat::Stack*);

// Whether what it gives of such values, which have conjugate or negative bits, lies as what it gives without. Takes the bits off `given`.
bool lies_alike_without_bits(const capture::OpInfo&, const compat::Stack& given, const compat::Stack& results);

bool hides_sizes(const std::string& op);
bool hides_strides(const std::string& op, const std::vector<at::Tensor>& results, c10::Device);
// Where a rule of ours has found something odd about what such an op is given, its kernel says whether it takes that, whatever the values: Meta takes
// more. Losses of mixed types have a derivative that raises where a backward comes to it: that is left to the call.
bool checks_operands(const capture::OpInfo&, bool in_backward);
// Whether autograd has been told of the op: otherwise it sees what the op's kernel calls.
bool has_formula(const c10::OperatorHandle&);
bool asks_kernel(const capture::OpInfo&, const std::vector<ir::Arg>&);

// Whether ATen's kernel takes operands of these types, sizes and numbers: it is asked once, on zeros. Of what is too large
// for that, whether it takes small ones, or none whatever their type.
bool kernel_takes(const ir::Graph&, const capture::OpInfo&, const std::vector<ir::Arg>&);
// Of an op that has refused zeros which lie as its operands do: it takes them row-major, or says the same of ones, and of unit matrices. What an op
// of a backward says is said when that runs.
bool refuses_for_good(const ir::Graph&, const capture::OpInfo&, const std::vector<ir::Arg>&, bool in_backward);
// What it gives of ones or of unit matrices that lie as its operands do. A factor of zeros does not exist.
bool answers_others(const ir::Graph&, const capture::OpInfo&, const std::vector<ir::Arg>&, compat::Stack* results);

// The default generator of the CPU is as it was, afterwards.
struct KeepsDraws {
  explicit KeepsDraws(bool keeps) {
    if (keeps) before = at::detail::getDefaultCPUGenerator().get_state();
  }
  ~KeepsDraws() {
    if (before.defined()) at::Generator(at::detail::getDefaultCPUGenerator()).set_state(before);
  }
  KeepsDraws(const KeepsDraws&) = delete;
  at::Tensor before;
};

}  // namespace vitrify
