#include "torch/sym_node.h"

#include "torch/convert.h"

namespace vitrify::capture {
namespace {

using c10::SymNode;
using Ctx = std::shared_ptr<sym::Context>;

// An integer expression, a comparison of two, or a number. Whatever is asked beyond integer arithmetic is answered with the value, guarded: sound,
// merely static.
class Node final : public c10::SymNodeImpl {
 public:
  enum class Kind { Int, Eq, Ne, Lt, Le, Bool, Float };
  Node(Ctx c, Kind k, sym::Int a, sym::Int b = 0, double number = 0) : ctx(std::move(c)), kind(k), a(a), b(b), number(number) {}
  Ctx ctx;
  Kind kind;
  sym::Int a, b;
  double number;

  bool is_int() override { return kind == Kind::Int; }
  bool is_bool() override { return kind != Kind::Int && kind != Kind::Float; }
  bool is_float() override { return kind == Kind::Float; }

  SymNode make(Kind k, sym::Int x, sym::Int y = 0) const { return c10::make_intrusive<Node>(ctx, k, x, y); }
  SymNode make(sym::Int x) const { return make(Kind::Int, x); }
  SymNode make(double x) const { return c10::make_intrusive<Node>(ctx, Kind::Float, 0, 0, x); }
  static sym::Int expr(const SymNode& n) {
    if (auto* o = dynamic_cast<Node*>(n.get()); o && o->kind == Kind::Int) return o->a;
    return n->guard_int(__FILE__, __LINE__);
  }
  static bool integral(const SymNode& n) { return n->is_int(); }
  double real() { return is_int() ? double(ctx->specialize(a)) : is_bool() ? double(decide()) : number; }
  static double real(const SymNode& n) {
    if (n->is_bool()) return double(n->guard_bool(__FILE__, __LINE__));
    return n->is_int() ? double(n->guard_int(__FILE__, __LINE__)) : n->guard_float(__FILE__, __LINE__);
  }

#define ARITHMETIC(name, integer, floating) \
  SymNode name(const SymNode& o) override { return is_int() && integral(o) ? make(integer) : make(floating); }
  ARITHMETIC(add, sum(a, expr(o)), real() + real(o))
  ARITHMETIC(sub, sum(a, -expr(o)), real() - real(o))
  ARITHMETIC(mul, product(a, expr(o)), real() * real(o))
  ARITHMETIC(sym_min, sym::min(a, expr(o)), std::min(real(), real(o)))
  ARITHMETIC(sym_max, sym::max(a, expr(o)), std::max(real(), real(o)))
  SymNode floordiv(const SymNode& o) override {
    if (!is_int() || !integral(o)) return make(std::floor(real() / real(o)));
    return make(sym::floordiv(a, nonzero(o)));
  }
  SymNode int_floordiv(const SymNode& o) override { return floordiv(o); }
  SymNode mod(const SymNode& o) override {
    if (!is_int() || !integral(o)) return make(real() - std::floor(real() / real(o)) * real(o));
    return make(sym::mod(a, nonzero(o)));
  }
  SymNode truediv(const SymNode& o) override { return make(real() / real(o)); }
  SymNode float_truediv(const SymNode& o) override { return make(real() / real(o)); }
  SymNode int_truediv(const SymNode& o) override { return make(real() / real(o)); }
  SymNode pow(const SymNode& o) override {
    if (is_int() && integral(o)) return pow_by_natural(o);
    return make(std::pow(real(), real(o)));
  }
  SymNode float_pow(const SymNode& o) override { return make(std::pow(real(), real(o))); }
  SymNode pow_by_natural(const SymNode& o) override {
    int64_t n = o->guard_int(__FILE__, __LINE__);
    TORCH_CHECK(n >= 0, "a size to a negative power");
    const sym::Int base = n > 2 ? sym::Int(ctx->specialize(a)) : a;
    sym::Int r = 1;
    for (int64_t i = 0; i < n; ++i) r = product(r, base);
    return make(r);
  }
  // Python's integers have no end, these have 64 bits. Sums and products of what counts elements stay far below; where other numbers take part, the
  // result is computed for these sizes only.
  sym::Int sum(sym::Int x, sym::Int y) const { return counts(x, 62) && counts(y, 62) ? x + y : exact(x, y, std::plus()); }
  sym::Int product(sym::Int x, sym::Int y) const { return counts(x, 31) && counts(y, 31) ? x * y : exact(x, y, std::multiplies()); }
  static bool counts(sym::Int i, int bits) {
    const int64_t v = i.is_const() ? i.value() : sym::has_hint(i) ? sym::hint(i) : 0;
    return (v < 0 ? ~v : v) >> bits == 0;
  }
  template <class F>
  sym::Int exact(sym::Int x, sym::Int y, F f) const {
    const auto r = f(__int128{ctx->specialize(x)}, __int128{ctx->specialize(y)});
    if (r != static_cast<int64_t>(r)) throw CaptureError("computes with an integer of more than 64 bits");
    return static_cast<int64_t>(r);
  }
  SymNode neg() override { return is_int() ? make(-a) : make(-number); }
  SymNode ceil() override { return is_int() ? make(a) : make(sym::Int(int64_t(std::ceil(number)))); }
  SymNode floor() override { return is_int() ? make(a) : make(sym::Int(int64_t(std::floor(number)))); }
  SymNode sym_float() override { return make(real()); }

#define COMPARE(name, integer, op) \
  SymNode name(const SymNode& o) override { return is_int() && integral(o) ? integer : truth(real() op real(o)); }
  COMPARE(eq, make(Kind::Eq, a, expr(o)), ==)
  COMPARE(ne, make(Kind::Ne, a, expr(o)), !=)
  COMPARE(lt, make(Kind::Lt, a, expr(o)), <)
  COMPARE(le, make(Kind::Le, a, expr(o)), <=)
  COMPARE(gt, make(Kind::Lt, expr(o), a), >)
  COMPARE(ge, make(Kind::Le, expr(o), a), >=)
  SymNode truth(bool x) const { return make(Kind::Bool, int64_t(x)); }
  SymNode sym_and(const SymNode& o) override { return truth(decide() && o->guard_bool(__FILE__, __LINE__)); }
  SymNode sym_or(const SymNode& o) override { return truth(decide() || o->guard_bool(__FILE__, __LINE__)); }
  SymNode sym_not() override {
    switch (kind) {
      case Kind::Eq:
        return make(Kind::Ne, a, b);
      case Kind::Ne:
        return make(Kind::Eq, a, b);
      case Kind::Lt:
        return make(Kind::Le, b, a);
      case Kind::Le:
        return make(Kind::Lt, b, a);
      default:
        return truth(!decide());
    }
  }
  SymNode sym_ite(const SymNode& t, const SymNode& f) override { return decide() ? t : f; }

