#include "torch/derivatives.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/WrapDimUtils.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>

#include "torch/compat.h"
#include "vitrify/error.h"

namespace vitrify::capture {

using at::Tensor;
using torch::autograd::Node;
namespace generated = torch::autograd::generated;

namespace {

// Where the gradient can be differentiated again: formulas that read a result give it a gradient and others do not, so that it is known which one
// eager takes.
bool any_zero(const Tensor& factors) { return (factors == 0).any().item<bool>(); }

// For each element, the product of the others.
Tensor product_of_others(const Tensor& grad, const Tensor& input, int64_t dim) {
  const c10::SymInt n = input.sym_size(dim);
  if (n == 1) return grad;
  if (input.sym_numel() == 0) return at::zeros_like(input);
  std::vector<c10::SymInt> one = input.sym_sizes().vec();
  one[static_cast<size_t>(dim)] = 1;
  const Tensor ones = at::ones_symint(one, grad.options());
  const Tensor before = at::cat({ones, input.narrow_symint(dim, 0, n - 1)}, dim).cumprod(dim);
  const Tensor after = at::cat({ones, input.narrow_symint(dim, 1, n - 1).flip(dim)}, dim).cumprod(dim).flip(dim);
  return grad * (before * after).conj();
}

// Without zeros, eager's formula is the usual one: the gradient lies as it does there. Whether there are any is not known here.
Tensor of_product(Tensor grad, const Tensor& input, Tensor result, std::optional<int64_t> along, bool keepdim) {
  if (along && !keepdim && input.dim() != 1) {
    grad = grad.unsqueeze(*along);
    result = result.unsqueeze(*along);
  }
  const auto from_others = [&](const Tensor& given, const Tensor& factors) {
    return along ? product_of_others(given, factors, *along) : product_of_others(given, factors.contiguous().view(-1), 0).view_as(factors);
  };
  if (at::GradMode::is_enabled()) return any_zero(input) ? from_others(grad, input) : grad * (result / input).conj();
  const Tensor zeros = (input == 0).sum(), none = zeros == 0;
  const Tensor usual = grad * (result / input).conj();
  if (along) return usual.copy_(at::where(none, usual, from_others(grad, input)));
  // With several, all gradients are zero, whatever the others are.
  const Tensor one = zeros == 1, no_gradient = at::zeros({}, grad.options()), no_factors = at::ones({}, input.options());
  return usual.copy_(at::where(none, usual, from_others(at::where(one, grad, no_gradient), at::where(one, input, no_factors))));
}

// A copy, for a formula that is none of eager's. Eager's reads itself, once more where it is differentiated: that may not be another by then.
class Copied final : public Node {
 public:
  static Tensor of(const Tensor& t, const Tensor& beside) {
    if (!t.requires_grad()) return t;
    const auto node = compat::make_node<Copied>();
    node->set_next_edges(torch::autograd::collect_next_edges(t));
    for (const Tensor& read : {t, beside}) {
      const Tensor copy = read.detach().clone();
      if (node->was_.empty()) torch::autograd::set_history(copy, node);
      node->itself_.emplace_back(read, false);
      node->was_.emplace_back(copy, true);
    }
    return node->was_[0].unpack(node);
  }
  std::string name() const override { return "VitrifyCopy"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < was_.size() && grads[0].defined(); ++i) {
      const Tensor now = itself_[i].unpack(), was = was_[i].unpack(getptr());
      at::_assert_async((now == was).logical_or(now.isnan().logical_and(was.isnan())).all(),
                        "vitrify: a gradient of a gradient of a cumulative product with a zero reads what was written to unseen (.data)");
    }
    return std::move(grads);
  }

