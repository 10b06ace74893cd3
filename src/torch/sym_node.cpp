#include "torch/sym_node.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string_view>

#include "torch/composite_state.h"
#include "torch/convert.h"
#include "torch/numbers.h"
#include "torch/tracer.h"

namespace vitrify::capture {
namespace {

using c10::SymNode;
using Ctx = std::shared_ptr<sym::Context>;

// Also where the program catches the exception. Eager then raises what Python raises.
[[noreturn]] void refuse(const std::string& why) {
  if (Tracer* t = Tracer::current()) t->note_failure(why);
  throw CaptureError(why);
}

// Python's arithmetic of floats.
double compute(Numbers::Op op, double x, double y) {
  Numbers n;
  const auto a = n.add({Numbers::Op::Constant, 0, 0, x}), b = n.add({Numbers::Op::Constant, 0, 0, y});
  const auto r = n.add({op, *a, *b});
  if (!r) refuse("computes of its sizes what is no float: a division by zero, or a power");
  return n.seen[*r];
}

// An integer expression, a comparison of two, a number, or the quotient of two integer expressions as a float: what formulas scale gradients by.
// Whatever is asked beyond integer arithmetic is answered with the value, guarded: sound, merely static.
class Node final : public c10::SymNodeImpl {
 public:
  enum class Kind { Int, Eq, Ne, Lt, Le, Bool, Float };
  Node(Ctx c, Kind k, sym::Int a, sym::Int b = 0, double number = 0, std::optional<double> whole = {})
      : ctx(std::move(c)), kind(k), a(a), b(b), number(number), whole(whole) {}
  Ctx ctx;
  Kind kind;
  sym::Int a, b;
  double number;                // Float: unless a / b are not known
  std::optional<double> whole;  // of a quotient of floats: what Python's // gives

  bool is_int() override { return kind == Kind::Int; }
  bool is_bool() override { return kind != Kind::Int && kind != Kind::Float; }
  bool is_float() override { return kind == Kind::Float; }

