#include "schedule/schedule.h"

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "schedule/build_kernel.h"
#include "schedule/fuse.h"
#include "schedule/place_memory.h"
#include "support/hash.h"

namespace vitrify::schedule {

using namespace ops;
using runtime::SlotKind;
using runtime::TensorRef;

namespace {

const bool named = add_stage_names({"fuse"});

std::vector<Int> to_vector(const Dims& d) { return {d.begin(), d.end()}; }

struct PlanBuilder {
  const LoopProgram& program;
  runtime::Plan& plan;
  const std::vector<int32_t>& overwritten;  // by buffer: the input or output in whose memory it is made, or -1
  std::vector<int32_t> slot_of;

  PlanBuilder(const LoopProgram& p, runtime::Plan& out, const std::vector<int32_t>& overwritten_)
      : program(p), plan(out), overwritten(overwritten_), slot_of(p.buffers.size(), -1) {}

  uint32_t slot(uint32_t b) {
    if (overwritten[b] >= 0) b = static_cast<uint32_t>(overwritten[b]);
    if (slot_of[b] >= 0) return static_cast<uint32_t>(slot_of[b]);
    const BufferInfo& info = program.buffers[b];
    runtime::Slot s;
    s.dtype = info.dtype;
    s.device = info.device;
    s.sizes = to_vector(info.sizes);
    s.strides = to_vector(info.strides);
    s.bytes = info.extent * static_cast<int64_t>(size_of(info.dtype));
    switch (info.role) {
      case BufferRole::Input:
        s.kind = SlotKind::Input;
        s.index = static_cast<uint32_t>(std::find(program.inputs.begin(), program.inputs.end(), b) - program.inputs.begin());
        break;
      case BufferRole::Constant:
        s.kind = SlotKind::Constant;
        s.index = static_cast<uint32_t>(std::find(program.constants.begin(), program.constants.end(), b) - program.constants.begin());
        break;
      case BufferRole::Output:
        s.kind = SlotKind::Output;
        for (size_t o = program.outputs.size(); o-- > 0;)
          if (program.outputs[o] && program.outputs[o]->buffer == static_cast<int32_t>(b)) s.index = static_cast<uint32_t>(o);
        break;
      case BufferRole::Intermediate:
        s.kind = info.made_by == MadeBy::Call ? SlotKind::Extern : SlotKind::Arena;
        break;
    }
    plan.slots.push_back(std::move(s));
    slot_of[b] = static_cast<int32_t>(plan.slots.size() - 1);
    return static_cast<uint32_t>(slot_of[b]);
  }

  TensorRef ref(const Tensor& t) { return {slot(static_cast<uint32_t>(t.buffer)), to_vector(t.sizes), to_vector(t.strides), t.offset}; }
};

struct FormHash {
  size_t operator()(const std::vector<uint64_t>& form) const { return hash_bytes(form.data(), form.size() * sizeof form[0]); }
};

// Does this group write `b`, element by element, after it has read for the last time what `b` overwrites?
bool overwrites_elementwise(const Group& g, uint32_t b, uint32_t old) {
  if (g.ext || g.reduces || g.parts.front().node.scatter) return false;
  const loop::Instr* store = nullptr;
  for (const Part& p : g.parts) {
    for (const loop::Instr& i : p.node.body.instrs) {
      if (i.op != loop::Op::store || i.buf != b) continue;
      if (store || i.b != loop::kNoValue) return false;
      store = &i;
    }
    if (!p.node.epilogue.empty()) return false;
  }
  if (!store) return false;
  bool stored = false;
  for (const Part& p : g.parts)
    for (const loop::Instr& i : p.node.body.instrs) {
      if (loop::is_load(i.op) && i.buf == old && (i.op == loop::Op::load_bit || stored || !(i.at == store->at))) return false;
      if (i.op == loop::Op::store && i.buf == old) return false;
      stored = stored || &i == store;
    }
  return true;
}

// By buffer, the groups that read or write it.
struct Uses {
  std::vector<std::vector<size_t>> readers, writers;

