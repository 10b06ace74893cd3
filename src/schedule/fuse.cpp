#include "schedule/fuse.h"

#include <algorithm>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "ir/faults.h"
#include "ops/reads.h"
#include "schedule/loop_vars.h"
#include "support/budget.h"

namespace vitrify::schedule {

using namespace ops;
using loop::Instr;
using loop::Loop;

namespace {

constexpr size_t kMaxBuffers = 40;
constexpr int64_t kMaxInstrs = 400;
constexpr int64_t kSmallWork = 6'000'000;  // instructions
constexpr size_t kNearby = 256;            // items among which small groups look for each other
constexpr size_t kAcrossCalls = 8;         // items among which they do where calls stand between: what such a kernel makes early lives long
constexpr int64_t kSmall = 16384;          // elements below which losing parallelism costs nothing

Int product(const std::vector<Loop>& l) {
  Int n = 1;
  for (auto& x : l) n = n * x.extent;
  return n;
}
int64_t hint_or(Int e, int64_t unknown) { return sym::has_hint(e) ? sym::hint(e) : unknown; }

// The coarsest list of extents that splits both; nullopt when their boundaries do not nest.
std::optional<std::vector<Int>> refine(const std::vector<Int>& a, const std::vector<Int>& b) {
  std::vector<Int> out;
  size_t i = a.size(), j = b.size();
  Int x = 1, y = 1;
  while (true) {
    while (x.is(1) && i > 0) x = a[--i];
    while (y.is(1) && j > 0) y = b[--j];
    if (x.is(1) && y.is(1)) break;
    if (x == y) {
      out.push_back(x);
      x = y = 1;
      continue;
    }
    if (x.is(1) || y.is(1) || x.is(0) || y.is(0)) return std::nullopt;  // no elements: nothing is split into them
    Int q = sym::floordiv(x, y);
    if (!q.is(0) && q * y == x) {
      out.push_back(y);
      x = q;
      y = 1;
      continue;
    }
    q = sym::floordiv(y, x);
    if (q.is(0) || !(q * x == y)) return std::nullopt;
    out.push_back(x);
    y = q;
    x = 1;
  }
  std::reverse(out.begin(), out.end());
  return out;
}

std::vector<Int> extents(const std::vector<Loop>& l) {
  std::vector<Int> r;
  for (auto& x : l) r.push_back(x.extent);
  return r;
}

void rewrite(Part& p, const std::vector<std::pair<Int, Int>>& map) {
  if (map.empty()) return;
  std::vector<std::pair<Int, Int>> known;  // most instructions are at one of a few places
  for (auto* list : {&p.node.body.instrs, &p.node.epilogue})
    for (Instr& i : *list) {
      if (i.at.is_const()) continue;
      auto k = std::find_if(known.begin(), known.end(), [&](const auto& x) { return x.first == i.at; });
      if (k == known.end()) k = known.insert(k, {i.at, sym::substitute(i.at, map)});
      i.at = k->second;
    }
}

class Fuser {
 public:
  Fuser(const LoopProgram& p, const FuseOptions& o) : program_(p), options_(o), vars_(p.ctx) {}

  std::vector<Group> run() {
    const size_t n = program_.items.size();
    deps_.resize(n);
    find_dependencies();
    for (size_t k = 0; k < n; ++k) {
      groups_.push_back(make_group(k));
      group_of_.push_back(k);
      order_.push_back(k);
      position_.push_back(k);
      members_.push_back({k});
    }
    seen_.resize(n);
    blocked_.resize(n);
    looked_.resize(n);
    shared_.resize(n);
    if (options_.enabled)
      for (size_t k = 0; k < n; ++k) merge_into_earlier(k);
    return ordered();
  }

