// What the run finds: sizes that follow from content become symbols, and booleans that the program reads are taken to stay what they are now. Either
// way the run looks; the calls that a plan is not for have one of their own (python/entry.cpp), or eager takes them.
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "support/budget.h"
#include "torch/convert.h"
#include "torch/executor.h"
#include "torch/learned.h"
#include "torch/slice.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using c10::IValue;
using capture::as_fake;
using capture::fail;
using compat::Stack;
using ir::Arg;
using ir::TensorType;
using ir::Value;

namespace {

constexpr uint32_t kLongestRow = 32;  // of sizes that the run finds, each by the one before

std::vector<Value> operands_of(const std::vector<Arg>& args) {
  std::vector<Value> r;
  for (const Arg& a : args) {
    if (auto* v = std::get_if<Value>(&a); v && *v) r.push_back(*v);
    if (auto* l = std::get_if<std::vector<Value>>(&a)) std::ranges::copy_if(*l, std::back_inserter(r), [](Value v) { return static_cast<bool>(v); });
  }
  return r;
}

void note_error(std::optional<std::string>& raised) {
  rethrow_interrupt();
  raised = "an op raises by what its operands hold";
}

bool by_itself(const ir::Node& n) { return !(n.op->flags & (ir::kRandom | ir::kEffect)); }

}  // namespace

std::unordered_map<uint32_t, int64_t> Tracer::Impl::sizes_now() const {
  std::unordered_map<uint32_t, int64_t> r;
  for (const auto& [v, t] : known_now)
    for (size_t d = 0; d < v.type().dim() && v.type().dim() == static_cast<size_t>(t.dim()); ++d)
      if (const sym::Int s = v.type().sizes[d]; !s.is_const() && sym::is_symbol(s) && found_symbols.contains(sym::view(s).symbol->id))
        if (const int64_t now = t.size(static_cast<int64_t>(d)); now != graph->ctx().symbol_info(s).hint) r.emplace(sym::view(s).symbol->id, now);
  return r;
}

// What the program does with sizes that it would not have come with now is not run with those of now: kernels need not take them.
void Tracer::Impl::refuse_other_way() const {
  const auto now = sizes_now();
  if (now.empty()) return;
  const sym::Context& ctx = graph->ctx();
  const auto refuse_unless = [](bool holds) {
    if (!holds) fail("goes another way with sizes that follow from content than with those that were taken");
  };
  for (const sym::Guard& g : ctx.guards()) {
    std::vector<sym::Int> symbols;
    sym::free_symbols(g.expr, symbols);
    if (std::ranges::none_of(symbols, [&](sym::Int s) { return now.contains(sym::view(s).symbol->id); })) continue;
    const int64_t e = sym::eval(g.expr, [&](uint32_t id) {
      const auto at = now.find(id);
      return at == now.end() ? ctx.symbol_info(ctx.symbol_at(id)).hint.value() : at->second;
    });
    refuse_unless(g.kind == sym::Guard::Kind::EqZero ? e == 0 : g.kind == sym::Guard::Kind::NeZero ? e != 0 : e >= 0);
  }
  for (const auto& [id, size] : now) {
    const sym::Range range = ctx.symbol_info(ctx.symbol_at(id)).range;
    refuse_unless(size >= range.lo && size <= range.hi);
  }
}

// What values are for the inputs of now; null where they follow from random numbers, from calls that may do more than compute, or from no input of
// now.
std::optional<std::vector<at::Tensor>> Tracer::Impl::values_now(const std::vector<Value>& wanted) {
  std::vector<Value> given;
  std::vector<at::Tensor> real;
  if (look && look->values) std::ranges::move(std::exchange(look->values, nullptr)(), std::back_inserter(known_now));
  for (auto& [v, t] : known_now) given.push_back(v);
  for (const ir::Input& in : graph->inputs) given.push_back(in.value);
  const auto whole = extract(*graph, wanted, given);
  if (!std::ranges::all_of(whole->nodes(), [](const ir::Node* n) { return by_itself(*n); })) return std::nullopt;
  refuse_other_way();
  const auto uses = ir::count_uses(*whole);
  std::vector<Value> used;
  for (size_t i = 0; i < given.size(); ++i) {
    const bool known = i < known_now.size();  // perhaps only its size is read: nobody else may make it again to say that
    if (!known && !uses.at(whole->inputs[i].value.node)[0]) continue;
    used.push_back(given[i]);
    real.push_back(known ? known_now[i].second : look ? at::Tensor() : inputs[input_index(*given[i].node)]->real);
    if (!real.back().defined()) return std::nullopt;
  }
  // Sizes of what nothing here reads are those of now too.
  auto cut = extract(*graph, wanted, used);
  const size_t before = used.size();
  for (Value v : carriers(*graph, used, vitrify::symbols_in(*cut))) {
    if (!is_input(*v.node)) continue;
    used.push_back(v);
    real.push_back(at::empty({1}).expand(values_of(v.type().sizes)));
  }
  if (used.size() > before) cut = extract(*graph, wanted, used);
  try {
    return interpret(*cut, real);
  } catch (const capture::OtherResults&) {
    return std::nullopt;
  } catch (const std::exception&) {
    note_error(raised_now);
    throw;
  }
}