  Uses(const LoopProgram& program, const std::vector<Group>& groups) : readers(program.buffers.size()), writers(program.buffers.size()) {
    for (size_t g = 0; g < groups.size(); ++g) {
      if (groups[g].ext) {
        for (auto& t : groups[g].ext->operands) readers[static_cast<size_t>(t.buffer)].push_back(g);
        for (uint32_t b : groups[g].ext->results) writers[b].push_back(g);
      }
      for (auto& p : groups[g].parts) {
        for (uint32_t b : p.node.reads) readers[b].push_back(g);
        for (uint32_t b : p.node.writes) writers[b].push_back(g);
      }
    }
  }
  bool read_after(uint32_t b, size_t g) const {
    return std::any_of(readers[b].begin(), readers[b].end(), [g](size_t r) { return r > g; });
  }
  bool made_before(uint32_t b, size_t g) const {
    return std::all_of(writers[b].begin(), writers[b].end(), [g](size_t w) { return w < g; });
  }
};

bool laid_out_alike(const BufferInfo& a, const BufferInfo& b) {
  return a.dtype == b.dtype && a.device == b.device && a.sizes == b.sizes && a.strides == b.strides;
}

// Values that are read for the last time where an output is made of them element by element: they are made in the output's memory, and need none of
// their own. Not small ones, which the arena keeps in the caches.
void find_hosts(const LoopProgram& program, const std::vector<Group>& groups, const Uses& uses, std::vector<int32_t>& overwritten) {
  constexpr int64_t kMinBytes = int64_t{1} << 20;
  auto dies_in = [&](uint32_t made) -> std::optional<uint32_t> {
    if (uses.writers[made].size() != 1) return {};
    const size_t w = uses.writers[made][0];
    for (const Part& p : groups[w].parts)
      for (uint32_t b : p.node.reads) {
        const BufferInfo& info = program.buffers[b];
        if (info.role == BufferRole::Intermediate && info.made_by != MadeBy::Call && overwritten[b] < 0 &&
            laid_out_alike(info, program.buffers[made]) && uses.made_before(b, w) && !uses.read_after(b, w) &&
            overwrites_elementwise(groups[w], made, b))
          return b;
      }
    return {};
  };
  for (auto& o : program.outputs) {
    if (!o) continue;
    const auto output = static_cast<uint32_t>(o->buffer);
    const BufferInfo& info = program.buffers[output];
    if (info.role != BufferRole::Output || overwritten[output] >= 0 || !info.extent.is_const() ||
        info.extent.value() * static_cast<int64_t>(size_of(info.dtype)) < kMinBytes)
      continue;
    for (std::optional<uint32_t> b = dies_in(output); b; b = dies_in(*b)) overwritten[*b] = static_cast<int32_t>(output);
  }
}

// Outputs that can be made in the memory they will go to. From the first such write on nothing may fail: the call could not be taken back.
void find_in_place(const LoopProgram& program, const std::vector<Group>& groups, const Uses& uses, const Destinations& destinations,
                   std::vector<int32_t>& overwritten) {
  if (destinations.empty()) return;
  size_t safe = 0;  // groups from here on do not fail
  for (size_t g = 0; g < groups.size(); ++g) {
    const bool faults = std::any_of(groups[g].parts.begin(), groups[g].parts.end(), [](const Part& p) { return p.node.body.may_fault; });
    if (groups[g].ext || faults) safe = g + 1;
  }
  std::vector<char> taken(program.buffers.size());  // inputs that are results as they are, or written already
  for (auto& o : program.outputs)
    if (o) taken[static_cast<size_t>(o->buffer)] = 1;
  for (size_t o = 0; o < destinations.size(); ++o) {
    if (destinations[o] < 0 || !program.outputs[o]) continue;
    const auto b = static_cast<uint32_t>(program.outputs[o]->buffer), old = program.inputs[static_cast<size_t>(destinations[o])];
    const BufferInfo &made = program.buffers[b], &place = program.buffers[old];
    if (made.role != BufferRole::Output || !laid_out_alike(made, place) || taken[old] || uses.writers[b].size() != 1) continue;
    const size_t w = uses.writers[b][0];
    if (w < safe || uses.read_after(old, w) || !overwrites_elementwise(groups[w], b, old)) continue;
    overwritten[b] = static_cast<int32_t>(old);
    taken[old] = 1;
  }
}

}  // namespace

Scheduled schedule(std::shared_ptr<ir::Graph> graph, const Options& options, const Destinations& destinations) {
  LoopProgram program = lower_graph(*graph);
  FuseOptions fo;
  fo.enabled = options.fusion != "off" && !options.disabled("fuse");
  const std::vector<Group> groups = fuse(program, fo);

  // which group touches a buffer
  std::vector<int64_t> only(program.buffers.size(), -1);
  std::vector<char> needed(program.buffers.size());
  auto touch = [&](uint32_t b, size_t g) {
    if (only[b] < 0)
      only[b] = static_cast<int64_t>(g);
    else if (only[b] != static_cast<int64_t>(g))
      needed[b] = 1;
  };
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].ext) {
      for (auto& t : groups[g].ext->operands) touch(static_cast<uint32_t>(t.buffer), g);
      for (uint32_t b : groups[g].ext->results) touch(b, g);
    }
    for (auto& p : groups[g].parts) {
      for (uint32_t b : p.node.reads) touch(b, g);
      for (uint32_t b : p.node.writes) touch(b, g);
    }
  }
  for (uint32_t b = 0; b < program.buffers.size(); ++b) {
    if (program.buffers[b].role != BufferRole::Intermediate) needed[b] = 1;
  }
  for (auto& o : program.outputs)
    if (o) needed[o->buffer] = 1;

  Scheduled out;
  out.plan = std::make_shared<runtime::Plan>();
  runtime::Plan& plan = *out.plan;
  plan.graph = graph;
  std::vector<int32_t> overwritten(program.buffers.size(), -1);
  const Uses uses(program, groups);
  find_in_place(program, groups, uses, destinations, overwritten);
  find_hosts(program, groups, uses, overwritten);
  PlanBuilder pb(program, plan, overwritten);
  for (uint32_t b : program.inputs)
    if (b != UINT32_MAX) pb.slot(b);
  std::unordered_map<std::vector<uint64_t>, uint32_t, FormHash> known;  // kernels
  for (auto& g : groups) {
    if (g.ext) {
      runtime::ExternCall c;
      c.node = g.ext->node;
      for (auto& t : g.ext->operands) c.operands.push_back(pb.ref(t));
      for (uint32_t b : g.ext->results) c.results.push_back(only[b] >= 0 || needed[b] ? static_cast<int32_t>(pb.slot(b)) : -1);
      plan.steps.push_back({runtime::Step::Kind::Extern, static_cast<uint32_t>(plan.externs.size())});
      plan.externs.push_back(std::move(c));
      continue;
    }
    // a group nobody needs anything of
    if (std::none_of(g.parts.begin(), g.parts.end(), [&](const Part& p) {
          return p.node.body.may_fault || std::any_of(p.node.writes.begin(), p.node.writes.end(), [&](uint32_t b) { return needed[b]; });
        }))
      continue;
    BuiltKernel built = build_kernel(program, g, needed);
    const auto place = [&](size_t k) {
      return overwritten[built.buffers[k]] >= 0 ? overwritten[built.buffers[k]] : static_cast<int32_t>(built.buffers[k]);
    };
    for (size_t k = 0; k < built.buffers.size(); ++k)
      for (size_t j = 0; j < built.buffers.size() && built.kernel.buffers[k].kind == loop::BufferKind::Out; ++j)
        if (j != k && place(j) == place(k)) built.kernel.buffers[k].inplace_of = static_cast<int32_t>(j);
    if (options.verify) loop::verify(built.kernel);
    const auto [same, fresh] = known.try_emplace(loop::canonical_form(built.kernel), static_cast<uint32_t>(out.kernels.size()));
    const uint32_t index = same->second;
    if (fresh) {
      runtime::KernelRef ref;
      ref.may_fault = built.kernel.may_fault;
      ref.name = built.kernel.name;
      plan.kernels.push_back(ref);
      out.kernels.push_back(built.kernel);
    }
    runtime::Launch l;
    l.kernel = index;
    for (uint32_t b : built.buffers) l.slots.push_back(pb.slot(b));
    for (auto& b : built.kernel.buffers)
      if (b.kind != loop::BufferKind::Scratch) l.writes.push_back(b.kind != loop::BufferKind::In);
    l.sizes = built.kernel.sizes;
    l.iterations = built.iterations;
    l.grain = built.grain;
    for (auto& b : built.kernel.buffers)
      if (b.kind == loop::BufferKind::Scratch) l.scratch_bytes += sym::ceildiv(b.extent * static_cast<int64_t>(size_of(b.dtype)), 64) * 64;
    plan.steps.push_back({runtime::Step::Kind::Launch, static_cast<uint32_t>(plan.launches.size())});
    plan.launches.push_back(std::move(l));
  }
  for (auto& o : program.outputs) {
    if (!o)
      plan.outputs.push_back({false, false, {}});
    else
      plan.outputs.push_back({true, overwritten[static_cast<size_t>(o->buffer)] >= 0, pb.ref(*o)});
  }
  plan.dynamic = program.ctx->dynamic();  // also when no slot has the symbol: a size may be read as a number only
  for (size_t k = 0; k < out.kernels.size(); ++k) {
    const auto hint = [&](uint32_t id) {
      const Int s = program.ctx->symbol_at(id);
      return sym::has_hint(s) ? sym::hint(s) : int64_t{1};
    };
    const bool takes = std::ranges::any_of(out.kernels[k].buffers, [](const loop::Buffer& b) { return b.kind == loop::BufferKind::Scratch; });
    if (takes) plan.kernels[k].scratch_bytes = std::max<size_t>(loop::scratch_bytes(out.kernels[k], hint), 1);  // sizes may have been 0 so far
  }
  place_memory(plan);
  plan.known = sym::known(graph->ctx());
  return out;
}

