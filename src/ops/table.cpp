// The op table: one row per op, from all families.
#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "ops/activation.h"
#include "ops/norm.h"
#include "ops/pool.h"
#include "ops/reads.h"

namespace vitrify::ops {
namespace {

const std::unordered_map<std::string_view, const OpRow*>& table() {
  static const auto rows = [] {
    std::unordered_map<std::string_view, const OpRow*> m;
    for (auto family : {pointwise_rows(), activation_rows(), activation_gradient_rows(), reduction_rows(), norm_rows(), norm_gradient_rows(),
                        loss_rows(), view_rows(), create_rows(), concat_rows(), index_rows(), pool_rows(), pool_gradient_rows(), extern_rows()})
      for (auto& row : family) {
        const bool fresh = m.emplace(row.name, &row).second;
        VT_CHECK(fresh, "two rows for {}", row.name);
      }
    return m;
  }();
  return rows;
}

}  // namespace

const OpRow* find_op(std::string_view name) {
  auto it = table().find(name);
  return it == table().end() ? nullptr : it->second;
}

bool is_extern(std::string_view name) {
  const OpRow* row = find_op(name);
  return !row || !row->lower;
}

bool is_elementwise(std::string_view name) {
  const OpRow* row = find_op(name);
  auto in = [row](std::span<const OpRow> family) { return row >= family.data() && row < family.data() + family.size(); };
  return row && row->lower && (in(pointwise_rows()) || in(activation_rows()) || in(activation_gradient_rows()) || in(create_rows()));
}

Reads reads_of(std::string_view name) {
  const OpRow* row = find_op(name);
  if (!row || !row->lower) return Reads::All;
  auto in = [row](std::span<const OpRow> family) { return row >= family.data() && row < family.data() + family.size(); };
  if (in(reduction_rows())) return Reads::All;
  std::string_view base = name.substr(name.find("::") + 2);
  base = base.substr(0, base.find('.'));
  auto one_of = [base](std::initializer_list<std::string_view> names) { return std::ranges::find(names, base) != names.end(); };
  // Nothing is read for what is the same for any operand.
  if (in(pointwise_rows())) return one_of({"copy", "isnan", "isinf", "isfinite", "isposinf", "isneginf", "pow"}) ? Reads::Some : Reads::AsResult;
  if (in(activation_rows()) || in(activation_gradient_rows()) || in(norm_rows())) return Reads::AsResult;
  if (in(view_rows()) || in(concat_rows()))
    return one_of({"view",         "reshape",       "_unsafe_view",   "_reshape_alias",
                   "view_as",      "reshape_as",    "flatten",        "unflatten",
                   "squeeze",      "unsqueeze",     "expand",         "expand_as",
                   "broadcast_to", "permute",       "transpose",      "t",
                   "mT",           "movedim",       "flip",           "cat",
                   "concat",       "stack",         "roll",           "repeat",
                   "tile",         "pixel_shuffle", "pixel_unshuffle"})
               ? Reads::AsResult
               : Reads::Some;
  return Reads::Some;
}

bool sees_layout(std::string_view name) {
  for (std::string_view ours : {"graph::", "vitrify::", "mkldnn::", "mkl::"})
    if (name.starts_with(ours)) return false;
  for (std::string_view product : {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"})
    if (name == product) return false;
  return true;
}

bool lies_as_second(std::string_view name) { return name == "aten::native_group_norm_backward"; }

std::vector<const OpRow*> all_ops() {
  std::vector<const OpRow*> r;
  for (auto& [name, row] : table()) r.push_back(row);
  return r;
}

}  // namespace vitrify::ops