// What the op gives for the inputs of now; false where that cannot be said.
bool Tracer::Impl::call_now(const OpInfo& info, const std::vector<Arg>& args, Stack* results) {
  const std::vector<Value> operands = operands_of(args);
  const auto now = values_now(operands);
  if (!now) return false;
  Stack stack;
  size_t k = 0;
  auto tensor_of = [&](const Value&) { return (*now)[k++]; };
  for (size_t i = 0; i < args.size(); ++i) stack.push_back(to_ivalue(*graph, args[i], info.args[i], tensor_of));
  {
    const c10::AutoGradMode no_grad(false);
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    try {
      info.op.callBoxed(&stack);
    } catch (const std::exception&) {
      note_error(raised_now);
      throw;
    }
  }
  for (size_t i = 0; i < operands.size(); ++i) known_now.emplace_back(operands[i], (*now)[i]);
  *results = std::move(stack);
  return true;
}

// The author's description runs on placeholders, as if the program called what it calls; nobody uses what that records. False: there is none.
bool Tracer::Impl::describe(const OpInfo& info, const Stack& stack) {
  if (!options.describe || described) return false;
  sym::Context& ctx = graph->ctx();
  std::vector<sym::Int> named;
  const auto new_size = [&](int64_t least, std::optional<int64_t> most) {
    const int64_t hi = most.value_or(INT32_MAX);
    named.push_back(ctx.symbol(sym::SymbolKind::Size, std::clamp<int64_t>(least + 16, least, hi), {least, hi}));
    return capture::to_sym_int(graph->shared_ctx(), named.back());
  };
  const auto failed = failure;
  std::vector<at::Tensor> results;
  if (!options.describe(info.op, {stack.end() - static_cast<std::ptrdiff_t>(info.args.size()), stack.end()}, new_size, results)) return false;
  failure = failed;
  std::vector<std::pair<sym::Int, sym::Int>> own;  // what was recorded has the sizes of the description, the op others
  for (sym::Int s : named) {
    const sym::Symbol info = ctx.symbol_info(s);
    own.emplace_back(s, ctx.symbol(info.kind, info.hint, info.range));
    found_symbols.insert(sym::view(own.back().second).symbol->id);
  }
  Types types;
  for (const at::Tensor& t : results) {
    if (!t.defined()) {
      types.push_back(undefined_type());
      continue;
    }
    types.push_back(as_fake(fake_of(t))->view->type);
    types.back().wrapped_number = false;
    for (ir::Dims* dims : {&types.back().sizes, &types.back().strides})
      for (sym::Int& i : *dims)
        if (!i.is_const()) i = sym::substitute(i, own);
  }
  described = std::move(types);
  return true;
}

// An op of ATen's whose sizes nothing tells beforehand: they are taken to stay what they are now, and the run looks.
bool Tracer::Impl::run_now(const OpInfo& info, const std::vector<Arg>& args, Stack* results) {
  const bool tensors_only = std::ranges::all_of(info.op.schema().returns(), [](const c10::Argument& r) {
    return r.type()->kind() == c10::TypeKind::TensorType || r.type()->kind() == c10::TypeKind::ListType;
  });
  const bool computes = info.name.starts_with("aten::") && !(info.flags & (ir::kRandom | ir::kEffect)) && !info.op.schema().is_mutable();
  if (!tensors_only || !computes || operands_of(args).empty() || !call_now(info, args, results)) return false;
  for (const Value& v : operands_of(args))
    for (const ir::Dims& dims : {v.type().sizes, v.type().strides})
      for (sym::Int i : dims) graph->ctx().specialize(i);
  std::vector<at::Tensor> tensors;
  flatten_results(*results, tensors);
  for (const at::Tensor& t : tensors)
    if (t.defined() && (t.layout() != at::kStrided || t.is_quantized() || !t.device().is_cpu()))
      fail(fmt::format("{} makes a sparse or quantized tensor", info.name));
  return true;
}

