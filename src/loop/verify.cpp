#include <set>
#include <unordered_map>

#include "loop/loop.h"

namespace vitrify::loop {
namespace {

class Verifier {
 public:
  explicit Verifier(const Kernel& k) : k_(k), type_(k.num_values, DType::Opaque), defined_(k.num_values), visible_(k.num_values) {}

  void run() {
    for (auto& b : k_.buffers) {
      check(is_native(b.dtype), "buffer of type {}", to_string(b.dtype));
      if (b.inplace_of >= 0) check(size_t(b.inplace_of) < k_.buffers.size(), "in-place with a buffer that does not exist");
    }
    for (Int s : k_.sizes) {
      check(sym::is_symbol(s), "size argument {} is no symbol", sym::str(s));
      scope_.insert(id(s));
    }
    for (auto& [s, v] : k_.indirect) {
      check(sym::is_symbol(s), "indirect {} is no symbol", sym::str(s));
      check(v >= 0 && v < k_.num_values, "indirect {} has no value", sym::str(s));
      indirect_[id(s)] = v;
    }
    for (auto& b : k_.buffers) index(b.extent);
    if (k_.outer.empty()) {
      check(k_.stages.size() == 1, "no outer loops, {} stages", k_.stages.size());
      check(k_.stages[0].accums.empty(), "no outer loops but accumulators");
    }
    if (k_.vector_axis == VectorAxis::Tile)
      check(!k_.outer.empty() && k_.stages.size() == 1 && k_.stages[0].inner.size() == 1 && k_.stages[0].accums.empty(),
            "tiles need outer loops and one map stage with one inner loop");
    for (auto& l : k_.outer) enter(l);
    for (auto& s : k_.stages) stage(s);
    for (size_t i = 0; i < k_.buffers.size(); ++i)
      if (k_.buffers[i].kind == BufferKind::Out) check(stored_.count(uint32_t(i)), "Out buffer b{} is never stored", i);
  }

 private:
  template <class... A>
  void check(bool ok, fmt::format_string<A...> f, A&&... a) {
    if (!ok) [[unlikely]]
      throw InternalError(fmt::format("kernel {}: {}\n{}", k_.name, fmt::format(f, std::forward<A>(a)...), print(k_)));
  }
  bool nonzero_constant(int32_t v) const {
    for (auto& s : k_.stages)
      for (auto& i : s.body)
        if (i.result == v) return i.op == Op::constant && i.iimm != 0;
    return false;
  }
  static uint32_t id(Int s) { return sym::view(s).symbol->id; }

  void enter(const Loop& l) {
    index(l.extent);
    check(sym::is_symbol(l.var) && sym::view(l.var).symbol->kind == sym::SymbolKind::Loop, "loop variable {}", sym::str(l.var));
    check(scope_.insert(id(l.var)).second, "loop variable {} is used twice", sym::str(l.var));
  }
  void index(Int e) {
    std::vector<Int> free;
    sym::free_symbols(e, free);
    for (Int s : free) {
      auto it = indirect_.find(id(s));
      if (it == indirect_.end()) {
        check(scope_.count(id(s)), "{} is not in scope in {}", sym::str(s), sym::str(e));
      } else {
        use(it->second);
        check(type_[it->second] == DType::I64, "indirect {} is not i64", sym::str(s));
      }
    }
  }
  void use(int32_t v) {
    check(v >= 0 && v < k_.num_values, "operand %{} does not exist", v);
    check(visible_[v], "%{} is not in scope where it is used", v);
  }
  void want(int32_t v, DType t, std::string_view what) {
    use(v);
    check(type_[v] == t, "{} %{} is {}, not {}", what, v, to_string(type_[v]), to_string(t));
  }
  void make(int32_t v, DType t) {
    check(v >= 0 && v < k_.num_values, "result %{} does not exist", v);
    check(!defined_[v], "%{} is defined twice", v);
    defined_[v] = visible_[v] = true;
    type_[v] = t;
    made_.push_back(v);
  }
  void buffer(const Instr& i, bool store) {
    check(i.buf < k_.buffers.size(), "buffer b{} does not exist", i.buf);
    auto& b = k_.buffers[i.buf];
    if (i.op == Op::load_bit) {
      check(i.type == DType::Bool, "a bit is {}", to_string(i.type));
      check(b.dtype == DType::U8 && b.kind == BufferKind::In, "b{} holds no bits: it is {} or stored", i.buf, to_string(b.dtype));
    } else {
      check(compute_type(b.dtype) == compute_type(i.type), "b{} holds {}, not {}", i.buf, to_string(b.dtype), to_string(i.type));
    }
    if (store) check(b.kind != BufferKind::In, "In buffer b{} is stored", i.buf);
    if (store) stored_.insert(i.buf);
    index(i.at);
  }

