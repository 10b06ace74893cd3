#include "torch/composites.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/lowering.h"
#include "torch/compat.h"
#include "torch/composite_state.h"
#include "torch/convert.h"
#include "torch/fake.h"
#include "torch/mode.h"
#include "torch/stack.h"
#include "torch/sym_node.h"
#include "torch/tracer.h"

namespace vitrify::capture {
namespace {

using at::Tensor;
using c10::SymInt;
using Sizes = std::vector<SymInt>;

SymInt product(c10::SymIntArrayRef sizes) {
  SymInt n = 1;
  for (const SymInt& s : sizes) n *= s;
  return n;
}

Sizes with(c10::SymIntArrayRef sizes, std::initializer_list<SymInt> more) {
  Sizes r(sizes.begin(), sizes.end());
  r.insert(r.end(), more);
  return r;
}

// Whether ATen makes one matrix of the larger operand: where the other is a matrix or a vector that needs gradients, or the rows lie so.
bool folds(const Tensor& a, const Tensor& b) {
  const bool larger_first = a.dim() >= b.dim();
  const Tensor& large = larger_first ? a : b;
  const Tensor& small = larger_first ? b : a;
  if (large.dim() < 3 || small.dim() > 2) return false;
  if (small.requires_grad()) return true;
  if (a.dim() == 2) return false;
  const Tensor t = larger_first ? large : large.mT();
  if (t.sym_numel() == 0) return true;
  for (int64_t d = 0; d + 2 < t.dim(); ++d)
    if (t.sym_stride(d) != t.sym_stride(d + 1) * t.sym_size(d + 1)) return false;
  return true;
}

Tensor folded(const Tensor& a, const Tensor& b) {
  const bool swapped = b.dim() > a.dim();
  const Tensor large = swapped ? b.mT() : a;
  const Tensor small = !swapped ? b : a.dim() == 2 ? a.t() : a;
  const c10::SymIntArrayRef sizes = large.sym_sizes(), rows = sizes.slice(0, sizes.size() - 1);
  const Tensor matrix = large.reshape_symint(Sizes{product(rows), sizes.back()});
  if (small.dim() == 1) return at::_unsafe_view_symint(matrix.mv(small), rows);
  const Tensor r = at::_unsafe_view_symint(matrix.mm(small), with(rows, {small.sym_size(1)}));
  return swapped ? r.mT().contiguous() : r;
}

Tensor matmul(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b) {
  const int64_t m = a.dim(), n = b.dim();
  if (casts_first(keys) || m == 0 || n == 0 || std::max(m, n) < 3 || (!has_symbols(a) && !has_symbols(b)))
    return at::_ops::matmul::redispatch(below_composites(keys), a, b);
  if (folds(a, b)) return folded(a, b);
  const c10::SymIntArrayRef a_batch = a.sym_sizes().slice(0, static_cast<size_t>(std::max<int64_t>(m - 2, 0))),
                            b_batch = b.sym_sizes().slice(0, static_cast<size_t>(std::max<int64_t>(n - 2, 0)));
  if (m == 3 && n == 3 && a_batch[0] != b_batch[0]) {  // the gradient of what is broadcast would be large
    if (a_batch[0] == 1 && a.requires_grad()) return at::matmul(a.squeeze(0), b);
    if (b_batch[0] == 1 && b.requires_grad()) return at::matmul(a, b.squeeze(0));
  }
  const SymInt rows = m > 1 ? a.sym_size(-2) : SymInt(1), inner = a.sym_size(-1);
  const auto batch = at::infer_size_symdimvector(a_batch, b_batch);
  const SymInt count = product(batch);
  const Tensor left = a.expand_symint(with(batch, {rows, inner})).reshape_symint(Sizes{count, rows, inner});
  Sizes out(batch.begin(), batch.end());
  if (m > 1) out.push_back(rows);
  if (n == 1) {
    const SymInt length = b.sym_size(0);
    const Tensor right = b.expand_symint(with(batch, {length})).reshape_symint(Sizes{count, length}).unsqueeze(2);
    return at::_unsafe_view_symint(left.bmm(right).squeeze(-1), out);
  }
  const SymInt height = b.sym_size(-2), columns = b.sym_size(-1);
  const Tensor right = b.expand_symint(with(batch, {height, columns})).reshape_symint(Sizes{count, height, columns});
  out.push_back(columns);
  return at::_unsafe_view_symint(left.bmm(right), out);
}

bool needs_gradients(const Tensor& t) { return t.requires_grad() && c10::GradMode::is_enabled(); }

// --- kron

Tensor kron(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b) {
  const bool gradients = needs_gradients(a) || needs_gradients(b);
  if (!has_symbols(a) && !has_symbols(b) && !gradients) return at::_ops::kron::redispatch(below_composites(keys), a, b);
  const int64_t n = std::max(a.dim(), b.dim());
  Sizes left, right, out;
  for (int64_t d = 0; d < n; ++d) {
    const auto size = [&](const Tensor& t) { return d < n - t.dim() ? SymInt(1) : t.sym_size(d - (n - t.dim())); };
    left.insert(left.end(), {size(a), 1});
    right.insert(right.end(), {1, size(b)});
    out.push_back(size(a) * size(b));
  }
  const auto look_at = [](const Tensor& t, const Sizes& sizes) {
    const LooksAtOperands looks;
    return at::_unsafe_view_symint(t, sizes);
  };
  return at::_unsafe_view_symint(look_at(a, left).mul(look_at(b, right)), out);
}

// --- cdist: of many rows, and where gradients are asked for, a matrix product

Tensor cdist(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b, double p, std::optional<int64_t> mode) {
  const Cast none(false);  // autocast has a kernel for it, within which it is off
  const auto product_of_rows = [&] {
    constexpr int64_t kMany = 25;
    return p == 2 && (mode.value_or(0) == 1 || (mode.value_or(0) == 0 && (a.sym_size(-2) > kMany || b.sym_size(-2) > kMany)));
  };
  if (casts_first(keys) || (!has_symbols(a) && !has_symbols(b)) || a.dim() < 2 || b.dim() < 2 || a.sym_size(-1) != b.sym_size(-1) ||
      a.sym_numel() == 0 || b.sym_numel() == 0 || !product_of_rows())
    return at::_ops::cdist::redispatch(below_composites(keys), a, b, p, mode);
  if (!needs_gradients(a) && !needs_gradients(b)) return at::_cdist_forward(a, b, p, mode);
  const auto batch = at::infer_size_symdimvector(a.sym_sizes().slice(0, a.dim() - 2), b.sym_sizes().slice(0, b.dim() - 2));
  const SymInt count = product(batch);
  const auto one_batch = [&](const Tensor& t) {
    const SymInt rows = t.sym_size(-2), columns = t.sym_size(-1);
    return t.expand_symint(with(batch, {rows, columns})).contiguous().view_symint(Sizes{count, rows, columns});
  };
  const Tensor r = count == 1 ? at::_euclidean_dist(a, b) : at::_euclidean_dist(one_batch(a), one_batch(b));
  return r.view_symint(with(batch, {a.sym_size(-2), b.sym_size(-2)}));
}

// --- ops that stay whole

thread_local bool whole = false;

// They would be taken apart by their sizes, or by what they hold. Those of autocast, vmap and the like have more to do with them.
void call_whole(const c10::OperatorHandle& op, c10::DispatchKeySet keys, compat::Stack* stack) {
  const size_t n = op.schema().arguments().size();
  const ops::OpRow* row = ops::find_op(op_name(op.operator_name()));
  bool symbols = row && (row->flags & ir::kDataDependent), plain = true;
  for_each_tensor(last(*stack, n), [&](const Tensor& t) {
    symbols = symbols || has_symbols(t);
    plain = plain && !needs_gradients(t) && !t.is_conj() && !t.is_neg() && !t._is_zerotensor();
  });
  // What the mode needs to have passed comes from above autograd.
  constexpr auto kMode = c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot),
                 kBelowViews = c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::ADInplaceOrView),
                 kPassed = kMode | c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) | kBelowViews;
  const c10::DispatchKeySet below = below_composites(keys);
  if (!symbols || !plain || (below - kPassed).highestFunctionalityKey() != c10::DispatchKey::Undefined) return op.redispatchBoxed(below, stack);
  const Seen seen;
  if (!mode_on_top()) return op.redispatchBoxed(below, stack);
  whole = true;
  op.redispatchBoxed(below & (kMode | kBelowViews), stack);
}