 private:
  void find_dependencies() {
    std::vector<std::vector<size_t>> writers(program_.buffers.size());
    readers_.resize(program_.buffers.size());
    writers_.resize(program_.buffers.size());
    touched_.resize(program_.items.size());
    std::optional<size_t> last_effect;
    std::optional<size_t> last_kept;     // effect that is not a draw: the program may not get beyond it, to what raises there
    std::vector<size_t> faulting;        // what may raise, since the last custom op: that does not run if they do
    std::unordered_set<uint32_t> given;  // symbols that inputs have
    for (const BufferInfo& b : program_.buffers)
      if (b.role == BufferRole::Input)
        for (Int s : b.sizes)
          if (!s.is_const() && sym::is_symbol(s)) given.insert(sym::view(s).symbol->id);
    std::unordered_map<uint32_t, size_t> finders;  // by symbol: the first call whose result has that size
    std::vector<Int> symbols;
    for (size_t k = 0, first = 0; k < program_.items.size(); ++k) {
      if (program_.items[k].ext) first = k + 1;
      after_call_.push_back(first);
      const Item& it = program_.items[k];
      auto& d = deps_[k];
      auto need = [&](uint32_t b) { d.insert(d.end(), writers[b].begin(), writers[b].end()); };
      const bool faults = it.ext ? ir::may_fault(*it.ext->node) : it.loop->body.may_fault;
      if (faults && last_kept) d.push_back(*last_kept);
      auto need_size = [&](Int size) {
        if (finders.empty() || size.is_const()) return;
        symbols.clear();
        sym::free_symbols(size, symbols);
        for (Int s : symbols)
          if (auto f = finders.find(sym::view(s).symbol->id); f != finders.end()) d.push_back(f->second);
      };
      if (it.ext) {
        for (auto& t : it.ext->operands) {
          need(static_cast<uint32_t>(t.buffer));
          for (const Dims* dims : {&t.sizes, &t.strides}) std::ranges::for_each(*dims, need_size);
          need_size(t.offset);
        }
        for (const ir::Arg& a : it.ext->node->args) {
          if (auto* i = std::get_if<Int>(&a)) need_size(*i);
          if (auto* l = std::get_if<std::vector<Int>>(&a)) std::ranges::for_each(*l, need_size);
        }
        for (uint32_t b : it.ext->results) writers[b].push_back(k);
        for (const ir::TensorType& t : it.ext->node->outs)
          for (const ir::Dims* dims : {&t.sizes, &t.strides}) std::ranges::for_each(*dims, need_size);
        for (const ir::TensorType& t : it.ext->node->outs)
          for (Int s : t.sizes)
            if (!s.is_const() && sym::is_symbol(s) && !given.contains(sym::view(s).symbol->id)) finders.try_emplace(sym::view(s).symbol->id, k);
        if (it.ext->node->op->flags & (ir::kRandom | ir::kEffect)) {
          if (last_effect) d.push_back(*last_effect);
          last_effect = k;
          if (it.ext->node->op->flags & ir::kEffect) last_kept = k;
          // The program got here by the sizes it has found so far. Where guards have fixed one, nothing else says that it comes first.
          for (const auto& [symbol, finder] : finders)
            if (finder != k) d.push_back(finder);
        }
        if (ops::is_custom(*it.ext->node)) {
          d.insert(d.end(), faulting.begin(), faulting.end());
          faulting.clear();
        } else if (faults) {
          faulting.push_back(k);
        }
      } else {
        for (uint32_t b : it.loop->reads) need(b), readers_[b].push_back(k);
        for (uint32_t b : it.loop->writes) writers[b].push_back(k), writers_[b].push_back(k);
        if (faults) faulting.push_back(k);
        auto& t = touched_[k];
        t = it.loop->reads;
        t.insert(t.end(), it.loop->writes.begin(), it.loop->writes.end());
        std::sort(t.begin(), t.end());
        t.erase(std::unique(t.begin(), t.end()), t.end());
        for (uint32_t b : t) need_size(program_.buffers[b].extent);
        need_numbers(*it.loop, need_size);
      }
      std::sort(d.begin(), d.end());
      d.erase(std::unique(d.begin(), d.end()), d.end());
    }
  }

