#include "torch/numbers.h"

#include <c10/core/SymNodeImpl.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fmt/format.h>

#include <cmath>

#include "support/error.h"
#include "torch/tracer.h"

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

bool is_source(Numbers::Op op) { return op == Numbers::Op::Constant || op == Numbers::Op::Live || op == Numbers::Op::Item; }

double read(const at::Tensor& t) {
  const void* p = t.const_data_ptr();
  switch (t.scalar_type()) {
    case at::kFloat:
      return *static_cast<const float*>(p);
    case at::kDouble:
      return *static_cast<const double*>(p);
    case at::kBFloat16:
      return *static_cast<const c10::BFloat16*>(p);
    case at::kHalf:
      return *static_cast<const c10::Half*>(p);
    default:
      VT_UNREACHABLE("a number of type {}", int(t.scalar_type()));
  }
}

}  // namespace

std::optional<uint32_t> Numbers::add(Step s, double value) {
  if (s.op == Op::Constant) value = s.constant;
  if (!is_source(s.op)) {
    const std::optional<double> v = apply(s, seen[s.a], seen[s.b]);
    if (!v) return std::nullopt;
    value = *v;
  }
  if (s.op == Op::Live) num_live = std::max(num_live, s.a + 1);
  steps.push_back(s);
  seen.push_back(value);
  return static_cast<uint32_t>(steps.size() - 1);
}

bool Numbers::compare(Compare how, uint32_t a, uint32_t b) {
  const bool now = holds(how, seen[a], seen[b]);
  checks.push_back({how, a, b, now});
  return now;
}