// Autocast has a kernel for it, within which it is off: what it is made of asks for that (OpInfo::sees_autocast).
void call_without_casts(const c10::OperatorHandle& op, c10::DispatchKeySet keys, compat::Stack* stack) {
  const Cast none(false);
  op.redispatchBoxed(below_composites(keys), stack);
}

// It writes its error's text before it knows whether there is one.
void call_with_text(const c10::OperatorHandle& op, c10::DispatchKeySet keys, compat::Stack* stack) {
  const compat::Stack given(stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()), stack->end());
  try {
    const TextUnread unread;
    op.redispatchBoxed(below_composites(keys), stack);
  } catch (const std::exception&) {
    for_each_tensor(given, [](const Tensor& t) {
      if (const FakeImpl* f = as_fake(t)) f->specialize();
    });
    for (const c10::IValue& v : given) static_value(v, true);  // sizes that it was given are in the text too
    throw;
  }
}

// Each of their steps is cast by itself. No kernel of autocast's is theirs, so its key is not among those of the call.
void call_steps_whole(const c10::OperatorHandle& op, c10::DispatchKeySet keys, compat::Stack* stack) {
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU)) return call_whole(op, keys, stack);
  op.redispatchBoxed(below_composites(keys), stack);
}

// --- max_pool1d: with indices where gradients are asked for