// How many finds follow from each other in what those values follow from.
uint32_t Tracer::Impl::row_behind(const std::vector<Value>& values) {
  if (found_nodes.empty()) return 0;
  std::vector<ir::Node*> fresh, open;
  const auto meet = [&](const Value& v) {
    if (found_rows.try_emplace(v.node, 0).second) open.push_back(v.node);
  };
  for (const Value& v : values) meet(v);
  while (!open.empty()) {
    ir::Node* n = open.back();
    open.pop_back();
    fresh.push_back(n);
    ir::for_each_input(*n, meet);
  }
  std::ranges::sort(fresh, {}, &ir::Node::id);  // each after what it reads
  for (ir::Node* n : fresh) {
    uint32_t row = 0;
    ir::for_each_input(*n, [&](Value& v) { row = std::max(row, found_rows.at(v.node)); });
    found_rows[n] = row + (std::ranges::find(found_nodes, n) != found_nodes.end());
  }
  uint32_t row = 0;
  for (const Value& v : values) row = std::max(row, found_rows.at(v.node));
  return row;
}

// A rule has guessed the sizes that it does not know. What they are now shows which way the program goes; below two the guess is 2, so that the plan
// is not one for sizes that broadcast. The results of now, if they could be had.
std::vector<at::Tensor> Tracer::Impl::find_sizes(const OpInfo& info, const std::vector<Arg>& args, const Types& types, size_t first_symbol) {
  std::vector<std::tuple<size_t, size_t, sym::Int>> found;
  // While it is captured such a loop need not end.
  if (row_behind(operands_of(args)) >= kLongestRow) fail("finds sizes by what it found before, as in a loop that content ends");
  for (size_t r = 0; r < types.size(); ++r)
    for (size_t d = 0; d < types[r].dim(); ++d)
      if (sym::Int s = types[r].sizes[d]; !s.is_const() && sym::is_symbol(s) && sym::view(s).symbol->id >= first_symbol) {
        found.emplace_back(r, d, s);
        found_symbols.insert(sym::view(s).symbol->id);
      }
  Stack stack;
  if (!call_now(info, args, &stack)) {
    for (const auto& [r, d, s] : found) guessed.push_back(s);
    return {};
  }
  std::vector<at::Tensor> results;
  flatten_results(stack, results);
  VT_CHECK(results.size() >= types.size(), "{}: {} results, the shape rule gives {}", info.name, results.size(), types.size());
  for (auto& [r, d, s] : found) {
    sym::Symbol& symbol = graph->ctx().mutable_symbol_info(s);
    const int64_t size = results[r].size(static_cast<int64_t>(d));
    VT_CHECK(size >= symbol.range.lo && size <= symbol.range.hi, "{}: the shape rule gives a size in [{}, {}], the kernel {}", info.name,
             symbol.range.lo, symbol.range.hi, size);
    settle_size(s, size);
  }
  return results;
}

// A capture of a call that a plan has refused, or another capture, takes small sizes as they are.
void Tracer::Impl::settle_size(sym::Int s, int64_t size) {
  sym::Symbol& symbol = graph->ctx().mutable_symbol_info(s);
  const bool settles = options.refused && size < 2;
  symbol.hint = settles ? size : std::min(std::max<int64_t>(size, 2), symbol.range.hi);
  if (settles) graph->ctx().specialize(s);
}

// What a custom op gave in the run that was refused.
void Tracer::Impl::know_effect(const ir::Node& n) {
  if (!options.effects || effects_known >= options.effects->all.size()) return;
  const Effects::One& one = options.effects->all[effects_known++];
  if (one.op != n.op->name || one.results.size() < n.outs.size()) fail("calls other custom ops than before");
  for (uint32_t r = 0; r < n.outs.size(); ++r) {
    const at::Tensor& t = one.results[r];
    if (!t.defined() || t.dim() != static_cast<int64_t>(n.outs[r].dim())) continue;
    known_now.emplace_back(ir::Value{const_cast<ir::Node*>(&n), r}, t);
    for (size_t d = 0; d < n.outs[r].dim(); ++d)
      if (sym::Int s = n.outs[r].sizes[d]; !s.is_const() && sym::is_symbol(s) && found_symbols.contains(sym::view(s).symbol->id))
        settle_size(s, t.size(static_cast<int64_t>(d)));
  }
}

