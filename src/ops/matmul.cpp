// Small matrix products as loops, fused with what surrounds them: below a few hundred thousand multiply-adds a library call costs more than its work.
#include "ops/matmul.h"

#include "ops/rules.h"

namespace vitrify::ops {

namespace {

// Multiply-adds up to which a product is a loop nest, and the longest sum (one chain of FMAs per result).
constexpr int64_t kMaxWork = 600'000, kMaxDepth = 512;
constexpr int64_t kVectorColumns = 16;  // fewer columns than lanes: sums run along k instead

bool small(const Tensor& a, const Tensor& b) {
  if (a.sizes.size() != 2 || b.sizes.size() != 2) return false;
  for (Int s : {a.sizes[0], a.sizes[1], b.sizes[1]})
    if (!s.is_const() || s.value() == 0) return false;
  const int64_t m = a.sizes[0].value(), k = a.sizes[1].value(), n = b.sizes[1].value();
  return m * k * n <= kMaxWork && k <= kMaxDepth;
}

// Vector lanes run over the columns, so the right operand's rows must be dense; narrow results need dense columns.
bool readable(const Tensor& b) { return b.buffer >= 0 && (b.strides[1].is(1) || (b.sizes[1].value() < kVectorColumns && b.strides[0].is(1))); }

Tensor product(Lowering& L, const Tensor& a, const Tensor& b) {
  const Dims terms{a.sizes[0], b.sizes[1], a.sizes[1]};
  const int64_t swapped[] = {1, 0}, along = 2;
  const Tensor rows = L.expand(L.unsqueeze(L.realize(a), 1), terms), columns = L.expand(L.unsqueeze(L.permute(L.realize(b), swapped), 0), terms);
  return L.sum_of_products(rows, columns, {&along, 1}, DType::F32);
}

bool plain(const Args& a, size_t x, size_t w) {
  const Tensor l = a.tensor(x), r = a.tensor(w);
  return l.dtype == DType::F32 && r.dtype == DType::F32 && a.out().dtype == DType::F32 && small(l, r) && readable(r);
}

}  // namespace

bool lower_small_mm(const Args& a, std::vector<Tensor>& r) {
  if (!plain(a, 0, 1)) return false;
  r = {product(a.L, a.tensor(0), a.tensor(1))};
  return true;
}

bool lower_small_addmm(const Args& a, std::vector<Tensor>& r) {
  if (!plain(a, 1, 2) || a.tensor(0).dtype != DType::F32 || a.scalar(3) != 1.0 || a.scalar(4) != 1.0) return false;
  const Tensor bias = a.L.expand(a.tensor(0), a.out().sizes), ab = product(a.L, a.tensor(1), a.tensor(2));
  r = {map2(a.L, ab, bias, DType::F32, [](Body&, Val x, Val y) { return x + y; })};
  return true;
}

}  // namespace vitrify::ops
