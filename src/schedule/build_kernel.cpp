#include "schedule/build_kernel.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>

#include "support/hash.h"

namespace vitrify::schedule {

using namespace ops;
using loop::BufferKind;
using loop::Instr;
using loop::kNoValue;
using loop::Loop;

namespace {

constexpr int64_t kWorkPerThread = 20000;  // instructions worth waking a thread for
constexpr int64_t kRowsWorthOuter = 16;    // outer iterations from which a map is run row by row
constexpr int64_t kRowLength = 48;         // and elements in such a row
constexpr int64_t kTileSide = 16;          // extents from which a transpose goes through squares

int64_t hint_or(Int e, int64_t unknown) { return sym::has_hint(e) ? sym::hint(e) : unknown; }

int64_t weight(loop::Op o) {
  using loop::Op;
  switch (o) {
    case Op::exp:
    case Op::log:
    case Op::tanh:
    case Op::sigmoid:
    case Op::erf:
    case Op::ndtr:
    case Op::exp2:
    case Op::log2:
    case Op::sin:
    case Op::cos:
    case Op::expm1:
    case Op::log1p:
      return 8;
    case Op::pow:
    case Op::erfinv:
    case Op::lgamma:
    case Op::tan:
    case Op::asin:
    case Op::acos:
    case Op::atan:
    case Op::sinh:
    case Op::cosh:
    case Op::atan2:
    case Op::fmod:
    case Op::remainder:
      return 20;
    case Op::div:
    case Op::sqrt:
    case Op::rsqrt:
    case Op::floordiv:
      return 3;
    case Op::constant:
      return 0;
    default:
      return 1;
  }
}

class Builder {
 public:
  Builder(const LoopProgram& p, const Group& g, const std::vector<char>& needed) : program_(p), group_(g), needed_(needed) {}

  BuiltKernel run() {
    k_.ctx = program_.ctx;
    choose_loops();
    assign_stages();
    choose_axis();
    find_scratch();
    const int last = *std::max_element(stage_of_.begin(), stage_of_.end());
    for (int s = -1; s <= last + 1; ++s) build_stage(s);
    finish();
    return std::move(out_);
  }

 private:
  // ---- iteration space
  void choose_loops() {
    outer_ = group_.outer;
    inner_ = group_.inner;
    if (group_.reduces) {
      if (outer_.empty()) outer_.push_back({program_.ctx->symbol(sym::SymbolKind::Loop, {}, {0, 0}), Int(1)});
      return;
    }
    if (choose_tile()) return;
    // a map: rows in parallel if there are enough of them and they are long, else one flat space cut anywhere
    if (outer_.empty()) outer_.push_back({program_.ctx->symbol(sym::SymbolKind::Loop, {}, {0, 0}), Int(1)});
    Int rows = 1;
    for (size_t i = 0; i + 1 < outer_.size(); ++i) rows = rows * outer_[i].extent;
    inner_.assign(1, outer_.back());
    outer_.pop_back();
    if (outer_.empty()) return;
    if (hint_or(rows, 1024) < kRowsWorthOuter || hint_or(inner_[0].extent, 1024) < kRowLength) {
      inner_.insert(inner_.begin(), outer_.begin(), outer_.end());
      outer_.clear();
    }
  }

  // A map that reads or writes along another loop than its last: that loop becomes the last outer one. It becomes the inner one where the last is
  // shorter than a vector.
  bool choose_tile() {
    if (outer_.size() < 2 || group_.parts.front().node.scatter) return false;
    const Loop across = outer_.back();
    const bool narrow = hint_or(across.extent, 1024) < kTileSide;
    size_t best = 0;
    int most = 0;
    for (size_t d = 0; d + 1 < outer_.size(); ++d) {
      if (hint_or(outer_[d].extent, 1024) < kTileSide) continue;
      int n = 0;
      for (auto& p : group_.parts)
        for (auto& i : p.node.body.instrs) {
          const bool load = i.op == loop::Op::load && i.a == kNoValue, store = i.op == loop::Op::store && i.b == kNoValue && needed_[i.buf];
          if ((load || store) && loop::lies_along(i.at, outer_[d].var, across.var)) ++n;
        }
      if (n > most) most = n, best = d;
    }
    if (most == 0) return false;
    const Loop down = outer_[best];
    outer_.erase(outer_.begin() + best);
    if (narrow) {
      inner_.assign(1, down);
      return true;
    }
    outer_.back() = down;
    inner_.assign(1, across);
    k_.vector_axis = loop::VectorAxis::Tile;
    return true;
  }

