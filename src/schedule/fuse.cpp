#include "schedule/fuse.h"

#include <algorithm>
#include <queue>
#include <unordered_map>

namespace vitrify::schedule {

using namespace ops;
using loop::Instr;
using loop::Loop;

namespace {

constexpr size_t kMaxBuffers = 40, kMaxInstrs = 400;
constexpr int64_t kSmallWork = 6'000'000;  // instructions
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
    if (x.is(1) || y.is(1)) return std::nullopt;
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
  for (auto* list : {&p.node.body.instrs, &p.node.epilogue})
    for (Instr& i : *list)
      if (!i.at.is_const()) i.at = sym::substitute(i.at, map);
}

class Fuser {
 public:
  Fuser(const LoopProgram& p, const FuseOptions& o) : program_(p), options_(o) {}

  std::vector<Group> run() {
    const size_t n = program_.items.size();
    group_of_.resize(n);
    deps_.resize(n);
    find_dependencies();
    for (size_t k = 0; k < n; ++k) {
      groups_.push_back(make_group(k));
      group_of_[k] = k;
    }
    if (options_.enabled)
      for (size_t k = 0; k < n; ++k) merge_into_earlier(k);
    return ordered();
  }

 private:
  Loop make_loop(Int extent) {
    sym::Range r{0, std::numeric_limits<int64_t>::max()};
    if (extent.is_const()) r.hi = std::max<int64_t>(extent.value() - 1, 0);
    Int v = program_.ctx->symbol(sym::SymbolKind::Loop, {}, r);
    if (!extent.is_const()) program_.ctx->set_loop_extent(v, extent);
    return {v, extent};
  }

  void find_dependencies() {
    std::vector<std::vector<size_t>> writers(program_.buffers.size());
    std::optional<size_t> last_effect;
    for (size_t k = 0; k < program_.items.size(); ++k) {
      const Item& it = program_.items[k];
      auto& d = deps_[k];
      auto need = [&](uint32_t b) { d.insert(d.end(), writers[b].begin(), writers[b].end()); };
      if (it.ext) {
        for (auto& t : it.ext->operands) need(static_cast<uint32_t>(t.buffer));
        for (uint32_t b : it.ext->results) writers[b].push_back(k);
        if (it.ext->node->op->flags & (ir::kRandom | ir::kEffect)) {
          if (last_effect) d.push_back(*last_effect);
          last_effect = k;
        }
      } else {
        for (uint32_t b : it.loop->reads) need(b);
        for (uint32_t b : it.loop->writes) writers[b].push_back(k);
      }
      std::sort(d.begin(), d.end());
      d.erase(std::unique(d.begin(), d.end()), d.end());
    }
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
    return g;
  }