  SymNode clone() override { return c10::make_intrusive<Node>(ctx, kind, a, b, number); }
  SymNode wrap_int(int64_t n) override { return make(sym::Int(n)); }
  SymNode wrap_float(double n) override { return make(n); }
  SymNode wrap_bool(bool n) override { return truth(n); }

  bool decide() {
    switch (kind) {
      case Kind::Eq:
        return ctx->guard_eq(a, b);
      case Kind::Ne:
        return !ctx->guard_eq(a, b);
      case Kind::Lt:
        return ctx->guard_lt(a, b);
      case Kind::Le:
        return ctx->guard_le(a, b);
      case Kind::Bool:
        return a.value() != 0;
      default:
        return real() != 0;
    }
  }
  std::optional<bool> proved() const {
    std::optional<bool> r;
    switch (kind) {
      case Kind::Eq:
        return sym::known_eq(a, b);
      case Kind::Ne:
        r = sym::known_eq(a, b);
        if (r) r = !*r;
        return r;
      case Kind::Lt:
        return sym::known_lt(a, b);
      case Kind::Le:
        return sym::known_le(a, b);
      case Kind::Bool:
        return a.value() != 0;
      default:
        return r;
    }
  }
  int64_t guard_int(const char*, int64_t) override { return is_int() ? ctx->specialize(a) : int64_t(real()); }
  bool guard_bool(const char*, int64_t) override { return decide(); }
  double guard_float(const char*, int64_t) override { return real(); }
  bool statically_known_true(const char*, int64_t) override { return proved().value_or(false); }
  int64_t int_() override { return guard_int(__FILE__, __LINE__); }
  bool bool_() override { return decide(); }
  bool has_hint() override { return true; }
  // For messages of torch, which writes some before it knows whether they are needed.
  std::string str() override { return kind == Kind::Int ? sym::str(a) : _graph_repr(); }
  // A program that reads a size as text sees the number, as eager's does, and is then guarded by it.
  std::string _graph_repr() override {
    if (kind == Kind::Int) return std::to_string(ctx->specialize(a));
    if (kind != Kind::Float) return decide() ? "True" : "False";
    const std::string text = fmt::format("{}", number);
    return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
  }
  std::optional<int64_t> constant_int() override { return maybe_as_int(); }
  std::optional<bool> constant_bool() override { return kind == Kind::Bool ? std::optional<bool>(a.value() != 0) : std::nullopt; }
  std::optional<int64_t> maybe_as_int() override { return is_int() && a.is_const() ? std::optional<int64_t>(a.value()) : std::nullopt; }
  // torch's Python wrappers know no constant float.
  bool is_constant() override { return kind == Kind::Bool || (is_int() && a.is_const()); }
  bool is_symbolic() override { return true; }