  SymNode make(Kind k, sym::Int x, sym::Int y = 0) const { return c10::make_intrusive<Node>(ctx, k, x, y); }
  SymNode make(sym::Int x) const { return make(Kind::Int, x); }
  SymNode make(double x, std::optional<double> whole = {}) const { return c10::make_intrusive<Node>(ctx, Kind::Float, 0, 0, x, whole); }
  static sym::Int expr(const SymNode& n) {
    if (auto* o = dynamic_cast<Node*>(n.get()); o && o->kind == Kind::Int) return o->a;
    return n->guard_int(__FILE__, __LINE__);
  }
  static bool integral(const SymNode& n) { return n->is_int(); }
  bool is_quotient() const { return kind == Kind::Float && !(a.is_const() && b.is_const()); }
  void settle() {
    if (!is_quotient()) return;
    const double x = double(ctx->specialize(a)), y = double(ctx->specialize(b));
    if (!b.is(1)) whole = compute(Numbers::Op::FloorDiv, x, y);
    number = compute(Numbers::Op::Div, x, y);
    a = b = 0;
  }
  double real() {
    settle();
    return is_int() ? double(ctx->specialize(a)) : is_bool() ? double(decide()) : number;
  }
  // An integer, also as a float, and no negative zero.
  static std::optional<sym::Int> integer_in(const SymNode& n) {
    auto* o = dynamic_cast<Node*>(n.get());
    if (!o || o->is_bool()) return {};
    if (o->kind == Kind::Int || (o->is_quotient() && o->b.is(1))) return o->stays(o->a, 52) ? std::optional(o->a) : std::nullopt;
    if (o->is_quotient()) return {};
    const double x = o->number;
    return std::floor(x) == x && std::abs(x) < 0x1p52 && !(x == 0 && std::signbit(x)) ? std::optional(sym::Int(static_cast<int64_t>(x)))
                                                                                      : std::nullopt;
  }
  // Of two of which one depends on sizes, and arithmetic of floats is exact.
  std::optional<std::pair<sym::Int, sym::Int>> integers(const SymNode& o) {
    if (is_int() && integral(o)) return std::pair(a, expr(o));
    const auto x = integer_in(SymNode::reclaim_copy(this)), y = integer_in(o);
    return x && y && !(x->is_const() && y->is_const()) ? std::optional(std::pair(*x, *y)) : std::nullopt;
  }
  SymNode quotient(sym::Int x, sym::Int y) const { return x.is_const() && y.is(1) ? make(double(x.value())) : make(Kind::Float, x, y); }
  static double real(const SymNode& n) {
    if (n->is_bool()) return double(n->guard_bool(__FILE__, __LINE__));
    return n->is_int() ? double(n->guard_int(__FILE__, __LINE__)) : n->guard_float(__FILE__, __LINE__);
  }

#define ARITHMETIC(name, op, integer) \
  SymNode name(const SymNode& o) override { return is_int() && integral(o) ? make(integer) : floats(Numbers::Op::op, o); }
  ARITHMETIC(add, Add, sum(a, expr(o)))
  ARITHMETIC(sub, Sub, sum(a, -expr(o)))
  ARITHMETIC(mul, Mul, product(a, expr(o)))
  ARITHMETIC(sym_min, Min, sym::min(a, expr(o)))
  ARITHMETIC(sym_max, Max, sym::max(a, expr(o)))
  ARITHMETIC(floordiv, FloorDiv, sym::floordiv(a, nonzero(o)))
  ARITHMETIC(mod, Mod, sym::mod(a, nonzero(o)))
  SymNode floats(Numbers::Op op, const SymNode& o) {
    if (op == Numbers::Op::Add || op == Numbers::Op::Sub)
      if (const auto i = integers(o)) return quotient(op == Numbers::Op::Add ? i->first + i->second : i->first - i->second, 1);
    return make(compute(op, real(), real(o)));
  }
  SymNode int_floordiv(const SymNode& o) override { return floordiv(o); }
  SymNode truediv(const SymNode& o) override {
    if (const auto i = integers(o); i && !(i->first.is_const() && i->second.is_const()))
      if (stays(i->first, 52) && stays(i->second, 52) && !ctx->guard_eq(i->second, 0)) return quotient(i->first, i->second);
    const double x = real(), y = real(o), limit = 0x1p53;  // of larger integers Python rounds the quotient only
    if (is_int() && integral(o) && (std::abs(x) > limit || std::abs(y) > limit)) refuse("divides integers that no float holds");
    return make(compute(Numbers::Op::Div, x, y), compute(Numbers::Op::FloorDiv, x, y));
  }
  SymNode float_truediv(const SymNode& o) override { return truediv(o); }
  SymNode int_truediv(const SymNode& o) override { return truediv(o); }
  SymNode pow(const SymNode& o) override { return is_int() && integral(o) ? pow_by_natural(o) : float_pow(o); }
  SymNode float_pow(const SymNode& o) override { return floats(Numbers::Op::Pow, o); }
  SymNode pow_by_natural(const SymNode& o) override {
    int64_t n = o->guard_int(__FILE__, __LINE__);
    TORCH_CHECK(n >= 0, "a size to a negative power");
    const sym::Int base = n > 2 ? sym::Int(ctx->specialize(a)) : a;
    sym::Int r = 1;
    for (int64_t i = 0; i < n; ++i) r = product(r, base);
    return make(r);
  }
  // Python's integers have no end, these have 64 bits. Sums and products of what counts elements stay far below, also in later calls: a product is
  // guarded to be of two that have half of them. Where other numbers take part, the result is computed for these sizes only.
  sym::Int sum(sym::Int x, sym::Int y) const { return stays(x, 62) && stays(y, 62) ? x + y : exact(x, y, std::plus()); }
  sym::Int product(sym::Int x, sym::Int y) const {
    const bool fits = counts(x, 31) && counts(y, 31) && bits_of(x) + bits_of(y) <= 62;
    return fits || (stays(x, 31) && stays(y, 31)) ? x * y : exact(x, y, std::multiplies());
  }
  // At most, where sizes count what has an address. An expression is a tree here and may be a graph: of a large one nothing is known.
  static int bits_of(sym::Int i) {
    int left = 64;
    return bits_of(i, left);
  }
  static int bits_of(sym::Int i, int& left) {
    if (--left < 0) return 63;
    const sym::View v = sym::view(i);
    if (v.op == sym::ExprOp::Const) return std::bit_width(static_cast<uint64_t>(v.value < 0 ? ~v.value : v.value));
    if (v.op == sym::ExprOp::Symbol) return v.symbol->range.lo < 0 ? 63 : 47;
    int most = 0, all = 0;
    for (sym::Int arg : v.args) {
      const int bits = bits_of(arg, left);
      most = std::max(most, bits), all += bits;
    }
    switch (v.op) {
      case sym::ExprOp::Mul:
        return std::min(all, 63);
      case sym::ExprOp::Add:
        return std::min(most + static_cast<int>(std::bit_width(v.args.size())), 63);
      default:
        return most;
    }
  }
  static bool counts(sym::Int i, int bits) {
    const int64_t v = i.is_const() ? i.value() : sym::has_hint(i) ? sym::hint(i) : 0;
    return (v < 0 ? ~v : v) >> bits == 0;
  }
  bool stays(sym::Int i, int bits) const {
    if (!counts(i, bits)) return false;
    if (bits_of(i) <= bits || !sym::has_hint(i)) return true;
    const int64_t end = int64_t{1} << bits;
    const sym::Range r = sym::bounds(i).value_or(sym::Range{});
    if (r.hi >= end) ctx->guard_lt(i, end);
    if (r.lo < -end) ctx->guard_le(-end, i);
    return true;
  }
  template <class F>
  sym::Int exact(sym::Int x, sym::Int y, F f) const {
    const auto r = f(__int128{ctx->specialize(x)}, __int128{ctx->specialize(y)});
    if (r != static_cast<int64_t>(r)) refuse("computes with an integer of more than 64 bits");
    return static_cast<int64_t>(r);
  }
  SymNode neg() override { return is_int() ? make(-a) : make(-real()); }
  static sym::Int integer(double x) {
    if (!(x >= -0x1p63 && x < 0x1p63)) refuse("computes with an integer of more than 64 bits");
    return static_cast<int64_t>(x);
  }
  SymNode ceil() override { return is_int() ? make(a) : make(integer(std::ceil(real()))); }
  // torch writes x // y of floats as floor(x / y), which is another number where the quotient was rounded up to it, and has no negative zero.
  SymNode floor() override {
    if (is_int()) return make(a);
    const double r = std::floor(real());
    if (whole && (*whole != r || std::signbit(*whole) != std::signbit(r) || (r == 0 && std::signbit(r))))
      refuse("divides floats that sizes make, rounding down");
    return make(integer(r));
  }
  SymNode sym_float() override { return is_quotient() ? clone() : is_int() && stays(a, 52) ? quotient(a, 1) : make(real()); }

#define COMPARE(name, integer, op)                 \
  SymNode name(const SymNode& o) override {        \
    const auto i = integers(o);                    \
    return i ? integer : truth(real() op real(o)); \
  }
  COMPARE(eq, make(Kind::Eq, i->first, i->second), ==)
  COMPARE(ne, make(Kind::Ne, i->first, i->second), !=)
  COMPARE(lt, make(Kind::Lt, i->first, i->second), <)
  COMPARE(le, make(Kind::Le, i->first, i->second), <=)
  COMPARE(gt, make(Kind::Lt, i->second, i->first), >)
  COMPARE(ge, make(Kind::Le, i->second, i->first), >=)
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