  // Sizes that a nest reads as numbers, or runs over: they need not be those of its buffers.
  template <class F>
  static void need_numbers(const LoopNode& n, const F& need_size) {
    for (const auto* loops : {&n.ranges, &n.rranges})
      for (const loop::Loop& l : *loops) need_size(l.extent);
    for (const auto* instrs : {&n.body.instrs, &n.epilogue})
      for (const loop::Instr& i : *instrs) need_size(i.at);
  }

  Group make_group(size_t k) {
    const Item& it = program_.items[k];
    Group g;
    g.first_item = k;
    if (it.ext) {
      g.ext = &*it.ext;
      g.closed = true;
      return g;
    }
    const LoopNode& n = *it.loop;
    g.parts.push_back({n.rranges.empty() && n.accums.empty() ? PartKind::Point : PartKind::Reduce, n});
    g.outer.assign(n.ranges.begin(), n.ranges.end());
    g.inner.assign(n.rranges.begin(), n.rranges.end());
    g.reduces = !n.accums.empty();
    g.closed = n.scatter;
    collapse(g);
    measure(g);
    return g;
  }

  // Merges adjacent loops that every index walks as one.
  void collapse(Group& g) {
    for (auto* loops : {&g.outer, &g.inner}) {
      const LoopSide side = loops == &g.outer ? LoopSide::Outer : LoopSide::Inner;
      for (size_t i = loops->size(); i-- > 1;) {
        const Loop a = (*loops)[i - 1], b = (*loops)[i];
        bool ok = true;
        for (Part& p : g.parts)
          for (auto* list : {&p.node.body.instrs, &p.node.epilogue})
            for (Instr& in : *list) ok = ok && walks_as_one(in.at, a, b);
        if (!ok) continue;
        Loop m = unused(side, a.extent * b.extent, *loops);
        for (Part& p : g.parts) rewrite(p, {{a.var, Int(0)}, {b.var, m.var}});
        (*loops)[i - 1] = m;
        loops->erase(loops->begin() + i);
      }
    }
  }
  Loop unused(LoopSide side, Int extent, const std::vector<Loop>& loops) {
    for (size_t place = 0;; ++place)
      if (Loop l = vars_.at(side, place, extent); std::none_of(loops.begin(), loops.end(), [&](const Loop& x) { return x.var == l.var; })) return l;
  }
  static bool walks_as_one(Int e, const Loop& a, const Loop& b) {
    if (e.is_const()) return true;
    const bool ha = sym::contains(e, a.var), hb = sym::contains(e, b.var);
    if (!ha && !hb) return true;
    if (!ha || !hb) return false;
    auto x = sym::affine_in(e, a.var);
    if (!x) return false;
    auto y = sym::affine_in(x->second, b.var);
    return y && x->first == y->first * b.extent && !sym::contains(x->first, b.var);
  }

  // Gives the group that a and b are becoming one place in order_: that of the later one. What stands between and needs the earlier one moves behind
  // it.
  void reorder(size_t a, size_t b) {
    const size_t lo = std::min(position_[a], position_[b]), hi = std::max(position_[a], position_[b]);
    const size_t early = order_[lo];
    ++visit_;
    seen_[early] = visit_;
    auto needs_early = [&](size_t g) {
      for (size_t k : members(g))
        for (size_t d : deps_[k])
          if (group_of_[d] != g && seen_[group_of_[d]] == visit_) return true;
      return false;
    };
    std::vector<size_t> behind;
    size_t at = lo;
    for (size_t i = lo + 1; i < hi; ++i) {
      const size_t g = order_[i];
      if (members(g).empty()) continue;  // merged away
      if (needs_early(g)) {
        seen_[g] = visit_;
        behind.push_back(g);
      } else {
        order_[at] = g;
        position_[g] = at++;
      }
    }
    order_[at] = a;
    position_[a] = at++;
    for (size_t g : behind) {
      order_[at] = g;
      position_[g] = at++;
    }
    for (; at <= hi; ++at) order_[at] = b;  // merged away: only fills the place
  }
  const std::vector<size_t>& members(size_t g) const { return members_[g]; }

