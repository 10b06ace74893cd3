#include "torch/composites.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include <algorithm>

#include "torch/fake.h"

namespace vitrify::capture {
namespace {

using at::Tensor;
using c10::SymInt;
using Sizes = std::vector<SymInt>;

// No part of torch uses this key.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

bool has_symbols(const Tensor& t) {
  return std::ranges::any_of(t.sym_sizes(), [](const SymInt& s) { return s.is_symbolic(); }) ||
         std::ranges::any_of(t.sym_strides(), [](const SymInt& s) { return s.is_symbolic(); });
}

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
  if (m == 0 || n == 0 || std::max(m, n) < 3 || (!has_symbols(a) && !has_symbols(b)))
    return at::_ops::matmul::redispatch(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), a, b);
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

const bool registered = [] {
  try {
    static auto* others = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    others->fallback(torch::CppFunction::makeFallthrough());
    static auto* ours = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
    ours->impl("matmul", TORCH_FN(matmul));
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}();

}  // namespace

c10::DispatchKeySet composite_keys() { return registered ? c10::DispatchKeySet(kKey) : c10::DispatchKeySet(); }

}  // namespace vitrify::capture
