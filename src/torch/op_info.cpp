#include "torch/op_info.h"

#include <algorithm>
#include <unordered_set>

#include "ir/faults.h"

namespace vitrify::capture {
namespace {

const std::unordered_set<std::string_view>& reads_values() {
  static const std::unordered_set<std::string_view> names = {"aten::_local_scalar_dense", "aten::is_pinned"};
  return names;
}

const std::unordered_set<std::string_view>& refused() {
  static const std::unordered_set<std::string_view> names = {"aten::resize_as_",
                                                             "aten::_resize_output_",
                                                             "aten::set_",
                                                             "aten::set_data",
                                                             "aten::record_stream",
                                                             "aten::is_set_to",
                                                             "aten::_version",
                                                             "aten::sparse_resize_",
                                                             "aten::rename_",
                                                             "aten::_transformer_encoder_layer_fwd",
                                                             "aten::_native_multi_head_attention",
                                                             "aten::_nested_tensor_from_mask",
                                                             "aten::_make_dual",
                                                             "aten::_fw_primal",
                                                             "aten::_cudnn_rnn_flatten_weight",
                                                             "aten::requires_grad_",
                                                             "aten::_sobol_engine_draw",
                                                             "aten::batch_norm_update_stats"};  // writes what its schema says it reads
  return names;
}

// Its functional form gives other strides than it does.
bool called_as_it_is(std::string_view name) { return name == "aten::rrelu_with_noise"; }

// Their kernels call ops that autocast casts. Ops that it has a kernel for and that call them shut it off (composites.cpp: pinverse).
bool sees_autocast(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {"aten::linalg_pinv.atol_rtol_tensor", "aten::affine_grid_generator", "aten::_trilinear",
                                                             "aten::_euclidean_dist", "aten::roll"};
  return names.count(name) > 0;
}

// Composites that stay whole: one library call, and what they decompose to hides it.
bool keep_whole(std::string_view name) { return name == "aten::linear" || name == "aten::one_hot"; }

bool special(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {"aten::lift_fresh",
                                                             "aten::scalar_tensor",
                                                             "aten::copy_",
                                                             "aten::fill_.Scalar",
                                                             "aten::zero_",
                                                             "aten::_efficientzerotensor",
                                                             "aten::add.Tensor",
                                                             "aten::mul.Tensor",
                                                             "aten::div.Tensor",
                                                             "aten::index.Tensor",
                                                             "aten::native_batch_norm",
                                                             "aten::_local_scalar_dense",
                                                             "aten::equal",
                                                             "aten::as_strided",
                                                             "aten::as_strided_",
                                                             "aten::as_strided_copy",
                                                             "aten::as_strided_scatter",
                                                             "aten::resize_",
                                                             "aten::detach_",
                                                             "aten::is_pinned",
                                                             "aten::cudnn_batch_norm",
                                                             "aten::_unsafe_view",
                                                             "aten::unsafe_split.Tensor",
                                                             "aten::unsafe_split_with_sizes"};
  return names.count(name) > 0;
}

bool same_argument(const c10::Argument& a, const c10::Argument& b) { return a.name() == b.name() && *a.type() == *b.type(); }

}  // namespace

const OpInfo& OpTable::get(const c10::OperatorHandle& op) {
  auto& slot = ops_[&op.schema()];
  if (!slot) {
    slot = std::make_unique<OpInfo>(op);
    OpInfo& info = *slot;  // classify() may add entries: `slot` is not used below
    info.name = op_name(op.operator_name());
    classify(info);
    return info;
  }
  return *slot;
}

const OpInfo* OpTable::find(std::string_view name) {
  auto h = find_operator(name);
  return h ? &get(*h) : nullptr;
}

void OpTable::classify(OpInfo& info) {
  const c10::FunctionSchema& s = info.op.schema();
  const std::string& base = s.name();
  std::string_view ns = std::string_view(base).substr(0, base.find("::"));
  info.args = arg_kinds(s);
  info.row = ops::find_op(info.name);
  if (info.row) info.flags |= info.row->flags;
  info.sees_autocast = sees_autocast(info.name);
  if (info.op.hasTag(at::Tag::nondeterministic_seeded)) info.flags |= ir::kRandom;
  // Masks become places before an index is run.
  if (info.op.hasTag(at::Tag::dynamic_output_shape) && info.name != "aten::index.Tensor") info.flags |= ir::kDataDependent;
  bool aten = ns == "aten" || ns == "prims";
  if (!aten && ns != "mkldnn" && ns != "quantized" && ns != "vitrify") info.flags |= ir::kEffect;

  if (ns == "profiler" || ns == "vitrify" || ns == "prim") {
    info.kind = OpKind::Pass;
    return;
  }
  if (special(info.name)) {
    info.kind = OpKind::Special;
    return;
  }
  if (refused().count(base)) {
    info.kind = OpKind::Refuse;
    info.why = fmt::format("calls {}, which cannot be captured", info.name);
    return;
  }
  // item() of a literal is known; in inference mode it arrives whole.
  const bool item = base == "aten::item" || base == "aten::is_nonzero";
  // Where a composite has a kernel for the CPU as well (silu_backward), eager runs that one: its results lie otherwise.
  const bool taken_apart = compat::has_composite_kernel(info.op) && !info.op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  const bool composite = (taken_apart && !keep_whole(base)) || base == "aten::allclose";
  if (reads_values().count(base) || (info.op.hasTag(at::Tag::data_dependent_output) && !item && !composite)) {
    info.kind = OpKind::Refuse;
    info.why = fmt::format("reads a tensor's value: {}", info.name);
    return;
  }
  if (composite) {
    info.kind = OpKind::Composite;
    // Those with an out argument give it its size themselves; max_pool1d has a kernel of its own where no indices are asked for.
    info.taken_apart_seen = info.flags & ir::kGivesContiguous || std::ranges::any_of(s.arguments(), [](const c10::Argument& a) {
                              return a.kwarg_only() && a.alias_info() && a.alias_info()->isWrite();
                            });
    return;
  }

  bool aliases = false;
  for (const auto& r : s.returns())
    if (r.alias_info() && !r.alias_info()->isWrite()) aliases = true;
  for (size_t i = 0; i < s.arguments().size(); ++i)
    if (auto* a = s.arguments()[i].alias_info(); a && a->isWrite()) info.writes.push_back(i);

  if (!info.writes.empty()) {
    if (info.op.hasTag(at::Tag::inplace_view)) {
      info.kind = OpKind::InPlaceView;
      std::string view = base.substr(0, base.size() - 1);
      if (view == "aten::transpose") view += ".int";
      info.out_of_place = find(s.overload_name().empty() ? view : view + "." + s.overload_name());
      if (!info.out_of_place || info.out_of_place->kind != OpKind::View) {
        info.kind = OpKind::Refuse;
        info.why = fmt::format("calls {}, which cannot be captured", info.name);
      }
      return;
    }
    info.kind = OpKind::Write;
    find_functional(info);
    return;
  }
  if (aliases && !info.args.empty() && info.args[0] == ArgKind::Tensor) {
    info.kind = OpKind::View;
    info.flags |= ir::kView;
    info.multi_result_view = s.returns()[0].type()->kind() == c10::TypeKind::ListType;
    return;
  }
  if (s.returns().empty()) {
    info.kind = OpKind::Effect;
  } else if (!info.row && !info.args.empty() && (info.args[0] == ArgKind::Tensor || info.args[0] == ArgKind::TensorList)) {
    info.flags |= ir::kFaults;  // nobody has said that it takes all values
  }
}

void OpTable::find_functional(OpInfo& info) {
  const c10::FunctionSchema& s = info.op.schema();
  std::string base = s.name();
  if (called_as_it_is(base)) return;
  bool in_place = !base.ends_with("__") && base.ends_with("_");
  if (in_place) base.pop_back();
  if (base == "aten::normal" && in_place) base = "aten::normal_functional";
  if (base == "aten::_index_put_impl") base = "aten::_index_put_impl";

  // The functional form takes the same arguments by name and type, less the out ones, and writes nothing.
  auto fits = [&](const c10::OperatorHandle& h) {
    const c10::FunctionSchema& f = h.schema();
    size_t written = 0;
    for (const auto& a : f.arguments())
      if (a.alias_info() && a.alias_info()->isWrite()) return false;
    std::vector<size_t> map;
    for (const auto& a : f.arguments()) {
      auto it = std::find_if(s.arguments().begin(), s.arguments().end(), [&](const c10::Argument& b) { return same_argument(a, b); });
      if (it == s.arguments().end()) return false;
      map.push_back(it - s.arguments().begin());
    }
    for (size_t i = 0; i < s.arguments().size(); ++i) {
      bool is_written = std::find(info.writes.begin(), info.writes.end(), i) != info.writes.end();
      bool used = std::find(map.begin(), map.end(), i) != map.end();
      if (!used && !is_written) return false;
      written += is_written;
    }
    size_t fresh = 0;
    for (const auto& r : s.returns()) fresh += !(r.alias_info() && r.alias_info()->isWrite());
    // A list argument written in place (foreach) comes back as one list.
    if (f.returns().size() != fresh + written) return false;
    const OpInfo& fi = get(h);
    if (fi.kind != OpKind::Pure && fi.kind != OpKind::Composite && fi.kind != OpKind::View && fi.kind != OpKind::Special) return false;
    info.functional = &fi;
    info.functional_args = std::move(map);
    return true;
  };
  std::string overload = s.overload_name();
  std::vector<std::string> guesses{overload, ""};
  if (!in_place) {
    if (overload.ends_with("_out"))
      guesses = {overload.substr(0, overload.size() - 4), ""};
    else
      guesses = {""};
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const std::string& o : guesses)
    if (auto h = dispatcher.findSchema({base, o}); h && fits(*h)) return;
  for (const std::string& name : {base, base + "_functional", s.name() + "_functional"})
    for (const c10::OperatorName& n : dispatcher.getAllOpNames())
      if (n.name == name)
        if (auto h = dispatcher.findSchema(n); h && fits(*h)) return;
  if (info.flags & ir::kEffect) return;  // a custom op: it is called on copies
  info.kind = OpKind::Refuse;
  info.why = fmt::format("calls {}, which writes into its arguments and has no functional form", info.name);
}

}  // namespace vitrify::capture