Tensor max_pool1d(c10::DispatchKeySet keys, const Tensor& x, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef pad,
                  at::IntArrayRef dilation, bool ceil_mode) {
  const auto is_one = [](at::IntArrayRef l, int64_t least) { return l.size() == 1 && l[0] >= least; };
  const bool takes = (x.dim() == 2 || x.dim() == 3) && is_one(kernel, 1) && (stride.empty() || is_one(stride, 1)) && is_one(pad, 0) &&
                     pad[0] <= kernel[0] / 2 && is_one(dilation, 1);
  if (takes && has_symbols(x) && needs_gradients(x) && x.sym_numel() != 0 && x.sym_size(-1) + 2 * pad[0] > dilation[0] * (kernel[0] - 1))
    return std::get<0>(at::max_pool1d_with_indices(x, kernel, stride, pad, dilation, ceil_mode));
  if (has_symbols(x) && !needs_gradients(x)) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::max_pool1d", "");
    compat::Stack stack{x, kernel, stride, pad, dilation, ceil_mode};
    call_whole(op, keys, &stack);
    return stack.back().toTensor();
  }
  return at::_ops::max_pool1d::redispatch(below_composites(keys), x, kernel, stride, pad, dilation, ceil_mode);
}

// --- what a tensor says of sizes

// ATen reads the places out of memory; a placeholder has numbers that are asked for one by one.
std::vector<Tensor> tensor_split(c10::DispatchKeySet keys, const Tensor& x, const Tensor& places, int64_t dim) {
  if (x.dim() == 0 || !places.is_cpu() || places.scalar_type() != at::kLong || places.dim() > 1)
    return at::_ops::tensor_split_tensor_indices_or_sections::redispatch(below_composites(keys), x, places, dim);
  if (places.dim() == 0) return at::tensor_split_symint(x, places.item().toSymInt(), dim);
  Sizes at;
  for (const Tensor& place : places.unbind()) at.push_back(place.item().toSymInt());
  return at::tensor_split_symint(x, at, dim);
}

const Tensor& resize_as_(c10::DispatchKeySet keys, const Tensor& x, const Tensor& as, std::optional<at::MemoryFormat> format) {
  if (format) return at::_ops::resize_as_::redispatch(below_composites(keys), x, as, format);
  return x.resize__symint(as.sym_sizes());
}

// --- what a tensor is to autograd

// Eager refuses it for views, and takes its history from the tensor. The placeholder of an argument is no view, and a leaf.
Tensor& detach_(c10::DispatchKeySet keys, Tensor& t) {
  if (Tracer* now = Tracer::current(); now && !t.is_view()) {
    now->note_fact(t, Fact::View, "by detach_() whether it is a view");
    now->note_fact(t, Fact::History, "by detach_() the history");
  }
  return at::_ops::detach_::redispatch(below_composites(keys), t);
}

// --- resampling by factors

// trunc(size * factor), where the product is exact whatever the size.
std::optional<SymInt> scaled(const SymInt& size, double factor) {
  constexpr int kMostBits = 20;
  int bits = 0;
  while (bits < kMostBits && factor != std::trunc(factor)) factor *= 2, ++bits;
  if (!(factor > 0) || factor != std::trunc(factor) || factor >= (1 << kMostBits) || size >= (int64_t{1} << 31)) return std::nullopt;
  return size * static_cast<int64_t>(factor) / (int64_t{1} << bits);
}