// The call whose results have those sizes already.
ir::Node* Tracer::Impl::found_before(const OpInfo& info, const std::vector<Arg>& args) const {
  for (ir::Node* n : found_nodes)
    if (n->op->name == info.name && n->args == args) return n;
  return nullptr;
}

// What follows from nothing that calls give is the same number in all of them.
std::optional<c10::Scalar> Tracer::Impl::constant_item(Value v) const {
  if (!v.type().numel().is(1) || v.type().device.kind != DeviceKind::CPU) return std::nullopt;
  const ir::NodeSet behind = nodes_behind(*graph, {v});
  for (const ir::Node* n : graph->nodes())
    if (behind.contains(n) && (is_input(*n) || !by_itself(*n) || n->op->name.find("::empty") != std::string::npos)) return std::nullopt;
  const auto cut = extract(*graph, {v}, {});
  if (!vitrify::symbols_in(*cut).empty()) return std::nullopt;
  return interpret(*cut, {}).at(0).item();
}

// A boolean or an integer that the program reads is taken to stay what it is now. Where it turns out otherwise once custom ops have run, what they
// gave is kept (Effects), where the door goes on from there.
std::optional<c10::Scalar> Tracer::Impl::assume(Value v) {
  const TensorType& type = v.type();
  const bool boolean = type.dtype == DType::Bool;
  if ((!boolean && !is_int(type.dtype)) || !type.numel().is(1) || type.device.kind != DeviceKind::CPU || (in_backward && !look)) return std::nullopt;
  if (has_side_effects(*graph) && !options.resumes) return std::nullopt;
  c10::Scalar value = true;  // torch's own checks of arguments raise where this is false
  if (const bool check = v.node->op->name == "aten::_is_all_true"; !check || options.refused) {
    const auto now = values_now({v});
    if (!now && !check) return std::nullopt;
    if (now) value = now->at(0).item();
  }
  const ir::Op* op = graph->op(boolean ? "vitrify::assume" : "vitrify::assume_int", ir::kEffect);
  graph->append(op, {v, boolean ? Arg(value.toBool()) : Arg(sym::Int(value.toLong()))}, {})->source = source;
  return value;
}

// Whether two tensors are equal, as the program asks.
std::optional<bool> Tracer::Impl::assume_equal(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == at::kComplexHalf) return std::nullopt;  // eager has no kernel for it
  if (a.scalar_type() != b.scalar_type() || a.is_conj() || b.is_conj() || a.is_neg() || b.is_neg()) return std::nullopt;
  const at::Tensor x = fake_of(a), y = fake_of(b);
  if (!same_sizes(as_fake(x)->view->type.sizes, as_fake(y)->view->type.sizes)) return false;
  Stack stack{x, y};
  run(*ops.find("aten::eq.Tensor"), &stack);
  run(*ops.find("aten::all"), &stack);
  if (auto known = assume(value_of_tensor(stack.back().toTensor()))) return known->toBool();
  return std::nullopt;
}

// Guards on sizes that the run finds are looked at when it has them: eager must be able to begin anew then.
void Tracer::Impl::check_found() const {
  for (sym::Int s : guessed)
    if (const sym::Range r = graph->ctx().symbol_info(s).range; r.lo == r.hi)
      fail("decides by a size that follows from content, which nobody knows yet");
  if (found_symbols.empty() || !has_side_effects(*graph)) return;
  for (const sym::Guard& g : graph->ctx().guards()) {
    std::vector<sym::Int> symbols;
    sym::free_symbols(g.expr, symbols);
    if (std::ranges::any_of(symbols, [&](sym::Int s) { return found_symbols.contains(sym::view(s).symbol->id); }))
      fail("decides by a size that follows from content, beside calls that may have effects");
  }
}

// ---- indexing with masks

// Where a mask of integer arguments is set, as an index. How many there are is a symbol, whose hint is found by running what the mask depends on;
// plans read such arguments by content, and guards on such symbols are checked when it changes. Null for other masks.
Value Tracer::Impl::positions(Value mask) {
  for (auto& [known, index] : masks)
    if (same_computation(known, mask)) return index;
  if (graph->ctx().num_symbols() != masks.size()) return {};
  auto unwritten_argument = [&](uint32_t i) {
    return i < num_args && inputs[i]->fake.defined() && as_fake(inputs[i]->fake)->view->storage->generation == 0;
  };
  if (!follows_from_integers(*graph, mask, unwritten_argument)) return {};
  Slice cut = slice(*graph, {mask});
  std::vector<at::Tensor> given;
  for (uint32_t i : cut.sources) given.push_back(inputs[i]->real);
  const int64_t count = interpret(*cut.graph, given).at(0).sum().item<int64_t>();
  if (count < 2) return {};
  TensorType type;
  type.dtype = DType::I64;
  type.device = mask.type().device;
  type.sizes = {graph->ctx().symbol(sym::SymbolKind::Size, count, {2, INT32_MAX})};
  type.strides = {1};
  return masks.emplace_back(mask, append("vitrify::mask_positions", {mask}, {type})->out()).second;
}