std::string print(const runtime::Plan& p) {
  std::string s;
  static constexpr const char* kKinds[] = {"input", "constant", "arena", "output", "extern"};
  for (size_t i = 0; i < p.slots.size(); ++i) {
    auto& sl = p.slots[i];
    s += fmt::format("slot {}: {} {} [", i, kKinds[static_cast<int>(sl.kind)], to_string(sl.dtype));
    for (size_t d = 0; d < sl.sizes.size(); ++d) s += fmt::format("{}{}", d ? "," : "", sym::str(sl.sizes[d]));
    s += fmt::format("]{}\n", sl.kind == SlotKind::Arena ? fmt::format(" @{}", sl.arena_offset) : "");
  }
  for (auto& st : p.steps) {
    if (st.kind == runtime::Step::Kind::Launch) {
      auto& l = p.launches[st.index];
      s += fmt::format("launch {} ({}) n={} grain={} slots", p.kernels[l.kernel].name, l.kernel, sym::str(l.iterations), l.grain);
      for (uint32_t x : l.slots) s += fmt::format(" {}", x);
      s += "\n";
    } else if (st.kind == runtime::Step::Kind::Extern) {
      auto& e = p.externs[st.index];
      s += fmt::format("extern {}(", e.node->op->name);
      for (auto& o : e.operands) s += fmt::format(" {}", o.slot);
      s += " ) ->";
      for (int32_t r : e.results) s += fmt::format(" {}", r);
      s += "\n";
    } else {
      s += fmt::format("free {}\n", st.index);
    }
  }
  s += fmt::format("arena {} bytes\n", p.arena_bytes);
  return s;
}

}  // namespace vitrify::schedule