  // Even stages loop over inner, odd ones run once per outer iteration; -1 is before the first loop.
  void assign_stages() {
    stage_of_.assign(group_.parts.size(), 0);
    for (size_t p = 0; p < group_.parts.size(); ++p) {
      const Part& part = group_.parts[p];
      int s = part.kind == PartKind::OuterPoint ? -1 : 0;
      for (size_t q = 0; q < p; ++q) {
        const Part& from = group_.parts[q];
        const bool dep = std::any_of(from.node.writes.begin(), from.node.writes.end(), [&](uint32_t b) { return reads(part, b); });
        if (!dep) continue;
        const int avail = from.kind == PartKind::Reduce ? stage_of_[q] + 1 : stage_of_[q];  // where the value can first be read
        const bool odd_wanted = part.kind == PartKind::OuterPoint;
        int t = avail;
        if (((t % 2) != 0) != odd_wanted) ++t;
        s = std::max(s, t);
      }
      stage_of_[p] = s;
    }
  }
  static bool reads(const Part& p, uint32_t b) { return std::find(p.node.reads.begin(), p.node.reads.end(), b) != p.node.reads.end(); }

  void choose_axis() {
    if (k_.vector_axis == loop::VectorAxis::Tile) return;
    if (!group_.reduces || inner_.empty()) {
      k_.vector_axis = inner_.empty() ? loop::VectorAxis::None : loop::VectorAxis::Inner;
      return;
    }
    int in = 0, outr = 0;
    const Int vi = inner_.back().var, vo = outer_.back().var;
    for (auto& p : group_.parts) {
      if (p.kind == PartKind::OuterPoint) continue;
      auto count = [&](const std::vector<Instr>& instrs, int weight) {
        for (auto& i : instrs) {
          if (!loop::is_load(i.op) && i.op != loop::Op::store) continue;
          if (auto a = sym::affine_in(i.at, vi); a && a->first.is(1)) in += weight;
          if (weight == 2 && loop::is_load(i.op) && i.a == kNoValue && !sym::contains(i.at, vi)) continue;  // read once per outer iteration
          if (auto a = sym::affine_in(i.at, vo); a && a->first.is(1)) outr += weight;
        }
      };
      count(p.node.body.instrs, 2);
      count(p.node.epilogue, 1);  // decides between equals: a product whose left operand runs along k and right one along the columns
    }
    const bool long_rows = hint_or(inner_.back().extent, 1024) >= 8;
    const bool wide = hint_or(outer_.back().extent, 1024) >= 8;
    k_.vector_axis = outr > in && wide ? loop::VectorAxis::Outer : long_rows || !wide ? loop::VectorAxis::Inner : loop::VectorAxis::Outer;
  }

  // Values made by a Point, read in a later stage and nowhere outside, live in a row of thread-private memory.
  void find_scratch() {
    for (size_t p = 0; p < group_.parts.size(); ++p)
      for (uint32_t b : group_.parts[p].node.writes) {
        producer_[b] = p;
        bool later = false;
        for (size_t q = p + 1; q < group_.parts.size(); ++q) later = later || (reads(group_.parts[q], b) && stage_of_[q] != stage_of_[p]);
        if (group_.parts[p].kind != PartKind::Point) later = false;
        if (later && !needed_[b]) (k_.vector_axis == loop::VectorAxis::Inner ? scratch_ : keep_).insert(b);
      }
  }
  bool stored(uint32_t b) const { return needed_[b] || scratch_.count(b) || keep_.count(b) || group_.parts.front().node.scatter; }

