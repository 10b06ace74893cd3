#include "torch/numbers.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/error.h"
#include "torch/number_hooks.h"

namespace vitrify {

namespace {

double rounded(double v, at::ScalarType t) {
  switch (t) {
    case at::kFloat:
      return static_cast<float>(v);
    case at::kBFloat16:
      return static_cast<float>(c10::BFloat16(static_cast<float>(v)));
    case at::kHalf:
      return static_cast<float>(c10::Half(static_cast<float>(v)));
    default:
      return v;
  }
}

// Python's float arithmetic; nullopt where it raises or gives a complex number.
std::optional<double> apply(const Numbers::Step& s, double a, double b) {
  using Op = Numbers::Op;
  switch (s.op) {
    case Op::Add:
      return a + b;
    case Op::Sub:
      return a - b;
    case Op::Mul:
      return a * b;
    case Op::Div:
      if (b == 0) return std::nullopt;
      return a / b;
    case Op::Pow: {
      if ((a == 0 && b < 0) || (a < 0 && std::floor(b) != b)) return std::nullopt;
      const double r = std::pow(a, b);
      if (!std::isfinite(r) && std::isfinite(a) && std::isfinite(b)) return std::nullopt;
      return r;
    }
    case Op::Mod:
    case Op::FloorDiv: {
      if (b == 0) return std::nullopt;
      double mod = std::fmod(a, b), div = (a - mod) / b;
      if (mod != 0 ? (b < 0) != (mod < 0) : false) mod += b, div -= 1;
      if (mod == 0) mod = std::copysign(0.0, b);
      if (s.op == Op::Mod) return mod;
      if (div == 0) return std::copysign(0.0, a / b);
      const double whole = std::floor(div);
      return div - whole > 0.5 ? whole + 1 : whole;
    }
    case Op::Min:
      return b < a ? b : a;
    case Op::Max:
      return b > a ? b : a;
    case Op::Neg:
      return -a;
    case Op::Sqrt:
      if (a < 0) return std::nullopt;
      return std::sqrt(a);
    case Op::Floor:
      return std::floor(a);
    case Op::Ceil:
      return std::ceil(a);
    case Op::Round:
      return rounded(a, s.type);
    default:
      VT_UNREACHABLE("number {}", int(s.op));
  }
}

bool holds(Numbers::Compare how, double a, double b) {
  switch (how) {
    case Numbers::Compare::Eq:
      return a == b;
    case Numbers::Compare::Ne:
      return a != b;
    case Numbers::Compare::Lt:
      return a < b;
    case Numbers::Compare::Le:
      return a <= b;
  }
  return false;
}

bool is_source(Numbers::Op op) {
  using Op = Numbers::Op;
  return op == Op::Constant || op == Op::Live || op == Op::Item || op == Op::Traced;
}

}  // namespace

double number_in(const at::Tensor& t) {
  const void* p = t.const_data_ptr();
  const double sign = t.is_neg() ? -1 : 1;
  switch (t.scalar_type()) {
    case at::kFloat:
      return sign * *static_cast<const float*>(p);
    case at::kDouble:
      return sign * *static_cast<const double*>(p);
    case at::kBFloat16:
      return sign * static_cast<double>(*static_cast<const c10::BFloat16*>(p));
    case at::kHalf:
      return sign * static_cast<double>(*static_cast<const c10::Half*>(p));
    default:
      VT_UNREACHABLE("a number of type {}", int(t.scalar_type()));
  }
}

bool Numbers::positive(uint32_t step) const {
  const Step& s = steps[step];
  switch (s.op) {
    case Op::Constant:
      return s.constant > 0;
    case Op::Max:
      return positive(s.a);  // b > a ? b : a
    case Op::Min:
    case Op::Add:
      return positive(s.a) && positive(s.b);
    default:
      return false;
  }
}

bool Numbers::never_zero(uint32_t step) {
  const Step s = steps[step];
  if (!s.traced) return seen[step] != 0 && (s.op == Op::Constant || compare(Compare::Ne, step, *add({Op::Constant})));
  return positive(step) || (s.op == Op::Max && positive(s.b)) || (s.op == Op::Neg && never_zero(s.a));
}

std::optional<uint32_t> Numbers::add(Step s, double value) {
  if (s.op == Op::Constant) value = s.constant;
  const bool unary = s.op >= Op::Neg;
  s.traced = s.op == Op::Traced || (!is_source(s.op) && (steps[s.a].traced || (!unary && steps[s.b].traced)));
  if (s.traced) {
    const bool total = s.op == Op::Traced || s.op == Op::Add || s.op == Op::Sub || s.op == Op::Mul || s.op == Op::Min || s.op == Op::Max ||
                       s.op == Op::Neg || (s.op == Op::Div && never_zero(s.b));
    if (!total) return std::nullopt;
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (!is_source(s.op)) {
    const std::optional<double> v = apply(s, seen[s.a], seen[s.b]);
    if (!v) return std::nullopt;
    value = *v;
    if (steps[s.a].op == Op::Constant && (unary || steps[s.b].op == Op::Constant)) s = {Op::Constant, 0, 0, value};
  }
  if (s.op == Op::Live) num_live = std::max(num_live, s.a + 1);
  steps.push_back(s);
  seen.push_back(value);
  return static_cast<uint32_t>(steps.size() - 1);
}

bool Numbers::computed_on_host() const {
  return !checks.empty() || std::any_of(steps.begin(), steps.end(), [](const Step& s) { return s.op == Op::Live || s.op == Op::Item; });
}

bool Numbers::compare(Compare how, uint32_t a, uint32_t b) {
  if (steps[a].traced || steps[b].traced) throw CaptureError("reads a tensor's value: aten::item");
  const bool now = holds(how, seen[a], seen[b]);
  checks.push_back({how, a, b, now});
  return now;
}

bool Numbers::eval(const double* live, const at::Tensor* const* inputs, std::vector<double>& values) const {
  values.resize(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& s = steps[i];
    if (s.traced) continue;
    if (s.op == Op::Constant) {
      values[i] = s.constant;
    } else if (s.op == Op::Live) {
      values[i] = live[s.a];
    } else if (s.op == Op::Item) {
      values[i] = number_in(*inputs[s.a]);
    } else {
      const std::optional<double> v = apply(s, values[s.a], values[s.b]);
      if (!v) return false;
      values[i] = *v;
    }
  }
  for (const Check& c : checks)
    if (holds(c.how, values[c.a], values[c.b]) != c.holds) return false;
  return true;
}

namespace capture {

static NumberHooks& hooks() {
  static NumberHooks h;
  return h;
}
void set_number_hooks(NumberHooks h) { hooks() = h; }

c10::SymFloat to_sym_float(const std::shared_ptr<Numbers>& n, uint32_t step) {
  VT_CHECK(hooks().wrap, "a live number in a process without Python");
  return hooks().wrap(n, step);
}
bool compared_by_program() { return hooks().compared_by_program && hooks().compared_by_program(); }
std::optional<uint32_t> step_of(const c10::SymFloat& f) { return hooks().step_of && f.is_symbolic() ? hooks().step_of(f) : std::nullopt; }

}  // namespace capture
}  // namespace vitrify