// upsample_*.vec(input, output_size, [align_corners], scale_factors): the size, and a factor for each dim.
void resample(const c10::OperatorHandle& op, c10::DispatchKeySet keys, compat::Stack* stack) {
  const size_t n = op.schema().arguments().size(), begin = stack->size() - n;
  const auto as_they_are = [&] { op.redispatchBoxed(below_composites(keys), stack); };
  const Tensor x = (*stack)[begin].toTensor();
  const c10::IValue &size = (*stack)[begin + 1], &by = stack->back();
  const auto whole_op = c10::Dispatcher::singleton().findSchema({op.schema().name(), ""});
  if (!has_symbols(x) || !whole_op || x.dim() < 3 || size.isNone() == by.isNone()) return as_they_are();
  const size_t dims = static_cast<size_t>(x.dim()) - 2;
  Sizes out;
  std::vector<std::optional<double>> factors(dims);
  if (by.isNone()) {
    for (const c10::IValue& i : size.toListRef()) out.push_back(i.isSymInt() ? i.toSymInt() : SymInt(i.toInt()));
  } else {
    const std::vector<double> given = by.toDoubleVector();
    for (size_t d = 0; d < std::min(dims, given.size()); ++d) {
      const auto to = scaled(x.sym_size(static_cast<int64_t>(d) + 2), given[d]);
      if (!to) return as_they_are();
      out.push_back(*to);
      factors[d] = given[d];
    }
    if (given.size() != dims) return as_they_are();
  }
  if (out.size() != dims || whole_op->schema().arguments().size() != n - 1 + dims) return as_they_are();
  stack->pop_back();
  (*stack)[begin + 1] = c10::IValue(c10::SymIntArrayRef(out));
  for (const auto& f : factors) stack->push_back(f ? c10::IValue(*f) : c10::IValue());
  whole_op->callBoxed(stack);
}

const bool registered = [] {
  try {
    static auto* others = new torch::Library(torch::Library::IMPL, "_", kCompositeKey, __FILE__, __LINE__);
    others->fallback(torch::CppFunction::makeFallthrough());
    static auto* ours = new torch::Library(torch::Library::IMPL, "aten", kCompositeKey, __FILE__, __LINE__);
    ours->impl("matmul", TORCH_FN(matmul));
    register_quantiles(*ours);
    register_ways(*ours);
    ours->impl("kron", TORCH_FN(kron));
    ours->impl("cdist", TORCH_FN(cdist));
    ours->impl("max_pool1d", TORCH_FN(max_pool1d));
    ours->impl("tensor_split.tensor_indices_or_sections", TORCH_FN(tensor_split));
    ours->impl("resize_as_", TORCH_FN(resize_as_));
    ours->impl("detach_", TORCH_FN(detach_));
    ours->impl("one_hot", torch::CppFunction::makeFromBoxedFunction<&call_whole>());
    ours->impl("pinverse", torch::CppFunction::makeFromBoxedFunction<&call_without_casts>());
    ours->impl("rms_norm", torch::CppFunction::makeFromBoxedFunction<&call_with_text>());
    for (const char* name : {"lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"})
      ours->impl(name, torch::CppFunction::makeFromBoxedFunction<&call_steps_whole>());
    for (const char* name : {"upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
                             "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
                             "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"})
      ours->impl((std::string(name) + ".vec").c_str(), torch::CppFunction::makeFromBoxedFunction<&resample>());
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}();

}  // namespace

bool has_symbols(const Tensor& t) {
  if (t.key_set().has(c10::DispatchKey::FuncTorchBatched))
    return false;  // vmap has ways of its own with these ops, and results that lie as those make them
  return std::ranges::any_of(t.sym_sizes(), [](const SymInt& s) { return s.is_symbolic(); }) ||
         std::ranges::any_of(t.sym_strides(), [](const SymInt& s) { return s.is_symbolic(); });
}

bool stays_whole() { return std::exchange(whole, false); }

void include_composites(bool on) {
  if (registered) c10::impl::tls_set_dispatch_key_included(kCompositeKey, on);
}

c10::DispatchKeySet composite_keys() { return registered ? c10::DispatchKeySet(kCompositeKey) : c10::DispatchKeySet(); }

}  // namespace vitrify::capture