  SymNode clone() override { return c10::make_intrusive<Node>(ctx, kind, a, b, number, whole); }
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
  int64_t guard_int(const char* file, int64_t) override {
    const int64_t r = is_int() ? ctx->specialize(a) : integer(real()).value();
    // torch.tensor() and the like put 32 bits of it into the tensor.
    if (r != static_cast<int32_t>(r) && std::string_view(file).find("tensor_new") != std::string_view::npos)
      refuse("makes a tensor of an integer of more than 32 bits");
    return r;
  }
  bool guard_bool(const char*, int64_t) override { return decide(); }
  double guard_float(const char*, int64_t) override { return real(); }
  bool statically_known_true(const char*, int64_t) override { return proved().value_or(false); }
  int64_t int_() override { return guard_int(__FILE__, __LINE__); }
  bool bool_() override { return decide(); }
  bool has_hint() override { return true; }
  // For messages of torch, which writes some before it knows whether they are needed.
  // A program that reads a size as text, that of an error too, sees the number, as eager's does, and is then guarded by it.
  std::string str() override { return kind == Kind::Int && TextUnread::now() ? std::to_string(sym::hint(a)) : _graph_repr(); }
  std::string _graph_repr() override {
    if (kind == Kind::Int) return std::to_string(ctx->specialize(a));
    if (kind != Kind::Float) return decide() ? "True" : "False";
    const double x = real();
    if (std::isnan(x)) return "nan";  // Python shows no sign of it
    const std::string text = fmt::format("{}", x);
    return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
  }
  std::optional<int64_t> constant_int() override { return maybe_as_int(); }
  std::optional<bool> constant_bool() override { return kind == Kind::Bool ? std::optional<bool>(a.value() != 0) : std::nullopt; }
  std::optional<int64_t> maybe_as_int() override { return is_int() && a.is_const() ? std::optional<int64_t>(a.value()) : std::nullopt; }
  // torch's Python wrappers know no constant float. They ask after each comparison, and make a bool of what is constant.
  bool is_constant() override { return kind == Kind::Bool || (is_int() && a.is_const()) || (is_bool() && compared_by_program()); }
  bool is_symbolic() override { return true; }

 private:
  sym::Int nonzero(const SymNode& o) {
    sym::Int d = expr(o);
    TORCH_CHECK(!ctx->guard_eq(d, 0), "integer division or modulo by zero");
    return d;
  }
};

Node* node_of(const c10::SymFloat& f) { return f.is_symbolic() ? dynamic_cast<Node*>(f.toSymNodeImplUnowned()) : nullptr; }

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

bool is_ours(const SymNode& n) { return dynamic_cast<Node*>(n.get()) != nullptr; }

std::optional<std::pair<sym::Int, sym::Int>> quotient_of(const c10::SymFloat& f) {
  const Node* n = node_of(f);
  return n && n->is_quotient() ? std::optional(std::pair(n->a, n->b)) : std::nullopt;
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