// One mask of one dim over a contiguous tensor, whose result is contiguous in eager too.
at::Tensor Tracer::Impl::index_by_mask(const at::Tensor& self_, c10::ArrayRef<IValue> indices) {
  at::Tensor self = fake_of(self_);
  const Value x = read(*as_fake(self)->view);
  int64_t dim = -1;
  for (size_t d = 0; d < indices.size(); ++d) {
    if (indices[d].isNone() || !indices[d].toTensor().defined()) continue;
    if (dim >= 0) return {};
    dim = static_cast<int64_t>(d);
  }
  const at::Tensor& given = indices[static_cast<size_t>(dim)].toTensor();
  if (given.scalar_type() != at::kBool) return {};
  const Value mask = value_of_tensor(given);
  if (mask.type().dim() != 1 || !x.type().is_contiguous() || self.is_conj() || self.is_neg() || mask.type().device.kind != DeviceKind::CPU ||
      x.type().device.kind != DeviceKind::CPU || static_cast<size_t>(dim) >= x.type().dim())
    return {};
  if (!(mask.type().sizes[0] == x.type().sizes[static_cast<size_t>(dim)])) return {};
  const Value index = positions(mask);
  if (!index) return {};
  TensorType type = x.type();
  type.wrapped_number = false;
  type.sizes[static_cast<size_t>(dim)] = index.type().sizes[0];
  type.strides = ir::contiguous_strides(type.sizes);
  return new_tensor(append("aten::index_select", {x, sym::Int(dim), index}, {type})->out());
}

// As ATen does: a mask is the indices of where it is set.
void Tracer::Impl::run_index_by_mask(const OpInfo& info, Stack* stack) {
  const Stack args(stack->end() - 2, stack->end());
  auto finish = [&](at::Tensor t) {
    stack->erase(stack->end() - 2, stack->end());
    stack->emplace_back(std::move(t));
  };
  if (at::Tensor r = index_by_mask(args[0].toTensor(), args[1].toListRef()); r.defined()) return finish(std::move(r));
  const TensorType& x = as_fake(fake_of(args[0].toTensor()))->view->type;
  c10::List<std::optional<at::Tensor>> indices;
  for (const IValue& e : args[1].toListRef()) {
    if (e.isNone() || !e.toTensor().defined()) {
      indices.push_back(std::nullopt);
      continue;
    }
    const at::Tensor given = fake_of(e.toTensor());
    if (given.scalar_type() != at::kBool && given.scalar_type() != at::kByte) {
      indices.push_back(given);
      continue;
    }
    const TensorType& mask = as_fake(given)->view->type;
    if (!mask.dim() || given.scalar_type() == at::kByte) fail("reads a tensor's value: indexing with a mask of bytes, or of no dims");
    for (size_t d = 0; d < mask.dim(); ++d)
      if (indices.size() + d >= x.dim() || !graph->ctx().guard_eq(mask.sizes[d], x.sizes[indices.size() + d])) fail("a mask of another size");
    Stack found{given};
    run(*ops.find("aten::nonzero"), &found);
    found = {found.back(), sym::Int(1).value()};
    run(*ops.find("aten::unbind.int"), &found);
    for (const at::Tensor& t : found.back().toTensorVector()) indices.push_back(t);
  }
  stack->pop_back();
  stack->emplace_back(std::move(indices));
  run_pure(info, stack);
}

TORCH_LIBRARY_FRAGMENT(vitrify, m) {
  constexpr const char* kOther = "a value that the program reads is another";
  m.def("assume(Tensor condition, bool value) -> ()", [](const at::Tensor& condition, bool value) {
    if (*condition.const_data_ptr<bool>() != value) throw capture::WayRefused(kOther);
  });
  m.def("assume_int(Tensor number, int value) -> ()", [](const at::Tensor& number, int64_t value) {
    if (number.item().toLong() != value) throw capture::WayRefused(kOther);
  });
}

}  // namespace vitrify