  void stage(const Stage& s) {
    for (auto& l : s.inner) enter(l);
    made_.clear();
    std::set<int64_t> fed;
    for (auto& i : s.body) {
      instr(s, i);
      if (i.op == Op::reduce) fed.insert(i.iimm);
    }
    check(fed.size() == s.accums.size(), "an accumulator is never fed");
    if (!s.inner.empty())
      for (int32_t v : made_) visible_[v] = false;
    for (auto& l : s.inner) scope_.erase(id(l.var));
    for (auto& a : s.accums)
      for (int r = 0; r < num_results(a.kind); ++r) {
        if (a.results[r] < 0) continue;
        bool arg = a.kind == AccumKind::ArgMin || a.kind == AccumKind::ArgMax, logical = a.kind == AccumKind::Any || a.kind == AccumKind::All;
        make(a.results[r], arg && r == 1 ? DType::I64 : logical ? DType::Bool : a.type);
      }
  }

  void instr(const Stage& s, const Instr& i) {
    DType t = compute_type(i.type);
    check(is_native(i.type), "type {}", to_string(i.type));
    switch (i.op) {
      case Op::constant:
        return make(i.result, t);
      case Op::index:
        index(i.at);
        return make(i.result, DType::I64);
      case Op::load:
      case Op::load_bit:
        buffer(i, false);
        check((i.a < 0) == (i.b < 0), "a masked load needs a mask and a value");
        if (i.a >= 0) {
          want(i.a, DType::Bool, "mask");
          want(i.b, t, "value");
        }
        return make(i.result, t);
      case Op::store:
      case Op::store_add:
        buffer(i, true);
        want(i.a, t, "stored value");
        if (i.b >= 0) want(i.b, DType::Bool, "mask");
        return;
      case Op::check_index:
        check(k_.may_fault, "check_index without may_fault");
        want(i.a, DType::I64, "index");
        index(i.at);
        if (i.b >= 0) want(i.b, DType::Bool, "mask");
        return make(i.result, DType::I64);
      case Op::cast:
        use(i.a);
        return make(i.result, t);
      case Op::bitcast:
        use(i.a);
        check(size_of(type_[i.a]) == size_of(i.type), "bitcast between different sizes");
        return make(i.result, t);
      case Op::where:
        want(i.a, DType::Bool, "condition");
        want(i.b, t, "operand");
        want(i.c, t, "operand");
        return make(i.result, t);
      case Op::fma:
        check(is_float(t), "fma of {}", to_string(t));
        for (int32_t operand : {i.a, i.b, i.c}) want(operand, t, "operand");
        return make(i.result, t);
      case Op::reduce: {
        check(i.iimm >= 0 && size_t(i.iimm) < s.accums.size(), "accumulator {} does not exist", i.iimm);
        auto& a = s.accums[i.iimm];
        use(i.a);
        bool logical = a.kind == AccumKind::Any || a.kind == AccumKind::All;
        if (!logical) want(i.a, a.type, "reduced value");
        if (is_moments(a.kind)) check(is_float(a.type), "{} of {}", to_string(a.kind), to_string(a.type));
        if (a.kind == AccumKind::ArgMin || a.kind == AccumKind::ArgMax) {
          want(i.b, DType::I64, "index");
        } else if (i.b >= 0) {
          check(a.kind == AccumKind::Sum && is_float(a.type), "a factor of {} of {}", to_string(a.kind), to_string(a.type));
          want(i.b, a.type, "factor");
        }
        if (i.c >= 0) want(i.c, DType::Bool, "mask");
        return;
      }
      default:
        break;
    }
    bool compare = i.op >= Op::lt;
    for (int n = 0; n < arity(i.op); ++n) want(n == 0 ? i.a : i.b, t, "operand");
    bool float_only =
        (i.op >= Op::sqrt && i.op <= Op::sigmoid) || i.op == Op::atan2 || i.op == Op::hypot || i.op == Op::copysign || i.op == Op::nextafter;
    if (float_only) check(is_float(t), "{} of {}", to_string(i.op), to_string(t));
    if (i.op >= Op::and_ && i.op <= Op::shr) check(!is_float(t), "{} of {}", to_string(i.op), to_string(t));
    bool divides = i.op == Op::div || i.op == Op::floordiv || i.op == Op::fmod || i.op == Op::remainder;
    if (divides && !is_float(t)) check(k_.may_fault || nonzero_constant(i.b), "integer division without may_fault");
    make(i.result, compare ? DType::Bool : t);
  }

  const Kernel& k_;
  std::vector<DType> type_;
  std::vector<bool> defined_, visible_;
  std::vector<int32_t> made_;
  std::set<uint32_t> scope_, stored_;
  std::unordered_map<uint32_t, int32_t> indirect_;
};

}  // namespace

void verify(const Kernel& k) { Verifier(k).run(); }

}  // namespace vitrify::loop