  void merge_into_earlier(size_t k) {
    bool again = true;
    while (again) {
      again = false;
      const size_t h = group_of_[k];
      if (groups_[h].closed) return;
      // Earlier groups that share memory with this one, most bytes first.
      candidates_.clear();
      ++look_;
      auto add = [&](size_t j, int64_t bytes) {
        const size_t g = group_of_[j];
        if (std::exchange(looked_[g], look_) != look_) {
          candidates_.push_back(g);
          shared_[g] = 0;
        }
        shared_[g] += bytes;
      };
      const size_t nearby = k - std::min(k, kNearby);
      for (uint32_t b : touched_[h]) {
        const int64_t bytes = std::max<int64_t>(bytes_of(b), 1);
        for (size_t j : writers_[b])
          if (j < k) add(j, 2 * bytes);
        for (auto j = std::lower_bound(readers_[b].begin(), readers_[b].end(), nearby); j != readers_[b].end() && *j < k; ++j) add(*j, bytes);
      }
      if (groups_[h].small)
        for (size_t j = std::max(nearby, std::min(after_call_[k], k - std::min(k, kAcrossCalls))); j < k; ++j)
          if (groups_[group_of_[j]].small) add(j, 0);
      std::vector<std::pair<int64_t, size_t>> order;
      size_t first = position_[h];
      for (size_t g : candidates_) {
        if (g == h || groups_[g].closed || !space_may_match(groups_[g], groups_[h]) || limits_exceeded(g, h)) continue;
        if (position_[g] > position_[h]) {
          block(g, position_[h]);
          if (blocked_[h] == block_) continue;
        }
        order.emplace_back(shared_[g], g);
        first = std::min(first, position_[g]);
      }
      if (order.empty()) return;
      std::sort(order.rbegin(), order.rend());
      block(h, first);
      for (auto& [bytes, g] : order)
        if (blocked_[g] != block_ && try_merge(g, h)) {
          again = true;
          break;
        }
    }
  }
  // Marks what h depends on through a third group, back to position `first`.
  void block(size_t h, size_t first) {
    std::vector<size_t> stack;
    ++visit_, ++block_;
    for (size_t k : members(h))
      for (size_t d : deps_[k])
        if (const size_t g = group_of_[d]; g != h && position_[g] >= first && seen_[g] != visit_) {
          seen_[g] = visit_;
          stack.push_back(g);
        }
    while (!stack.empty()) {
      const size_t g = stack.back();
      stack.pop_back();
      for (size_t k : members(g))
        for (size_t d : deps_[k]) {
          const size_t next = group_of_[d];
          if (next == g || position_[next] < first) continue;
          blocked_[next] = block_;
          if (seen_[next] == visit_) continue;
          seen_[next] = visit_;
          stack.push_back(next);
        }
    }
  }
  int64_t bytes_of(uint32_t b) { return hint_or(program_.buffers[b].extent, 1024) * static_cast<int64_t>(size_of(program_.buffers[b].dtype)); }

  // Of groups whose spaces may match and that do not need each other through a third one.
  bool try_merge(size_t a, size_t b) {
    Budget::spend(1 + static_cast<uint64_t>(groups_[a].instrs + groups_[b].instrs) / 4);
    // A map may walk a reduction's space rows first or columns first: where both are at the same place of memory at the same time. Columns first only
    // for what is reduced: what follows from the result is better off with rows of its own.
    Group first, second;
    auto fits = [&](Order order, bool met) {
      first = groups_[a], second = groups_[b];
      if (!align(first, second, order)) return false;
      for (Part& p : first.parts)
        for (Part& q : second.parts)
          if (!compatible(p, q) || !compatible(q, p)) return false;
      return !met || meet(first, second);
    };
    const bool mixed = groups_[a].reduces != groups_[b].reduces && groups_[a].numel == groups_[b].numel;
    const bool small = hint_or(groups_[a].numel, 1024) < kSmall;
    if (!fits(Order::OuterFirst, mixed && !small) && !(mixed && feeds(a, b) && fits(Order::InnerFirst, true))) return false;
    if (first.parts.front().node.origin && second.parts.empty()) return false;
    for (Part& q : second.parts) first.parts.push_back(std::move(q));
    first.reduces = first.reduces || second.reduces;
    first.first_item = std::min(first.first_item, second.first_item);
    reorder(a, b);
    const auto moved = std::exchange(members_[b], {});
    for (size_t k : moved) group_of_[k] = a;
    members_[a].insert(members_[a].end(), moved.begin(), moved.end());
    std::vector<uint32_t> both;
    std::set_union(touched_[a].begin(), touched_[a].end(), touched_[b].begin(), touched_[b].end(), std::back_inserter(both));
    touched_[a] = std::move(both);
    touched_[b].clear();
    sort_parts(first, members_[a]);
    measure(first);
    groups_[a] = std::move(first);
    groups_[b].parts.clear();
    return true;
  }