  // Merges adjacent loops that every index walks as one.
  void collapse(Group& g) {
    for (auto* loops : {&g.outer, &g.inner})
      for (size_t i = loops->size(); i-- > 1;) {
        const Loop a = (*loops)[i - 1], b = (*loops)[i];
        bool ok = true;
        for (Part& p : g.parts)
          for (auto* list : {&p.node.body.instrs, &p.node.epilogue})
            for (Instr& in : *list) ok = ok && walks_as_one(in.at, a, b);
        if (!ok) continue;
        Loop m = make_loop(a.extent * b.extent);
        for (Part& p : g.parts) rewrite(p, {{a.var, Int(0)}, {b.var, m.var}});
        (*loops)[i - 1] = m;
        loops->erase(loops->begin() + i);
      }
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

  // Would running `from` after something that depends on `on` be needed? True if `from`'s group reaches `on`'s group through dependencies.
  bool reaches(size_t from_group, size_t on_group) {
    std::vector<char> seen(program_.items.size());
    std::vector<size_t> stack{from_group};
    while (!stack.empty()) {
      const size_t g = stack.back();
      stack.pop_back();
      if (g == on_group) return true;
      if (seen[g]) continue;
      seen[g] = 1;
      for (size_t k : members(g))
        for (size_t d : deps_[k])
          if (group_of_[d] != g) stack.push_back(group_of_[d]);
    }
    return false;
  }
  const std::vector<size_t>& members(size_t g) {
    if (members_.size() < program_.items.size()) {
      members_.resize(program_.items.size());
      for (size_t k = 0; k < members_.size(); ++k) members_[k] = {k};
    }
    return members_[g];
  }

  void merge_into_earlier(size_t k) {
    bool again = true;
    while (again) {
      again = false;
      const size_t h = group_of_[k];
      if (groups_[h].closed) return;
      // earlier groups that share memory with this one, most bytes first
      std::unordered_map<size_t, int64_t> shared;
      std::vector<char> mine(program_.buffers.size());
      for (Part& p : groups_[h].parts) {
        for (uint32_t b : p.node.reads) mine[b] = 1;
        for (uint32_t b : p.node.writes) mine[b] = 1;
      }
      for (size_t j = 0; j < k; ++j) {
        const size_t g = group_of_[j];
        if (g == h || groups_[g].closed || program_.items[j].ext) continue;
        const LoopNode& n = *program_.items[j].loop;
        int64_t bytes = 0;
        for (uint32_t b : n.writes)
          if (mine[b]) bytes += 2 * bytes_of(b);
        for (uint32_t b : n.reads)
          if (mine[b]) bytes += bytes_of(b);
        if (bytes > 0)
          shared[g] += bytes;
        else if (is_small(groups_[g]) && is_small(groups_[h]))
          shared.try_emplace(g, 0);
      }
      std::vector<std::pair<int64_t, size_t>> order;
      for (auto& [g, bytes] : shared) order.emplace_back(bytes, g);
      std::sort(order.rbegin(), order.rend());
      for (auto& [bytes, g] : order)
        if (try_merge(g, h)) {
          again = true;
          break;
        }
    }
  }
  int64_t bytes_of(uint32_t b) { return hint_or(program_.buffers[b].extent, 1024) * static_cast<int64_t>(size_of(program_.buffers[b].dtype)); }

  bool try_merge(size_t a, size_t b) {
    if (!space_may_match(groups_[a], groups_[b])) return false;
    if (limits_exceeded(groups_[a], groups_[b])) return false;
    // no third group may stand between: nothing that one needs may itself need the other
    for (auto [x, y] : {std::pair{b, a}, std::pair{a, b}})
      for (size_t k : members(x))
        for (size_t d : deps_[k]) {
          const size_t g = group_of_[d];
          if (g != x && g != y && reaches(g, y)) return false;
        }
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
    const bool mixed = groups_[a].reduces != groups_[b].reduces && numel(groups_[a]) == numel(groups_[b]);
    const bool small = hint_or(numel(groups_[a]), 1024) < kSmall;
    if (!fits(Order::OuterFirst, mixed && !small) && !(mixed && feeds(a, b) && fits(Order::InnerFirst, true))) return false;
    if (first.parts.front().node.origin && second.parts.empty()) return false;
    for (Part& q : second.parts) first.parts.push_back(std::move(q));
    first.reduces = first.reduces || second.reduces;
    first.first_item = std::min(first.first_item, second.first_item);
    members(a);
    auto moved = std::move(members_[b]);
    for (size_t k : moved) group_of_[k] = a;
    members_[a].insert(members_[a].end(), moved.begin(), moved.end());
    members_[b].clear();
    sort_parts(first, members_[a]);
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

  // Little enough work that starting a kernel counts: worth merging with any other group of the same space.
  static bool is_small(const Group& g) {
    int64_t instrs = 0;
    for (auto& p : g.parts) instrs += static_cast<int64_t>(p.node.body.instrs.size());
    return hint_or(numel(g), kSmallWork) * instrs < kSmallWork;
  }
  static Int numel(const Group& g) { return product(g.outer) * product(g.inner); }

  bool space_may_match(const Group& a, const Group& b) {
    const Int na = numel(a), nb = numel(b);
    if (a.reduces && b.reduces) return product(a.outer) == product(b.outer) && product(a.inner) == product(b.inner);
    const Group& r = a.reduces ? a : b;
    const Group& f = a.reduces ? b : a;
    if (!r.reduces) return na == nb;
    const Int o = product(r.outer);
    if (!(numel(f) == numel(r)) && !(numel(f) == o)) return false;
    // a long map would lose its parallelism inside a reduction with few outer iterations
    return hint_or(o, 1024) >= 2 * options_.threads || hint_or(numel(f), 1) < kSmall;
  }

  bool limits_exceeded(const Group& a, const Group& b) {
    std::vector<uint32_t> bufs;
    size_t instrs = 0;
    for (auto* g : {&a, &b})
      for (auto& p : g->parts) {
        instrs += p.node.body.instrs.size();
        bufs.insert(bufs.end(), p.node.reads.begin(), p.node.reads.end());
        bufs.insert(bufs.end(), p.node.writes.begin(), p.node.writes.end());
      }
    std::sort(bufs.begin(), bufs.end());
    bufs.erase(std::unique(bufs.begin(), bufs.end()), bufs.end());
    return bufs.size() > kMaxBuffers || instrs > kMaxInstrs;
  }

  bool align_outer(Group& a, Group& b) {
    auto r = refine(extents(a.outer), extents(b.outer));
    if (!r) return false;
    std::vector<Loop> outer = loops_for(*r, a.outer);
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
    auto touches = [](const Instr& i) { return i.op == loop::Op::load || i.op == loop::Op::store; };
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
      std::vector<Loop> outer = loops_for(*o, a.outer), inner = loops_for(*i, a.inner);
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
    if (numel(flat) == numel(red) && order == Order::InnerFirst) {
      std::vector<Int> all = extents(red.inner), out = extents(red.outer);
      const Int inner_numel = product(red.inner);
      all.insert(all.end(), out.begin(), out.end());
      auto r = refine(extents(flat.outer), all);
      if (!r) return false;
      size_t split = 0;
      Int n = 1;
      while (split < r->size() && !(n == inner_numel)) n = n * (*r)[split++];
      if (!(n == inner_numel)) return false;
      std::vector<Loop> inner = loops_for({r->begin(), r->begin() + split}, red.inner), outer = loops_for({r->begin() + split, r->end()}, red.outer);
      std::vector<Loop> both = inner;
      both.insert(both.end(), outer.begin(), outer.end());
      relabel(flat, flat.outer, both);
      relabel(red, red.outer, outer);
      relabel(red, red.inner, inner);
      red.outer = flat.outer = outer;
      red.inner = flat.inner = inner;
      return true;
    }
    if (numel(flat) == numel(red)) {
      std::vector<Int> all = extents(red.outer), in = extents(red.inner);
      const Int inner_numel = product(red.inner);
      all.insert(all.end(), in.begin(), in.end());
      auto r = refine(extents(flat.outer), all);
      if (!r) return false;
      size_t split = r->size();
      Int n = 1;
      while (split > 0 && !(n == inner_numel)) n = n * (*r)[--split];
      if (!(n == inner_numel)) return false;
      std::vector<Loop> outer = loops_for({r->begin(), r->begin() + split}, red.outer), inner = loops_for({r->begin() + split, r->end()}, red.inner);
      std::vector<Loop> both = outer;
      both.insert(both.end(), inner.begin(), inner.end());
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

  std::vector<Loop> loops_for(const std::vector<Int>& e, const std::vector<Loop>& have) {
    if (e == extents(have)) return have;
    std::vector<Loop> r;
    for (Int x : e) r.push_back(make_loop(x));
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
        if (i.op == loop::Op::load && i.buf == b && !(i.at == store->at)) return false;
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
  std::vector<std::vector<size_t>> deps_;
  std::vector<size_t> group_of_;
  std::vector<Group> groups_;
  std::vector<std::vector<size_t>> members_;
};

}  // namespace

std::vector<Group> fuse(const LoopProgram& p, const FuseOptions& o) { return Fuser(p, o).run(); }

}  // namespace vitrify::schedule