 private:
  std::vector<torch::autograd::SavedVariable> itself_, was_;
};

constexpr int64_t kShort = 8;  // elements for which eager's own formula, whose nodes grow with their square, costs no more

// For each element, what the products that it is in have of the others, each times its gradient. As eager computes it: infinities and zeros meet in
// the same products.
Tensor each_of_others(const Tensor& grad, const Tensor& factors, int64_t dim, const Tensor& ones) {
  const int64_t n = factors.sym_size(dim).guard_int(__FILE__, __LINE__);
  std::vector<Tensor> all;
  for (int64_t k = 0; k < n; ++k) {
    std::vector<Tensor> others{k ? factors.narrow(dim, 0, k).prod(dim, true) : ones};
    if (k + 1 < n) {
      const Tensor after = factors.narrow(dim, k + 1, n - k - 1).cumprod(dim);
      others.push_back(k ? others[0] * after : after);
    }
    all.push_back((grad.narrow(dim, k, n - k) * at::cat(others, dim)).sum(dim));
  }
  return at::stack(all, dim);
}

// The same of many: a linear recurrence, in steps that double.
Tensor cumulative_others(const Tensor& grad, const Tensor& itself, int64_t dim) {
  const int64_t n = itself.sym_size(dim).guard_int(__FILE__, __LINE__);
  std::vector<c10::SymInt> one = itself.sym_sizes().vec();
  one[static_cast<size_t>(dim)] = 1;
  if (n <= kShort) return each_of_others(grad, itself, dim, at::ones_symint(one, grad.options()));
  const Tensor factors = Copied::of(itself, grad);
  const Tensor before = at::cat({at::ones_symint(one, factors.options()), factors.narrow(dim, 0, n - 1)}, dim).cumprod(dim);
  Tensor sums = grad, next = factors.narrow(dim, 1, n - 1);  // the product of the `d` factors after each
  for (int64_t d = 1; d < n; d *= 2) {
    sums = at::cat({sums.narrow(dim, 0, n - d) + next * sums.narrow(dim, d, n - d), sums.narrow(dim, n - d, d)}, dim);
    if (2 * d < n) next = next.narrow(dim, 0, n - 2 * d) * next.narrow(dim, d, n - 2 * d);
  }
  return before * sums;
}

Tensor of_cumulative_product(const Tensor& grad, const Tensor& input, int64_t dim, const Tensor& result) {
  if (input.sym_numel() <= 1 || input.sym_size(dim) == 1) return grad;
  const auto sums_from = [dim](const Tensor& t) { return t.flip(dim).cumsum(dim).flip(dim); };
  const Tensor factors = input.conj(), products = result.conj();
  if (at::GradMode::is_enabled()) return any_zero(input) ? cumulative_others(grad, factors, dim) : sums_from(products * grad).div(factors);
  const Tensor zero = input == 0;
  const Tensor zeros = zero.cumsum(dim), before = zeros == 0, once = zeros == 1, first = once.logical_and(zero);
  const Tensor up_to_first = sums_from((products * grad).masked_fill(before.logical_not(), 0)).div(factors);
  const Tensor place = std::get<1>(first.max(dim, true));
  const Tensor product_before = products.gather(dim, (place - 1).relu()).masked_fill(place == 0, 1);
  const Tensor after =
      factors.masked_fill(once.logical_and(zero.logical_not()).logical_not(), 1).cumprod(dim) * grad.masked_fill(once.logical_not(), 0);
  const Tensor of_first = after.sum(dim, true) * product_before;
  const Tensor usual = sums_from(products * grad).div(factors);  // as above
  return usual.copy_(at::where(before, up_to_first, at::where(first, of_first, at::zeros({}, grad.options()))));
}

// Of real matrices, where the gradient can be differentiated again. Where one is singular, by its singular values; where some are and some are not,
// what is not chosen is computed of the identity, or of a matrix whose singular values differ.
Tensor of_determinant(const Tensor& grad, const Tensor& det, const Tensor& a) {
  if (compat::kDeterminantOfOneIsItsElement && a.sym_size(-1) == 1) return grad.unsqueeze(-1).unsqueeze(-1).expand_symint(a.sym_sizes());
  const double eps = a.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  const Tensor singular = det.abs() < 100. * eps, of_matrix = singular.unsqueeze(-1).unsqueeze(-1);
  std::vector<c10::SymInt> diagonal = a.sym_sizes().vec();
  diagonal.pop_back();
  const auto by_values = [&](const Tensor& matrices, const Tensor& given) {
    const auto [u, s, v] = at::linalg_svd(matrices);
    const Tensor alpha = at::linalg_det(u) * at::linalg_det(v) * given;
    return (u * product_of_others(alpha.unsqueeze(-1).expand_symint(diagonal), s, s.dim() - 1).unsqueeze(-2)).matmul(v);
  };
  const auto by_inverse = [&](const Tensor& matrices, const Tensor& given) {
    return at::linalg_solve(matrices.mT(), at::diag_embed(given.unsqueeze(-1).expand_symint(diagonal)));
  };
  if (singular.all().item<bool>()) return by_values(a, grad);
  if (!singular.any().item<bool>()) return by_inverse(a, grad * det);
  const Tensor numbers = at::arange(1, a.sym_size(-1).guard_int(__FILE__, __LINE__) + 1, a.options());
  const Tensor of_singular = by_values(at::where(of_matrix, a, at::diag_embed(numbers)), grad.masked_fill(singular.logical_not(), 0));
  // The usual case comes last: its derivative comes first, and what is added to it takes its strides.
  const Tensor of_others = by_inverse(at::where(of_matrix, at::diag_embed(at::ones_like(numbers)), a), (grad * det).masked_fill(singular, 0));
  return at::where(of_matrix.logical_not(), of_others, of_singular);  // in the strides of the usual case
}

// All that are the largest, or the middle, have the same part in it.
Tensor spread_evenly(const Tensor& grad, const Tensor& input, const Tensor& value) {
  const Tensor chosen = (input == value).logical_or(input.isnan().logical_and(value.isnan()));
  return grad.new_zeros_symint(input.sym_sizes(), input.options()).masked_fill_(chosen, grad / chosen.sum());
}

template <class N>
const N* as(const Node& n) {
  return dynamic_cast<const N*>(&n);
}

template <class N>
Tensor spread(const N& n, Node& node, const Tensor& grad, const Tensor& made) {
  return made.is_cuda() ? made : spread_evenly(grad, n.self_.unpack(), n.result_.unpack(node.getptr()));
}

}  // namespace