bool Numbers::eval(const double* live, const at::Tensor* const* inputs, std::vector<double>& values) const {
  values.resize(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& s = steps[i];
    if (s.op == Op::Constant) {
      values[i] = s.constant;
    } else if (s.op == Op::Live) {
      values[i] = live[s.a];
    } else if (s.op == Op::Item) {
      values[i] = read(*inputs[s.a]);
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
namespace {

using c10::SymNode;
using Op = Numbers::Op;
using Compare = Numbers::Compare;

[[noreturn]] void refuse(std::string why) {
  if (Tracer* t = Tracer::current()) t->note_failure(why);
  throw CaptureError(why);
}
[[noreturn]] void refuse() { refuse("reads a tensor's value: aten::item, or a number that changes from call to call"); }

// What torch's Python wrappers ask for: a float (a step), an int constant on its way to a float, or the answer to a comparison.
class NumberNode final : public c10::SymNodeImpl {
 public:
  enum class Kind { Float, Int, Bool };
  NumberNode(std::shared_ptr<Numbers> n, Kind k, int64_t v) : numbers(std::move(n)), kind(k), value(v) {}
  std::shared_ptr<Numbers> numbers;
  Kind kind;
  int64_t value;  // step, integer or truth

  bool is_int() override { return kind == Kind::Int; }
  bool is_bool() override { return kind == Kind::Bool; }
  bool is_float() override { return kind == Kind::Float; }

  SymNode make(Kind k, int64_t v) const { return c10::make_intrusive<NumberNode>(numbers, k, v); }
  SymNode step(Numbers::Step s) const {
    const auto id = numbers->add(s);
    if (!id) refuse("computes with a number that changes from call to call what is no float");
    return make(Kind::Float, *id);
  }
  SymNode constant(double v) const { return step({Op::Constant, 0, 0, v}); }
  uint32_t id(const SymNode& n) const {
    if (auto* o = dynamic_cast<NumberNode*>(n.get())) {
      if (o->kind == Kind::Float) return static_cast<uint32_t>(o->value);
      return *numbers->add({Op::Constant, 0, 0, static_cast<double>(o->value)});
    }
    return *numbers->add(
        {Op::Constant, 0, 0, n->is_int() ? static_cast<double>(n->guard_int(__FILE__, __LINE__)) : n->guard_float(__FILE__, __LINE__)});
  }
  uint32_t own() const {
    return kind == Kind::Float ? static_cast<uint32_t>(value) : *numbers->add({Op::Constant, 0, 0, static_cast<double>(value)});
  }
  SymNode binary(Op op, const SymNode& o) const { return step({op, own(), id(o)}); }
  SymNode truth(Compare how, uint32_t a, uint32_t b) const { return make(Kind::Bool, numbers->compare(how, a, b)); }

  SymNode add(const SymNode& o) override { return binary(Op::Add, o); }
  SymNode sub(const SymNode& o) override { return binary(Op::Sub, o); }
  SymNode mul(const SymNode& o) override { return binary(Op::Mul, o); }
  SymNode truediv(const SymNode& o) override { return binary(Op::Div, o); }
  SymNode float_truediv(const SymNode& o) override { return binary(Op::Div, o); }
  SymNode int_truediv(const SymNode& o) override { return binary(Op::Div, o); }
  SymNode pow(const SymNode& o) override { return binary(Op::Pow, o); }
  SymNode float_pow(const SymNode& o) override { return binary(Op::Pow, o); }
  SymNode floordiv(const SymNode& o) override { return binary(Op::FloorDiv, o); }
  SymNode mod(const SymNode& o) override { return binary(Op::Mod, o); }
  SymNode sym_min(const SymNode& o) override { return binary(Op::Min, o); }
  SymNode sym_max(const SymNode& o) override { return binary(Op::Max, o); }
  SymNode neg() override { return step({Op::Neg, own()}); }
  SymNode sym_float() override { return make(Kind::Float, own()); }
  SymNode eq(const SymNode& o) override { return truth(Compare::Eq, own(), id(o)); }
  SymNode ne(const SymNode& o) override { return truth(Compare::Ne, own(), id(o)); }
  SymNode lt(const SymNode& o) override { return truth(Compare::Lt, own(), id(o)); }
  SymNode le(const SymNode& o) override { return truth(Compare::Le, own(), id(o)); }
  SymNode gt(const SymNode& o) override { return truth(Compare::Lt, id(o), own()); }
  SymNode ge(const SymNode& o) override { return truth(Compare::Le, id(o), own()); }
  SymNode sym_not() override { return make(Kind::Bool, !guard_bool(__FILE__, __LINE__)); }

  SymNode clone() override { return make(kind, value); }
  SymNode wrap_int(int64_t n) override { return make(Kind::Int, n); }
  SymNode wrap_float(double n) override { return constant(n); }
  SymNode wrap_bool(bool n) override { return make(Kind::Bool, n); }

  bool guard_bool(const char*, int64_t) override {
    if (kind == Kind::Float) return numbers->compare(Compare::Ne, own(), *numbers->add({Op::Constant, 0, 0, 0}));
    return value != 0;
  }
  int64_t guard_int(const char*, int64_t) override {
    if (kind == Kind::Float) refuse();
    return value;
  }
  double guard_float(const char*, int64_t) override {
    if (kind == Kind::Float) refuse();
    return static_cast<double>(value);
  }
  int64_t int_() override { return guard_int(__FILE__, __LINE__); }
  bool bool_() override { return guard_bool(__FILE__, __LINE__); }
  bool has_hint() override { return true; }
  std::string str() override {
    if (kind == Kind::Float) refuse();  // the text would be that of this call only
    return fmt::format("{}", value);
  }
  std::string _graph_repr() override { return str(); }
  std::optional<int64_t> constant_int() override { return kind == Kind::Int ? std::optional<int64_t>(value) : std::nullopt; }
  std::optional<int64_t> maybe_as_int() override { return constant_int(); }
  std::optional<bool> constant_bool() override { return kind == Kind::Bool ? std::optional<bool>(value != 0) : std::nullopt; }
  bool is_constant() override { return kind != Kind::Float; }
  bool is_symbolic() override { return true; }
};

}  // namespace

c10::SymFloat to_sym_float(const std::shared_ptr<Numbers>& n, uint32_t step) {
  return c10::SymFloat(SymNode(c10::make_intrusive<NumberNode>(n, NumberNode::Kind::Float, int64_t(step))));
}

std::optional<uint32_t> step_of(const c10::SymFloat& f) {
  if (!f.is_symbolic()) return std::nullopt;
  auto* n = dynamic_cast<NumberNode*>(f.toSymNodeImplUnowned());
  if (!n || n->kind != NumberNode::Kind::Float) return std::nullopt;
  return static_cast<uint32_t>(n->value);
}

}  // namespace capture
}  // namespace vitrify