  // Parts in program order, so that a value is defined before it is used.
  void sort_parts(Group& g, std::vector<size_t>& items) {
    std::vector<size_t> order(items.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](size_t x, size_t y) { return items[x] < items[y]; });
    std::vector<Part> parts;
    std::vector<size_t> sorted;
    for (size_t i : order) {
      parts.push_back(std::move(g.parts[i]));
      sorted.push_back(items[i]);
    }
    g.parts = std::move(parts);
    items = std::move(sorted);
  }

  static void measure(Group& g) {
    g.outer_numel = product(g.outer);
    g.numel = g.outer_numel * product(g.inner);
    g.instrs = 0;
    for (auto& p : g.parts) g.instrs += static_cast<int64_t>(p.node.body.instrs.size());
    g.small = hint_or(g.numel, kSmallWork) * g.instrs < kSmallWork;
  }

  bool space_may_match(const Group& a, const Group& b) {
    if (a.reduces && b.reduces) return a.outer_numel == b.outer_numel && a.numel == b.numel && product(a.inner) == product(b.inner);
    const Group& r = a.reduces ? a : b;
    const Group& f = a.reduces ? b : a;
    if (!r.reduces) return a.numel == b.numel;
    if (!(f.numel == r.numel) && !(f.numel == r.outer_numel)) return false;
    // a long map would lose its parallelism inside a reduction with few outer iterations
    return hint_or(r.outer_numel, 1024) >= 2 * options_.threads || hint_or(f.numel, 1) < kSmall;
  }

  bool limits_exceeded(size_t a, size_t b) const {
    if (groups_[a].instrs + groups_[b].instrs > kMaxInstrs) return true;
    const std::vector<uint32_t>&x = touched_[a], &y = touched_[b];
    if (x.size() + y.size() <= kMaxBuffers) return false;
    size_t n = x.size() + y.size();
    for (auto i = x.begin(), j = y.begin(); i != x.end() && j != y.end();)
      if (*i == *j)
        --n, ++i, ++j;
      else
        ++(*i < *j ? i : j);
    return n > kMaxBuffers;
  }

  bool align_outer(Group& a, Group& b) {
    auto r = refine(extents(a.outer), extents(b.outer));
    if (!r) return false;
    std::vector<Loop> outer = loops_for(*r, a.outer, LoopSide::Outer);
    relabel(a, a.outer, outer);
    relabel(b, b.outer, outer);
    a.outer = b.outer = outer;
    return true;
  }

  enum class Order : uint8_t { OuterFirst, InnerFirst };

  // Does the reduction of two groups read what the map writes?
  bool feeds(size_t a, size_t b) const {
    const Group &map = groups_[a].reduces ? groups_[b] : groups_[a], &red = groups_[a].reduces ? groups_[a] : groups_[b];
    for (const Part& p : map.parts)
      for (uint32_t w : p.node.writes)
        for (const Part& q : red.parts)
          if (q.kind == PartKind::Reduce && std::find(q.node.reads.begin(), q.node.reads.end(), w) != q.node.reads.end()) return true;
    return false;
  }