bool takes_batches(const Node& n) {
  return as<generated::MaskedFillBackward1>(n) || as<generated::MaxBackward1>(n) || as<generated::MinBackward1>(n) ||
         as<generated::MedianBackward0>(n) || as<generated::NanmedianBackward0>(n);
}

bool looks_at_values(const Node& n) {
  if (const auto* slices = as<torch::autograd::CopySlices>(n)) return slices->fn && looks_at_values(*slices->fn);
  return as<generated::ProdBackward0>(n) || as<generated::ProdBackward1>(n) || as<generated::CumprodBackward0>(n) ||
         as<generated::LinalgDetBackward0>(n) || takes_batches(n);
}

bool of_python(const Node& n) { return std::string_view(typeid(n).name()).find("PyNode") != std::string_view::npos; }

bool of_users(const Node& n) { return of_python(n) || std::string_view(typeid(n).name()).find("CppNode") != std::string_view::npos; }

namespace {

using Visit = std::function<void(torch::autograd::SavedVariable&)>;

void visit(torch::autograd::SavedVariable& s, const Visit& f) { f(s); }
void visit(std::vector<torch::autograd::SavedVariable>& all, const Visit& f) { std::ranges::for_each(all, f); }

template <class N, auto... members>
void visit_members(Node& n, const Visit& f) {
  (visit(static_cast<N&>(n).*members, f), ...);
}

// Eager unpacks all that a node has saved, whether its formula reads it or not.
void each_saved(Node& node, const Visit& f) {
  using Members = void (*)(Node&, const Visit&);
  static const std::unordered_map<std::type_index, Members> members{
#define VT_SAVED(N, ...) {typeid(generated::N), &visit_members<generated::N, __VA_ARGS__>},
#include "saved_variables.inc"
#undef VT_SAVED
  };
  if (auto* slices = dynamic_cast<torch::autograd::CopySlices*>(&node)) return slices->fn ? each_saved(*slices->fn, f) : void();
  if (const auto at = members.find(typeid(node)); at != members.end()) at->second(node, f);
}

}  // namespace

bool saves(const Node& n) {
  bool any = as<torch::autograd::CopySlices>(n) != nullptr;
  each_saved(const_cast<Node&>(n), [&](const torch::autograd::SavedVariable& s) { any = any || s.has_hooks() || s.get_raw_data()->defined(); });
  return any;
}

std::vector<Tensor> saved_by(const Node& n) {
  std::vector<Tensor> r;
  each_saved(const_cast<Node&>(n), [&](const torch::autograd::SavedVariable& s) {
    if (!s.has_hooks() && s.get_raw_data()->defined()) r.push_back(*s.get_raw_data());
  });
  return r;
}

std::vector<Tensor> saved_behind(const torch::autograd::edge_list& from, const std::function<std::vector<Tensor>(const Node&)>& of_own) {
  std::vector<Tensor> r;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> todo;
  for (const torch::autograd::Edge& e : from) todo.push_back(e.function.get());
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    if (!n || !seen.insert(n).second) continue;
    std::ranges::move(of_own && of_python(*n) ? of_own(*n) : saved_by(*n), std::back_inserter(r));
    for (const torch::autograd::Edge& next : n->next_edges()) todo.push_back(next.function.get());
  }
  return r;
}

namespace {

constexpr std::string_view kUnimplemented = "the derivative for '";

// Where that edge alone is asked for, whatever the backward under way asks for: a formula looks only whether that goes on to where the edge leads.
bool raises_for(Node& n, size_t edge, const std::string& says) {
  torch::autograd::edge_list all = n.next_edges();
  for (size_t i = 0; i < all.size(); ++i)
    if (i != edge) n.next_edges()[i] = {};
  // The node that runs is asked for; of others that are, its first one among them, nobody knows whether they still live.
  if (const auto* task = torch::autograd::get_current_graph_task_exec_info(); task && !task->empty())
    if (const auto running = torch::autograd::get_current_node())
      if (const auto asked = task->find(running.get()); asked != task->end() && asked->second.should_execute())
        n.next_edges()[edge] = torch::autograd::Edge(running, 0);
  struct Back {
    ~Back() { n.next_edges() = std::move(all); }
    Node& n;
    torch::autograd::edge_list& all;
  } back{n, all};
  at::NoGradGuard no_grad;
  torch::autograd::variable_list grads;
  for (uint32_t i = 0; i < n.num_inputs(); ++i)
    grads.push_back(at::zeros_symint(n.input_metadata(i).shape_as_dim_vector(), n.input_metadata(i).options()));
  try {
    n(std::move(grads));
  } catch (const c10::NotImplementedError& e) {
    return e.what_without_backtrace() == says;
  } catch (const c10::Error&) {
  }
  return false;
}

}  // namespace