  // ---- buffers
  uint32_t buffer(uint32_t b, bool write) {
    auto it = buffer_index_.find(b);
    if (it == buffer_index_.end()) {
      const BufferInfo& info = program_.buffers[b];
      loop::Buffer kb;
      kb.dtype = info.dtype;
      kb.kind = scratch_.count(b) ? BufferKind::Scratch : write ? BufferKind::Out : BufferKind::In;
      kb.extent = info.extent;
      if (kb.kind == BufferKind::Scratch) {
        kb.extent = 1;
        for (auto& l : inner_) kb.extent = kb.extent * l.extent;
      }
      k_.buffers.push_back(kb);
      it = buffer_index_.emplace(b, static_cast<uint32_t>(k_.buffers.size() - 1)).first;
      program_of_.push_back(b);
    }
    loop::Buffer& kb = k_.buffers[it->second];
    if (kb.kind == BufferKind::In && write) kb.kind = BufferKind::InOut;
    if (kb.kind == BufferKind::Out && !write) kb.kind = BufferKind::InOut;
    return it->second;
  }
  Int address(uint32_t b, Int at) {
    if (!scratch_.count(b)) return at;
    Int lin = 0;
    for (auto& l : inner_) lin = lin * l.extent + l.var;
    return lin;
  }

  // ---- instructions
  using Key = std::tuple<int, int, int32_t, int32_t, int32_t, uint64_t, int64_t, uint32_t, size_t, const void*>;
  static Key key(const Instr& i) {
    return {static_cast<int>(i.op),
            static_cast<int>(i.type),
            i.a,
            i.b,
            i.c,
            std::bit_cast<uint64_t>(i.fimm),
            i.iimm,
            i.buf,
            i.at.is_const() ? static_cast<size_t>(i.at.value()) : 0,
            i.at.node()};
  }
  int32_t emit(loop::Stage& st, Instr i) {
    const bool pure = i.op != loop::Op::store && i.op != loop::Op::store_add && i.op != loop::Op::reduce;
    if (!pure) {
      st.body.push_back(i);
      return kNoValue;
    }
    if (i.op == loop::Op::cast)
      if (auto r = rounded_.find(i.a); r != rounded_.end() && r->second == i.type) return i.a;
    for (auto* scope : {&outer_values_, &local_values_})
      if (auto it = scope->find(key(i)); it != scope->end()) return it->second;
    const Key kk = key(i);
    i.result = k_.num_values++;
    st.body.push_back(i);
    (st.inner.empty() ? outer_values_ : local_values_)[kk] = i.result;
    return i.result;
  }

  void copy_instrs(loop::Stage& st, const Part& part, const std::vector<Instr>& instrs, std::vector<int32_t>& map, int stage) {
    auto id = [&](int32_t v) { return v == kNoValue ? kNoValue : map[v]; };
    for (Instr i : instrs) {
      const int32_t old = i.result;
      i.a = id(i.a);
      i.b = id(i.b);
      i.c = id(i.c);
      i.at = localise(part, i.at, map);
      i.result = kNoValue;
      int32_t result = kNoValue;
      switch (i.op) {
        case loop::Op::load:
          result = load(st, i, stage);
          break;
        case loop::Op::load_bit:
          i.buf = buffer(i.buf, false);
          result = emit(st, i);
          break;
        case loop::Op::store:
          store(st, part, i);
          break;
        case loop::Op::store_add:
          i.buf = buffer(i.buf, true);
          k_.buffers[i.buf].kind = BufferKind::InOut;
          emit(st, i);
          break;
        case loop::Op::reduce: {
          i.iimm += accum_base_;
          emit(st, i);
          break;
        }
        default:
          if (i.op == loop::Op::check_index) k_.may_fault = true;
          result = emit(st, i);
      }
      if (old != kNoValue) map[old] = result;
    }
    k_.may_fault = k_.may_fault || part.node.body.may_fault;
  }

  // Replaces a part's indirect symbols by the kernel's, which are paired with the kernel's values.
  Int localise(const Part& part, Int at, const std::vector<int32_t>& map) {
    if (at.is_const() || part.node.body.indirects.empty()) return at;
    std::vector<std::pair<Int, Int>> subst;
    for (auto& [s, v] : part.node.body.indirects) {
      if (!sym::contains(at, s)) continue;
      const int32_t now = map[v];
      VT_CHECK(now != kNoValue, "index value used before it is made");
      Int mine = s;
      bool known = false;
      for (auto& [ks, kv] : k_.indirect)
        if (kv == now) {
          mine = ks;
          known = true;
        }
      if (!known) k_.indirect.emplace_back(s, now);
      if (!(mine == s)) subst.emplace_back(s, mine);
    }
    return subst.empty() ? at : sym::substitute(at, subst);
  }