  // Is some element read or written by both in the same iteration?
  static bool meet(const Group& a, const Group& b) {
    auto touches = [](const Instr& i) { return loop::is_load(i.op) || i.op == loop::Op::store; };
    for (const Part& p : a.parts)
      for (const Instr& i : p.node.body.instrs)
        if (touches(i) && !i.at.is_const())
          for (const Part& q : b.parts)
            for (const Instr& j : q.node.body.instrs)
              if (touches(j) && j.buf == i.buf && j.at == i.at) return true;
    return false;
  }

  // Gives both groups the same loops. False when their spaces have no common refinement.
  bool align(Group& a, Group& b, Order order) {
    if (a.reduces && b.reduces) {
      auto o = refine(extents(a.outer), extents(b.outer)), i = refine(extents(a.inner), extents(b.inner));
      if (!o || !i) return false;
      std::vector<Loop> outer = loops_for(*o, a.outer, LoopSide::Outer), inner = loops_for(*i, a.inner, LoopSide::Inner);
      relabel(a, a.outer, outer);
      relabel(a, a.inner, inner);
      relabel(b, b.outer, outer);
      relabel(b, b.inner, inner);
      a.outer = b.outer = outer;
      a.inner = b.inner = inner;
      return true;
    }
    if (!a.reduces && !b.reduces) return align_outer(a, b);
    Group& red = a.reduces ? a : b;
    Group& flat = a.reduces ? b : a;
    if (flat.numel == red.numel) {
      const bool inner_first = order == Order::InnerFirst;
      std::vector<Int> all = extents(red.outer);
      const std::vector<Int> in = extents(red.inner);
      all.insert(inner_first ? all.begin() : all.end(), in.begin(), in.end());
      auto r = refine(extents(flat.outer), all);
      if (!r) return false;
      // Where the loops of one side end and the other's begin.
      const Int first_numel = product(inner_first ? red.inner : red.outer);
      auto split = r->begin();
      Int n = 1;
      for (; split != r->end() && !(n == first_numel); ++split) n = n * *split;
      if (!(n == first_numel)) return false;
      const std::vector<Int> head(r->begin(), split), tail(split, r->end());
      std::vector<Loop> inner = loops_for(inner_first ? head : tail, red.inner, LoopSide::Inner),
                        outer = loops_for(inner_first ? tail : head, red.outer, LoopSide::Outer);
      std::vector<Loop> both = inner_first ? inner : outer;
      const std::vector<Loop>& rest = inner_first ? outer : inner;
      both.insert(both.end(), rest.begin(), rest.end());
      relabel(flat, flat.outer, both);
      relabel(red, red.outer, outer);
      relabel(red, red.inner, inner);
      red.outer = flat.outer = outer;
      red.inner = flat.inner = inner;
      return true;
    }
    if (!align_outer(red, flat)) return false;
    flat.inner = red.inner;
    for (Part& p : flat.parts) p.kind = PartKind::OuterPoint;
    return true;
  }

  std::vector<Loop> loops_for(const std::vector<Int>& e, const std::vector<Loop>& have, LoopSide side) {
    if (e == extents(have)) return have;
    std::vector<Loop> r;
    for (Int x : e) r.push_back(vars_.at(side, r.size(), x));
    return r;
  }

  // from[k] covers one or more consecutive loops of `to`.
  void relabel(Group& g, const std::vector<Loop>& from, const std::vector<Loop>& to) {
    std::vector<std::pair<Int, Int>> map;
    size_t j = to.size();
    for (size_t k = from.size(); k-- > 0;) {
      Int e = 0, stride = 1;
      while (!(stride == from[k].extent)) {
        VT_CHECK(j > 0, "loops do not nest");
        --j;
        e = e + to[j].var * stride;
        stride = stride * to[j].extent;
      }
      if (!(e == from[k].var)) map.emplace_back(from[k].var, e);
    }
    for (Part& p : g.parts) rewrite(p, map);
  }

