#include "torch/overlap.h"

#include <algorithm>
#include <numeric>

#include "torch/convert.h"

namespace vitrify {

namespace {

// Whether sum(step[k] * x[k]) reaches a number with 0 <= x[k] <= most[k]. Steps that nest, as those of most views do, leave one or two choices each.
class Reach {
 public:
  void add(int64_t step, int64_t most) {
    if (step && most) terms_.push_back({step, most});
  }
  bool reaches(int64_t goal) {
    std::ranges::sort(terms_, std::greater<>{}, &Term::step);
    size_t kept = 0;
    for (const Term& t : terms_) {
      if (kept && terms_[kept - 1].step == t.step)
        terms_[kept - 1].most += t.most;
      else
        terms_[kept++] = t;
    }
    terms_.resize(kept);
    int64_t span = 0, common = 0;
    for (size_t k = terms_.size(); k-- > 0;) {
      span += terms_[k].step * terms_[k].most;
      common = std::gcd(common, terms_[k].step);
      terms_[k].span = span;
      terms_[k].common = common;
    }
    return search(0, goal);
  }

 private:
  struct Term {
    int64_t step, most;
    int64_t span = 0, common = 0;  // of this and all smaller ones: the largest sum, the greatest common divisor
  };

  bool search(size_t k, int64_t goal) {
    if (goal < 0) return false;
    if (k == terms_.size()) return goal == 0;
    const Term& t = terms_[k];
    if (goal > t.span || goal % t.common) return false;
    if (--budget_ < 0) return true;
    const int64_t rest = t.span - t.step * t.most;
    for (int64_t x = std::max<int64_t>(0, (goal - rest + t.step - 1) / t.step); x <= std::min(t.most, goal / t.step); ++x)
      if (search(k + 1, goal - x * t.step)) return true;
    return false;
  }

  std::vector<Term> terms_;
  int budget_ = 4096;
};

bool empty(at::IntArrayRef sizes) {
  return std::ranges::any_of(sizes, [](int64_t n) { return n == 0; });
}

}  // namespace

bool may_share(int64_t a_offset, at::IntArrayRef a_sizes, at::IntArrayRef a_strides, int64_t b_offset, at::IntArrayRef b_sizes,
               at::IntArrayRef b_strides, int64_t item) {
  if (empty(a_sizes) || empty(b_sizes)) return false;
  // a_offset + sum(a) = b_offset + sum(b), where b counts from its other end.
  Reach r;
  int64_t goal = b_offset - a_offset + item - 1;
  for (size_t d = 0; d < a_sizes.size(); ++d) r.add(a_strides[d], a_sizes[d] - 1);
  for (size_t d = 0; d < b_sizes.size(); ++d) {
    r.add(b_strides[d], b_sizes[d] - 1);
    goal += b_strides[d] * (b_sizes[d] - 1);
  }
  r.add(1, 2 * (item - 1));
  return r.reaches(goal);
}

bool may_share(const at::Tensor& a, const at::Tensor& b) {
  if (!a.has_storage() || !b.has_storage() || !(a.device() == b.device()) || a.numel() == 0 || b.numel() == 0) return false;
  const auto* p = static_cast<const char*>(a.const_data_ptr());
  const auto* q = static_cast<const char*>(b.const_data_ptr());
  const auto end = [](const at::Tensor& t, const char* begin) {
    const at::IntArrayRef sizes = t.sizes(), strides = t.strides();
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    return begin + (last + 1) * static_cast<int64_t>(t.element_size());
  };
  if (end(a, p) <= q || end(b, q) <= p) return false;                         // as nearly all do: a capture asks this of each pair of its inputs
  const auto scaled = [](const at::Tensor& t, std::vector<int64_t>& sizes) {  // an element as bytes
    std::vector<int64_t> strides = t.strides().vec();
    sizes = t.sizes().vec();
    for (int64_t& s : strides) s *= static_cast<int64_t>(t.element_size());
    sizes.push_back(static_cast<int64_t>(t.element_size()));
    strides.push_back(1);
    return strides;
  };
  std::vector<int64_t> a_sizes, b_sizes;
  const std::vector<int64_t> a_strides = scaled(a, a_sizes), b_strides = scaled(b, b_sizes);
  return may_share(0, a_sizes, a_strides, q - p, b_sizes, b_strides);
}

bool may_overlap_itself(at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (empty(sizes)) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1) dims.emplace_back(strides[d], sizes[d]);
  std::ranges::sort(dims);
  int64_t span = 0;
  bool nested = true;
  for (auto [stride, n] : dims) {
    nested = nested && stride > span;
    span += stride * (n - 1);
  }
  if (nested) return false;
  // Two elements whose largest step between them is 1 + x of this dim, which smaller steps, to either side, take back.
  for (size_t k = 0; k < dims.size(); ++k) {
    if (dims[k].first == 0) return true;
    Reach r;
    int64_t goal = 0;
    for (size_t j = 0; j < k; ++j) {
      r.add(dims[j].first, 2 * (dims[j].second - 1));
      goal += dims[j].first * (dims[j].second - 1);
    }
    r.add(dims[k].first, dims[k].second - 2);
    if (r.reaches(goal - dims[k].first)) return true;
  }
  return false;
}

bool overlaps_itself(const ir::TensorType& type) {
  if (std::ranges::any_of(type.sizes, [](sym::Int n) { return n.is(0); })) return false;
  for (size_t d = 0; d < type.dim(); ++d)
    if (type.strides[d].is(0) && !type.sizes[d].is(1)) return true;
  return may_overlap_itself(values_of(type.sizes), values_of(type.strides));
}

}  // namespace vitrify