 private:
  sym::Int nonzero(const SymNode& o) {
    sym::Int d = expr(o);
    TORCH_CHECK(!ctx->guard_eq(d, 0), "integer division or modulo by zero");
    return d;
  }
};

int64_t number_of(const c10::SymInt& s, bool specialize) {
  sym::Int e = from_sym_int(s);
  if (e.is_const()) return e.value();
  return specialize ? s.guard_int(__FILE__, __LINE__) : sym::hint(e);
}

}  // namespace

c10::SymInt to_sym_int(const Ctx& ctx, sym::Int i) {
  if (i.is_const()) return c10::SymInt(i.value());
  return c10::SymInt(SymNode(c10::make_intrusive<Node>(ctx, Node::Kind::Int, i)));
}

sym::Int from_sym_int(const c10::SymInt& s) {
  if (auto i = s.maybe_as_int()) return *i;
  return Node::expr(s.toSymNode());
}

std::vector<sym::Int> ints_of(const c10::IValue& v) {
  std::vector<sym::Int> r;
  if (v.isIntList()) {
    for (int64_t i : v.toIntVector()) r.push_back(i);
  } else {
    for (const c10::IValue& e : v.toListRef()) r.push_back(e.isSymInt() ? from_sym_int(e.toSymInt()) : sym::Int(e.toInt()));
  }
  return r;
}

bool is_static(const ir::TensorType& t) {
  for (const sym::Int& i : t.sizes)
    if (!i.is_const()) return false;
  for (const sym::Int& i : t.strides)
    if (!i.is_const()) return false;
  return true;
}

bool is_static(const c10::IValue& v) {
  if (v.isSymInt()) return from_sym_int(v.toSymInt()).is_const();
  if (v.isSymIntList())
    for (sym::Int i : ints_of(v))
      if (!i.is_const()) return false;
  return true;
}

c10::IValue static_value(const c10::IValue& v, bool specialize) {
  if (v.isSymInt()) return number_of(v.toSymInt(), specialize);
  if (v.isSymIntList()) {
    std::vector<int64_t> r;
    for (const c10::IValue& e : v.toListRef()) r.push_back(e.isSymInt() ? number_of(e.toSymInt(), specialize) : e.toInt());
    return r;
  }
  return v;
}

}  // namespace vitrify::capture