  // Every value of p that q reads is read at the index it was written at.
  static bool compatible(const Part& p, const Part& q) {
    for (uint32_t b : p.node.writes) {
      if (std::find(q.node.reads.begin(), q.node.reads.end(), b) == q.node.reads.end()) continue;
      if (q.kind == PartKind::OuterPoint && p.kind == PartKind::Point) return false;
      const Instr* store = nullptr;
      for (auto* list : {&p.node.body.instrs, &p.node.epilogue})
        for (const Instr& i : *list)
          if (i.op == loop::Op::store && i.buf == b) {
            if (store || i.b != loop::kNoValue) return false;
            store = &i;
          }
      if (!store) return false;
      for (const Instr& i : q.node.body.instrs)
        if (loop::is_load(i.op) && i.buf == b && (i.op == loop::Op::load_bit || !(i.at == store->at))) return false;
      if (std::none_of(q.node.body.instrs.begin(), q.node.body.instrs.end(), [&](const Instr& i) { return i.op == loop::Op::load && i.buf == b; }))
        return false;  // a read that is not a load (lifetime of an extern view): keep apart
    }
    return true;
  }

  std::vector<Group> ordered() {
    const size_t n = program_.items.size();
    std::vector<size_t> pending(n);
    std::vector<std::vector<size_t>> users(n);
    for (size_t k = 0; k < n; ++k)
      for (size_t d : deps_[k])
        if (group_of_[d] != group_of_[k]) users[group_of_[d]].push_back(group_of_[k]);
    for (size_t g = 0; g < n; ++g) {
      std::sort(users[g].begin(), users[g].end());
      users[g].erase(std::unique(users[g].begin(), users[g].end()), users[g].end());
      for (size_t u : users[g]) ++pending[u];
    }
    // earliest last member first keeps the program's order where dependencies leave a choice
    auto last = [&](size_t g) { return *std::max_element(members(g).begin(), members(g).end()); };
    auto later = [&](size_t a, size_t b) { return last(a) > last(b); };
    std::priority_queue<size_t, std::vector<size_t>, decltype(later)> ready(later);
    for (size_t g = 0; g < n; ++g)
      if (!members(g).empty() && pending[g] == 0) ready.push(g);
    std::vector<Group> out;
    while (!ready.empty()) {
      const size_t g = ready.top();
      ready.pop();
      for (size_t u : users[g])
        if (--pending[u] == 0) ready.push(u);
      collapse_final(groups_[g]);
      out.push_back(std::move(groups_[g]));
    }
    size_t alive = 0;
    for (size_t g = 0; g < n; ++g) alive += !members(g).empty();
    VT_CHECK(out.size() == alive, "fusion made a cycle");
    return out;
  }
  void collapse_final(Group& g) {
    if (!g.ext) collapse(g);
  }

  const LoopProgram& program_;
  FuseOptions options_;
  LoopVars vars_;
  std::vector<std::vector<size_t>> deps_;
  std::vector<size_t> group_of_;
  std::vector<Group> groups_;
  std::vector<std::vector<size_t>> members_;
  std::vector<std::vector<size_t>> readers_, writers_;  // by buffer: nests, in order
  std::vector<std::vector<uint32_t>> touched_;          // by group: buffers, in order
  std::vector<size_t> after_call_;                      // by item: the first of those with no call between them and it
  std::vector<size_t> order_, position_;                // groups, each after what it depends on; those merged away stay as fillers
  std::vector<uint32_t> seen_;                          // by group: the last visit that met it
  uint32_t visit_ = 0;
  std::vector<uint32_t> blocked_;  // by group: the last block() that marked it
  uint32_t block_ = 0;
  std::vector<size_t> candidates_;  // of the look that merge_into_earlier takes, with the bytes they share
  std::vector<int64_t> shared_;
  std::vector<uint32_t> looked_;
  uint32_t look_ = 0;
};

}  // namespace

std::vector<Group> fuse(const LoopProgram& p, const FuseOptions& o) { return Fuser(p, o).run(); }

}  // namespace vitrify::schedule
