#include "torch/passes/match.h"

namespace vitrify::match {

std::optional<PostOp> post_op(const Node& n) {
  if (n.outs.size() != 1 || !is_f32_cpu(n.outs[0])) return {};
  const std::string& s = n.op->name;
  if (s == "aten::relu") return PostOp{"relu", "", {}};
  if (s == "aten::sigmoid") return PostOp{"sigmoid", "", {}};
  if (s == "aten::tanh") return PostOp{"tanh", "", {}};
  if (s == "aten::silu") return PostOp{"swish", "", {}};
  if (s == "aten::hardswish") return PostOp{"hardswish", "", {}};
  if (s == "aten::hardsigmoid") return PostOp{"hardsigmoid", "", {}};
  if (s == "aten::gelu")
    if (auto* a = std::get_if<std::string>(&n.args[1]); a && (*a == "none" || *a == "tanh")) return PostOp{"gelu", *a, {}};
  if (s == "aten::leaky_relu")
    if (auto slope = number(n, 1)) return PostOp{"leaky_relu", "", {*slope}};
  if (s == "aten::hardtanh")
    if (auto lo = number(n, 1), hi = number(n, 2); lo && hi) return PostOp{"hardtanh", "", {*lo, *hi}};
  if (s == "aten::relu6") return PostOp{"hardtanh", "", {0, 6}};
  return {};
}

}  // namespace vitrify::match