bool is_unimplemented(Node& n, const std::string& says) {
  if (as<torch::autograd::Error>(n)) return true;
  if (of_python(n)) return false;
  if (!says.starts_with(kUnimplemented)) return false;
  for (size_t i = 0; i < n.num_outputs(); ++i)
    if (n.next_edge(i).is_valid() && !raises_for(n, i, says)) return false;
  return true;
}

std::vector<size_t> edges_raising(Node& n, const std::string& says) {
  std::vector<size_t> r;
  if (as<torch::autograd::Error>(n) || of_python(n) || !says.starts_with(kUnimplemented)) return r;
  size_t valid = 0;
  for (size_t i = 0; i < n.num_outputs(); ++i) {
    if (!n.next_edge(i).is_valid()) continue;
    ++valid;
    if (raises_for(n, i, says)) r.push_back(i);
  }
  if (r.size() == valid) r.clear();
  return r;
}

bool is_of_formula(const std::string& says) { return says.starts_with(kUnimplemented); }

void raise_as_torch(const std::string& says) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_of_formula(says), says);
  TORCH_CHECK(false, says);
}

WithoutHooksOnSaved::WithoutHooksOnSaved(Node& node) {
  using torch::autograd::SavedVariable;
  each_saved(node, [&](SavedVariable& s) {
    if (!s.has_hooks()) return;
    const Tensor t = s.unpack(node.getptr());
    const bool traced = at::SavedTensorDefaultHooks::set_tracing(true);  // nobody's hooks take it
    SavedVariable plain(t, false);
    at::SavedTensorDefaultHooks::set_tracing(traced);
    replaced_.emplace_back(s, std::exchange(s, std::move(plain)));
  });
}

bool is_replaced(const Node& node) {
  if (as<generated::CumprodBackward0>(node)) return true;
  const auto* n = as<generated::LinalgDetBackward0>(node);
  if (!n || !at::GradMode::is_enabled()) return false;
  const Tensor a = n->A_.unpack();
  return !a.is_complex() && a.sym_numel() != 0;
}

bool checks_values(const Node& n) {
  return as<generated::LinalgEigBackward0>(n) || as<generated::LinalgEighBackward0>(n) || as<generated::LinalgSvdBackward0>(n);
}

bool chooses(const Node& node) { return at::GradMode::is_enabled() && as<generated::LinalgDetBackward0>(node) && !is_replaced(node); }

Tensor as_chosen(Node& node, const Tensor& grad, const Tensor& made) {
  if (!grad.defined()) return made;
  if (is_replaced(node)) {
    if (const auto* n = as<generated::LinalgDetBackward0>(node)) return of_determinant(grad, n->result_.unpack(node.getptr()), n->A_.unpack());
    const auto& n = *as<generated::CumprodBackward0>(node);
    const Tensor self = n.self_.unpack();
    return of_cumulative_product(grad.to(n.self_scalar_type), self, self.dim() ? at::maybe_wrap_dim(n.dim, self.dim()) : 0,
                                 n.result_.unpack(node.getptr()));
  }
  if (!made.defined()) return made;
  const bool scalar = made.dim() == 0;  // a product of one is that
  if (const auto* n = as<generated::ProdBackward0>(node); n && !scalar)
    return of_product(grad, n->self_.unpack().to(grad.scalar_type()), n->result_.unpack(node.getptr()), {}, false);
  if (const auto* n = as<generated::ProdBackward1>(node); n && !scalar)
    return of_product(grad, n->self_.unpack().to(grad.scalar_type()), n->result_.unpack(node.getptr()), at::maybe_wrap_dim(n->dim, made.dim()),
                      n->keepdim);
  if (const auto* n = as<generated::MaxBackward1>(node)) return spread(*n, node, grad, made);
  if (const auto* n = as<generated::MinBackward1>(node)) return spread(*n, node, grad, made);
  if (const auto* n = as<generated::MedianBackward0>(node)) return spread(*n, node, grad, made);
  if (const auto* n = as<generated::NanmedianBackward0>(node)) return spread(*n, node, grad, made);
  return made;
}

}  // namespace vitrify::capture