  // What lies in memory is rounded to its type: who reads the register instead must see the same number as who reads the memory, also where no memory
  // is left.
  int32_t as_stored(loop::Stage& st, uint32_t b, int32_t value) {
    const DType have = program_.buffers[b].dtype;
    if (have != DType::F16 && have != DType::BF16) return value;
    const int32_t v = emit(st, {.op = loop::Op::cast, .type = have, .a = value});
    rounded_.emplace(v, have);
    return v;
  }

  int32_t load(loop::Stage& st, Instr i, int stage) {
    const uint32_t b = i.buf;
    auto p = producer_.find(b);
    if (p != producer_.end() && !group_.parts[p->second].node.scatter) {
      auto v = forwarded_.find(b);
      if (v != forwarded_.end() && (v->second.stage == stage || v->second.everywhere)) {
        const int32_t value = as_stored(st, b, v->second.value);
        if (i.a == kNoValue) return value;
        return emit(st, {.op = loop::Op::where, .type = i.type, .a = i.a, .b = value, .c = i.b});
      }
      i.at = address(b, i.at);
    }
    i.buf = buffer(b, false);
    const int32_t v = emit(st, i);
    const DType have = k_.buffers[i.buf].dtype;
    if (i.a == kNoValue && have != i.type) rounded_.emplace(v, have);
    return v;
  }

  void store(loop::Stage& st, const Part& part, Instr i) {
    const uint32_t b = i.buf;
    if (!part.node.scatter && i.b == kNoValue) forwarded_[b] = {i.a, current_stage_, st.inner.empty()};
    if (!stored(b)) return;
    i.at = address(b, i.at);
    i.buf = buffer(b, true);
    emit(st, i);
  }

  void build_stage(int s) {
    current_stage_ = s;
    loop::Stage st;
    const bool loops = s >= 0 && s % 2 == 0;
    if (loops) st.inner.assign(inner_.begin(), inner_.end());
    local_values_.clear();
    if (!loops && s > 0) {
      for (auto& [part, map] : pending_) copy_instrs(st, *part, part->node.epilogue, map, s);
      pending_.clear();
    }
    accum_base_ = 0;
    for (size_t p = 0; p < group_.parts.size(); ++p) {
      if (stage_of_[p] != s) continue;
      const Part& part = group_.parts[p];
      int32_t top = part.node.body.num_values;
      std::vector<int32_t> map(top, kNoValue);
      accum_base_ = static_cast<int64_t>(st.accums.size());
      copy_instrs(st, part, part.node.body.instrs, map, s);
      for (loop::Accum a : part.node.accums) {
        for (int32_t& r : a.results)
          if (r != kNoValue) {
            const int32_t now = k_.num_values++;
            map[r] = now;
            r = now;
          }
        st.accums.push_back(a);
      }
      if (!part.node.accums.empty()) pending_.emplace_back(&part, std::move(map));
    }
    if (!st.body.empty() || !st.accums.empty()) k_.stages.push_back(std::move(st));
  }

