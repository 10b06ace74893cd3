// Calls that stand for several ops, and the numbers of which they make other infinities and NaNs than those ops make: the ops run in their place.
#include <algorithm>
#include <cstring>
#include <limits>

#include "torch/executor.h"

namespace vitrify {

using runtime::ExternCall;

// oneDNN's maxima make zero of NaN, and its hardswish multiplies by x / 6 + 0.5 where eager multiplies by x + 3 first, which may overflow.
PlanRun::Hides PlanRun::hidden_by(const ir::Node& n) {
  if (n.op->name == "vitrify::convolution_in_chains") return std::get<bool>(n.args.back()) ? Hides::NaN : Hides::Nothing;
  if (!n.op->name.starts_with("mkldnn::")) return Hides::Nothing;
  Hides hides = Hides::Nothing;
  for (const ir::Arg& a : n.args) {
    const auto* s = std::get_if<std::string>(&a);
    if (!s || s->empty() || *s == "none" || *s == "add") continue;
    if (*s == "hardswish") return Hides::Overflow;
    hides = Hides::NaN;
  }
  return hides;
}

// Whether six times a number of the result is more than a float holds.
bool PlanRun::result_is_large(const Frame& f, uint32_t i) const {
  const ExternCall& e = plan_->externs[i];
  const auto slot = static_cast<uint32_t>(e.results[0]);
  const bool in_arena = plan_->slots[slot].kind == runtime::SlotKind::Arena;
  const at::Tensor& t = tensors_[slot];
  if (!in_arena && !t.is_non_overlapping_and_dense()) return t.max().item<float>() > std::numeric_limits<float>::max() / 6;
  const auto* data = static_cast<const char*>(in_arena ? f.pointers[slot] : t.const_data_ptr());
  const int64_t count = in_arena ? f.slots[slot].bytes / int64_t{sizeof(float)} : t.numel();
  const float limit = std::numeric_limits<float>::max() / 6;
  int32_t least, bits, any = 0;  // positive floats are in the order of their bits, negative ones below them
  std::memcpy(&least, &limit, sizeof(least));
  for (int64_t k = 0; k < count; ++k) {
    std::memcpy(&bits, data + k * int64_t{sizeof(float)}, sizeof(bits));
    any |= bits > least;
  }
  return any;
}

namespace {

bool all_below(const at::Tensor& t, double limit) {
  if (!t.numel()) return true;
  const auto [least, most] = t.aminmax();
  return least.item<double>() > -limit && most.item<double>() < limit;  // not of NaN
}

}  // namespace

// Its first list of integers says by how much a convolution pads: behind what it convolves, its weight and its bias.
PlanRun::Padding PlanRun::padding_of(const ir::Node& n) {
  size_t i = 0;
  while (i < n.args.size() && !std::holds_alternative<std::vector<sym::Int>>(n.args[i])) ++i;
  if (i < 3 || i == n.args.size()) return {};
  if (std::ranges::all_of(std::get<std::vector<sym::Int>>(n.args[i]), [](sym::Int p) { return p.is(0); })) return {};
  const size_t weight = i - 2;
  if (!std::holds_alternative<ir::Value>(n.args[weight])) return {.pads = true};
  return {.pads = true,
          .weight = std::count_if(n.args.begin(), n.args.begin() + weight, [](const ir::Arg& a) { return std::holds_alternative<ir::Value>(a); })};
}

// A convolution of ATen's with weights that a norm is folded into: passes leave it where sizes change, or there are not two of them.
bool PlanRun::is_folded(const ir::Node& n, const ExternState& s) const {
  return n.op->name == "aten::convolution" && std::ranges::any_of(s.inputs, [&](const auto& i) { return i.second >= originals_->num_inputs(); });
}

// A norm that is folded into weights makes the infinities and NaNs that it makes after the product only if none of its numbers, nor what is folded,
// comes near to the largest float.
// What a convolution pads with, ATen multiplies by its weights, if not by way of a library: by infinities and NaNs too.
bool PlanRun::folds_alike(uint32_t call, const ExternState& s, const at::Tensor* const* inputs) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const at::Tensor *shift = nullptr, *weight = nullptr;
  for (auto [k, input] : s.inputs) {
    if (input < originals_->num_inputs()) continue;
    const at::Tensor& t = *inputs[input];
    const bool is_shift = t.layout() == at::kStrided && t.dim() == 1 && t.is_floating_point();
    (is_shift ? shift : weight) = &t;
  }
  const Padding padding = paddings_[call];
  Fold& known = folds_[call];
  // A weight that nobody has copied, or what the call makes of one.
  if (padding.weight && !weight) {
    const size_t operand = *padding.weight;
    const runtime::Slot& slot = plan_->slots[plan_->externs[call].operands[operand].slot];
    const at::Tensor& own = *s.pointers[operand];
    if (slot.kind != runtime::SlotKind::Input) return all_below(own.layout() == at::kStrided ? own : own.to_dense(), kInf);
    const at::Tensor& t = *inputs[slot.index];
    if (known.plain && known.plain->matches(t)) return known.alike;
    known.plain.emplace(t, std::span(inputs, plan_->graph->inputs.size()));
    return known.alike = all_below(t, kInf);
  }
  if (!shift && !(weight && padding.pads)) return true;
  if ((!shift || shift->is_same(known.shift)) && (!weight || weight->is_same(known.weight))) return known.alike;
  known = {shift ? *shift : at::Tensor(), weight ? *weight : at::Tensor(), {}, !shift || all_below(*shift, 1e30)};
  const double limit = shift ? 1e10 : kInf;
  if (const Originals::Ops* ops = known.alike ? originals_of(call) : nullptr)
    for (const Originals::Ops::Source& from : ops->sources) {
      if (from.operand) continue;
      const at::Tensor& t = *inputs[from.index];
      if (t.defined() && t.layout() == at::kStrided && t.is_floating_point()) known.alike = known.alike && all_below(t, limit);
    }
  return known.alike;
}

const Originals::Ops* PlanRun::originals_of(uint32_t call) {
  Failed& failed = failed_[call];
  if (!failed.ops) failed.ops = originals_->behind(*plan_->externs[call].node, first_kept_);
  return failed.ops.get();
}

}  // namespace vitrify