  void finish() {
    for (auto& l : outer_) k_.outer.push_back(l);
    remove_dead_values();
    std::vector<Int> syms;
    for (auto& st : k_.stages) {
      for (auto& i : st.body) sym::free_symbols(i.at, syms);
      for (auto& l : st.inner) sym::free_symbols(l.extent, syms);
    }
    for (auto& l : outer_) sym::free_symbols(l.extent, syms);
    for (auto& b : k_.buffers) sym::free_symbols(b.extent, syms);  // that of an operand may be another symbol than that of the loop over it
    for (Int s : syms) {
      const auto kind = k_.ctx->symbol_info(s).kind;
      if ((kind == sym::SymbolKind::Size || kind == sym::SymbolKind::Unbacked) && std::find(k_.sizes.begin(), k_.sizes.end(), s) == k_.sizes.end())
        k_.sizes.push_back(s);
    }
    for (size_t i = 0; i < k_.buffers.size(); ++i)
      if (k_.buffers[i].kind != BufferKind::Scratch) out_.buffers.push_back(program_of_[i]);
    // cost
    int64_t per_iteration = 0;
    for (auto& st : k_.stages) {
      int64_t w = 0, n = 1;
      for (auto& i : st.body) w += weight(i.op);
      for (auto& l : st.inner) n *= hint_or(l.extent, 64);
      per_iteration += w * (outer_.empty() ? 1 : n);
    }
    // vector code does about four of these a cycle per lane group
    per_iteration = std::max<int64_t>(1, per_iteration / (k_.vector_axis == loop::VectorAxis::None ? 1 : 4));
    out_.grain = std::max<int64_t>(1, kWorkPerThread / per_iteration);
    out_.iterations = 1;
    for (auto& l : outer_.empty() ? inner_ : outer_) out_.iterations = out_.iterations * l.extent;
    if (group_.parts.front().node.scatter) {  // colliding writes: one thread, in order
      k_.serial = true;
      out_.grain = std::numeric_limits<int64_t>::max();
    }
    out_.kernel = std::move(k_);
    std::string name;
    for (auto& p : group_.parts)
      if (p.node.origin) {
        std::string n = p.node.origin->op->name;
        n = n.substr(n.find("::") == std::string::npos ? 0 : n.find("::") + 2);
        n = n.substr(0, n.find('.'));
        if (name.size() + n.size() < 60 && name.find(n) == std::string::npos) name += (name.empty() ? "" : "_") + n;
      }
    out_.kernel.name = name.empty() ? "copy" : name;
  }

  bool may_divide_by_zero(const Instr& i) const {
    using enum loop::Op;
    if ((i.op != div && i.op != floordiv && i.op != remainder && i.op != fmod) || is_float(i.type) || i.type == DType::Bool) return false;
    for (auto& st : k_.stages)
      for (auto& d : st.body)
        if (d.result == i.b && d.op == constant) return d.iimm == 0;
    return true;
  }

  // Loads whose users were forwarded away must not touch memory.
  void remove_dead_values() {
    std::vector<char> used(k_.num_values);
    for (auto& [s, v] : k_.indirect) {
      bool seen = false;
      for (auto& st : k_.stages)
        for (auto& i : st.body) seen = seen || sym::contains(i.at, s);
      if (seen) used[v] = 1;
    }
    for (size_t s = k_.stages.size(); s-- > 0;) {
      auto& st = k_.stages[s];
      std::vector<Instr> kept;
      for (size_t n = st.body.size(); n-- > 0;) {
        const Instr& i = st.body[n];
        const bool effect = i.op == loop::Op::store || i.op == loop::Op::store_add || i.op == loop::Op::reduce || i.op == loop::Op::check_index ||
                            may_divide_by_zero(i);
        if (!effect && !used[i.result]) continue;
        for (int32_t v : {i.a, i.b, i.c})
          if (v != kNoValue) used[v] = 1;
        kept.push_back(i);
      }
      std::reverse(kept.begin(), kept.end());
      st.body = std::move(kept);
    }
    std::erase_if(k_.stages, [](auto& st) { return st.body.empty() && st.accums.empty(); });
  }

  struct Forward {
    int32_t value;
    int stage;
    bool everywhere;  // made once per outer iteration: visible in all later stages
  };

  const LoopProgram& program_;
  const Group& group_;
  const std::vector<char>& needed_;
  BuiltKernel out_;
  loop::Kernel k_;
  std::vector<Loop> outer_, inner_;
  std::vector<int> stage_of_;
  std::map<uint32_t, size_t> producer_;
  std::set<uint32_t> scratch_, keep_;
  std::map<uint32_t, uint32_t> buffer_index_;
  std::vector<uint32_t> program_of_;
  std::map<uint32_t, Forward> forwarded_;
  std::map<int32_t, DType> rounded_;  // values that were loaded from memory of a half type
  std::map<Key, int32_t> outer_values_, local_values_;
  std::vector<std::pair<const Part*, std::vector<int32_t>>> pending_;
  int64_t accum_base_ = 0;
  int current_stage_ = 0;
};

}  // namespace

BuiltKernel build_kernel(const LoopProgram& p, const Group& g, const std::vector<char>& needed) { return Builder(p, g, needed).run(); }

}  // namespace vitrify::schedule
