// Gradients that have gradients: each is a compiled call of its own.
#include <atomic>

#include "torch/saved_hooks.h"
#include "torch/tangents.h"
#include "torch/tape.h"
#include "torch/training_impl.h"

namespace vitrify {

static std::atomic<bool (*)()> asks_change{nullptr}, asks_again{nullptr};
void ask_saved_hooks(bool (*may_change)(), bool (*compute_again)()) {
  asks_change = may_change;
  asks_again = compute_again;
}
static bool says(const std::atomic<bool (*)()>& asked) {
  const auto ask = asked.load();
  return ask && ask();
}
bool saved_hooks_may_change() { return says(asks_change); }
bool saved_hooks_compute_again() { return says(asks_again); }

namespace {

std::vector<size_t> places_given(const variable_list& tangents) {
  std::vector<size_t> r;
  for (size_t k = 0; k < tangents.size(); ++k)
    if (tangents[k].defined()) r.push_back(k);
  return r;
}

// Where sizes differ from call to call, strides that do not follow from them are left as recorded: a gradient that is a view of such a tangent needs
// them. Whether there is one whose layout has them now.
bool take_viewed_strides(Layouts& how, const JointProgram& j, const variable_list& tangents, const std::vector<at::Tensor>& given) {
  const std::vector<size_t> came = places_given(tangents);
  const size_t first = given.size() - came.size();
  bool taken = false;
  for (const ResultSpec& r : j.program.results) {
    if (!is_of_tangent(r) || r.index < first || any_strides(r.path)) continue;
    const at::Tensor& t = tangents[came[r.index - first]];
    TangentLayout& l = how[came[r.index - first]];
    if (!l.strides.empty() || t.layout() != at::kStrided || given[r.index].strides() == t.strides()) continue;
    take_numbers(t, l);
    taken = true;
  }
  return taken;
}

// Gradients that are tangents, or views of them, are of those that came, and not of how they were laid out. The last that is given are those.
void give_tangents(variable_list& grads, const JointProgram& j, const variable_list& tangents, const Layouts& how,
                   const std::vector<at::Tensor>& given, const CallSizes& sizes) {
  const std::vector<size_t> came = places_given(tangents);
  const size_t first = given.size() - came.size();
  for (size_t g = 0; g < grads.size(); ++g) {
    const ResultSpec& r = j.program.results[g];
    if (r.kind == ResultSpec::Kind::ViewOfValue) grads[g] = grads[r.index];  // the same again
    if (!is_of_tangent(r) || r.index < first) continue;
    const size_t k = came[r.index - first];
    const at::Tensor& t = tangents[k];
    const bool shown = how[k].conj || how[k].neg, bits = shown || any_bits(r.path) || !(t.is_conj() || t.is_neg());
    const bool as_is = bits && (shown || given[r.index].strides() == t.strides() || any_strides(r.path));
    if (has_sizes(r.path))
      grads[g] = follow(resolve(path_in(r.path, sizes)), as_is ? t : given[r.index]);
    else if (as_is)
      grads[g] = follow(resolve(r.path), t);
  }
}

// As the trace has it; undefined where that cannot be.
at::Tensor as_traced(const RegionCall::Other& o) {
  if (o.tensor.sizes() != o.recorded.sizes() || o.tensor.dtype() != o.recorded.dtype()) return {};
  return o.tensor.strides() == o.recorded.strides() ? o.tensor : laid_in(o.tensor, o.recorded.sizes(), o.recorded.strides());
}

}  // namespace

variable_list Training::differentiable_backward(const std::shared_ptr<Call>& call, const variable_list& tangents, RegionNode& node) const {
  if (any_transform())
    if (auto made = under_transforms(as_transformed([&](const variable_list& one) { return differentiable_backward(call, one, node); }), tangents))
      return *made;
  if (!all_plain(tangents)) {
    if (!is_batch(tangents)) give_up("they come by tangents that are no plain tensors");
    std::vector<variable_list> each;
    for (int64_t i = 0, n = size_of_batch(tangents); i < n; ++i) each.push_back(differentiable_backward(call, one_of_batch(tangents, i), node));
    return as_batch(each);
  }
  if (saved_hooks_may_change()) give_up("hooks on saved tensors, which may give back something else than they are given, are around them");
  Layouts how = layouts_of(tangents, node);
  for (size_t k = 0; k < tangents.size(); ++k) how[k].needs_grad = tangents[k].defined() && tangents[k].requires_grad();
  leave_out_unasked(how, node);
  const CallSizes sizes = sizes_of(*call, tangents);
  std::vector<std::shared_ptr<Training>> refused;  // by what they look at in this call
  bool viewed = static_ || !strides_show(node, node.edges_shown());
  for (int times = 0;;) {
    const std::shared_ptr<Training> next = next_level(how, *call, tangents, node, sizes, refused);
    const Origin origin = next->origin(*this, call, tangents, how, node);
    std::vector<at::Tensor> given;
    for (const Kept& k : origin.given) given.push_back(k.tensor);
    for (const auto& [i, laid] : origin.laid) given[i] = laid;
    if (!take_given(origin, given, next->joint_, next->needs_)) give_up("what they read has another size or dtype than in the forward");
    if (!std::exchange(viewed, true) && take_viewed_strides(how, next->joint_, tangents, given)) continue;
    std::string why;
    try {
      variable_list all;
      next->run(given, all, &origin);
      give_tangents(all, next->joint_, tangents, how, given, sizes);
      return all;
    } catch (const capture::PlanRefused& e) {  // as in backward()
      why = e.what();
      std::lock_guard lock(mutex_);
      std::erase_if(next_[how], [&](const Next& n) { return n.program == next; });
    } catch (const capture::WayRefused& e) {
      why = e.what();
      refused.push_back(next);
    }
    if (times++ == static_cast<int>(kMaxVariants)) give_up(why);
  }
}

// Eager has no nodes for gradients that nobody asks for: a node of theirs would lead backwards to what the others do not.
void Training::leave_out_unasked(Layouts& how, const RegionNode& node) const {
  if (!is_of_grad()) return;
  note_unasked(how, node);
  const auto leaves_out = [](const Layouts& all) { return std::ranges::any_of(all, [](const TangentLayout& l) { return !l.unasked.empty(); }); };
  std::lock_guard lock(mutex_);
  if (!leaves_out(how) || next_.contains(how) || asks_++ < kMaxAsks) return;
  std::erase_if(next_, [&](const auto& n) { return leaves_out(n.first); });
  asks_ = 1;
  if (++asked_anew_ > kMaxVariants) leave_to_eager("they are asked for in too many ways");
}

std::string Training::leave_to_eager(const std::string& why, const char* what) const {
  std::string text = trace()->cannot(what, why);
  if (!gave_up_->is) gave_up_->why = text;
  gave_up_->is = true;
  return text;
}

void Training::note_stale() const {
  if (++stale_ == kMostStale) leave_to_eager("what a backward reads is changed between the forward and it, in many calls", "gradients");
}

void Training::give_up(const std::string& why) const {
  const std::string text = [&] {
    std::lock_guard lock(mutex_);
    return leave_to_eager(why);
  }();
  TORCH_CHECK(false, text, "; calls from now on run eagerly: make the result again");
}

Origin Training::origin(const Training& below, const std::shared_ptr<Call>& call, const variable_list& tangents, const Layouts& how,
                        RegionNode& node) const {
  const std::vector<Value>& wanted = joint_.given;
  const RegionCall::Assigned assigned = node.call().assigned(true);
  const size_t own = below.joint_.given.size();
  const CallSizes sizes = below.sizes_of(*call, tangents);
  Origin o{.given = std::vector<Kept>(wanted.size()),
           .edges = torch::autograd::edge_list(wanted.size()),
           .places = {},
           .call = call,
           .laid = {},
           .views = {}};
  std::vector<char> found(wanted.size());
  for (uint32_t i = 0; i < own; ++i) found[i] = below.tape().finds({}, false, i);
  std::ranges::copy(call->given, o.given.begin());
  for (Kept& k : o.given) k.take_now();
  const size_t gradients = below.joint_.gradients.size();
  for (size_t g = 0; g < gradients; ++g) o.edges[below.joint_.gradients[g].given] = node.next_edge(g);
  for (size_t p = 0; p < below.joint_.past_raising.size(); ++p) o.edges[below.joint_.past_raising[p]] = node.next_edge(gradients + p);
  for (const RegionCall::Seen& s : node.call().saved_leaves)  // eager would come to it
    if (const at::Tensor now(s.lock()); now.defined() && now.requires_grad())
      give_up("a tensor that the program has written or made begins to need gradients");
  const auto find_edge = [&](size_t i) {
    const at::Tensor now = i < own && !o.edges[i].function ? call->given[i].tensor_now() : at::Tensor();
    if (now.defined() && now.requires_grad()) o.edges[i] = torch::autograd::impl::gradient_edge(now);
  };
  for (const auto& [i, needed] : needs_now(*call, node))
    if (needed) find_edge(i);
  for (const Gradient& g : joint_.gradients) find_edge(g.given);  // to which the derivative below does not lead: it was frozen where it was read
  o.places = node.call().places();
  for (size_t s = 0; s < below.saved_.size(); ++s) {
    const auto at = static_cast<size_t>(std::ranges::find(wanted, below.saved_[s].value) - wanted.begin());
    if (at == wanted.size() || below.saved_[s].kind == Saved::Kind::Sizes || below.saved_[s].snapshot) continue;
    if (!needs_[at]) {  // but for its sizes, which no guard may know
      if (!capture::is_static(wanted[at].type()) && !below.saved_[s].bits && call->with_sizes(s).tensor.defined())
        o.given[at] = Kept::sizes_of(call->with_sizes(s).tensor);
    } else {
      const bool is_other = std::ranges::any_of(assigned, [&](const auto& a) {
        return below.saved_[s].kind == Saved::Kind::Result && a.second.output == static_cast<int32_t>(below.saved_[s].index);
      });
      Kept kept = call->unpack(s, node.getptr());
      if (is_other && kept.readable()) {  // the other is given by itself
        kept = Kept(call->kept[s].tensor);
        kept.version = call->kept[s].version;
      }
      o.given[at] = kept.freed ? std::move(kept) : laid_as_recorded(below.saved_[s], std::move(kept), sizes);
      if (below.saved_[s].kind == Saved::Kind::Result && below.tape().finds({}, true, below.saved_[s].index)) found[at] = 1;
    }
  }
  std::vector<char> was(wanted.size());
  auto snapshot = joint_.was.begin() + static_cast<std::ptrdiff_t>(below.joint_.was.size());
  for (size_t s = 0; s < below.saved_.size(); ++s) {
    if (!below.saved_[s].is_as_it_was()) continue;
    const uint32_t i = joint_.place_of(snapshot++->was);
    was[i] = 1;
    if (needs_[i]) {
      Kept kept = call->unpack(s, node.getptr());
      o.given[i] = kept.freed ? std::move(kept) : laid_as_recorded(below.saved_[s], std::move(kept), sizes);
    } else if (!capture::is_static(wanted[i].type()) && !below.saved_[s].bits && call->with_sizes(s).tensor.defined()) {
      o.given[i] = Kept::sizes_of(call->with_sizes(s).tensor);
    }
  }
  size_t k = 0;
  for (size_t i = own; i < wanted.size(); ++i) {
    if (!is_input(*wanted[i].node) || was[i]) continue;
    if (const auto of = std::ranges::find(joint_.assigned, wanted[i], [](const auto& a) { return a.second; }); of != joint_.assigned.end()) {
      const at::Tensor now = as_traced(assigned.at(of->first));
      if (!now.defined()) give_up("what they read has another size or dtype than in the forward");
      o.given[i] = Kept(now);
      continue;
    }
    if (!o.tangents) o.tangents = i;
    while (!how[k].defined) ++k;
    const at::Tensor laid = laid_out(tangents[k], below.type_of_tangent(k), how[k]);
    const bool copied = !laid.is_alias_of(tangents[k]), bits = how[k].conj || how[k].neg;
    if (copied && bits)  // the trace turns what lies in memory
      o.given[i] = Kept(turned(tangents[k], tangents[k]));
    else
      o.given[i] = copied || laid.is_same(tangents[k]) ? Kept(tangents[k], Hold::Tensor) : Kept(laid);
    o.given[i].loose = copied;  // each that reads it lays it out anew, as it is by then
    if (copied) o.laid.emplace_back(static_cast<uint32_t>(i), laid);
    if (!o.given[i].itself || !how[k].expanded.empty() || bits) o.views.emplace_back(static_cast<uint32_t>(i), tangents[k]);
    if (tangents[k].requires_grad()) o.edges[i] = torch::autograd::impl::gradient_edge(tangents[k]);
    ++k;
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!needs_[i]) continue;
    if (o.given[i].freed) {
      TORCH_CHECK(!reads_for(below, node, i), torch::autograd::ERR_BACKWARD_TWICE);
      o.given[i] = any_numbers(o.given[i], wanted[i].type());
    }
    TORCH_CHECK(o.given[i].readable(), is_input(*wanted[i].node) ? "vitrify: a gradient of a gradient of a program that writes to its arguments"
                                                                 : "vitrify: a gradient of a gradient needs random numbers that were not kept");
    o.given[i].check_memory();
    if (found[i]) o.given[i].version = version_of(o.given[i].tensor);  // of the version that it has by now
    if (o.given[i].changed() && reads_for(below, node, i)) refuse(o.given[i], wanted[i].type());
  }
  return o;
}

bool Training::reads_for(const Training& below, const Node& node, size_t given) const {
  const size_t inputs = std::min(below.joint_.gradients.size() + below.joint_.past_raising.size(), joint_.program.results.size());
  for (size_t g = 0; g < inputs; ++g) {
    ResultSpec r = joint_.program.results[g];
    if (r.kind == ResultSpec::Kind::Undefined || !is_asked(node.next_edge(g))) continue;
    if (r.kind == ResultSpec::Kind::ViewOfValue) r = joint_.program.results[r.index];
    if (is_of_tangent(r) ? r.index == given : reads_[r.index][given] != 0) return true;
  }
  return false;
}

// A derivative that is differentiated again reads what eager has saved itself with the history that it has by now.
Tracer::Needs Training::needs_now(const Call& call, const RegionNode& node) {
  Tracer::Needs r = node.call().needs_now();
  for (uint32_t i = 0; i < call.given.size(); ++i)
    if (const auto needs = call.given[i].needs_now(); needs && std::ranges::find(r, i, &Tracer::Needs::value_type::first) == r.end())
      r.emplace_back(i, *needs);
  return r;
}

std::shared_ptr<Training> Training::next_level(Layouts& how, const Call& call, const variable_list& tangents, RegionNode& node,
                                               const CallSizes& sizes, const std::vector<std::shared_ptr<Training>>& refused) const {
  std::string why;
  {
    std::lock_guard lock(mutex_);
    const bool too_many = is_other(how) && !next_.contains(how) && layouts_++ >= kMaxLayouts;
    if (too_many && !own_backward_) how = as_recorded(how);
    std::vector<Next> none;
    std::vector<Next>& all = too_many && own_backward_ ? none : next_[how];
    const std::vector<uint32_t> assigned = RegionCall::numbers_of(node.call().assigned(true));
    const bool stale = is_stale();
    if (stale) all.clear();
    const Tracer::Needs needs = needs_now(call, node);
    for (const Next& n : all)
      if (n.assigned == assigned && n.needs == needs && holds(n.known, sizes) && std::ranges::find(refused, n.program) == refused.end())
        return n.program;
    if (stale || !node.call().needs_now().empty()) note_stale();
    if (all.size() >= kMaxVariants) {
      all.erase(all.begin());
      if (++replaced_ > kMaxVariants) leave_to_eager("they fix sizes or look at values, of which too many come in turn");
    }
    std::vector<Value> kept, snapshots;
    for (const Saved& s : saved_)
      if (s.is_as_it_was())
        snapshots.push_back(s.value);
      else if (s.kind != Saved::Kind::Sizes && !s.snapshot)
        kept.push_back(s.value);
    const Taking taking(*this, assumed_, sizes);
    try {
      const WithoutTransforms none;
      JointProgram j = trace()->deepen(joint_, how, kept, snapshots, look_at(call, tangents, how, node), needs, assigned);
      j.results = joint_.results;
      for (const Saved& s : saved_)
        if (s.kind == Saved::Kind::Result) j.results.push_back(s.value);
      auto program = std::make_shared<Training>(std::move(j), trace(), options_, gave_up_);
      const JointProgram& made = program->joint_;
      Assumed known = taking.known(sizes, *made.program.graph, made.outputs, made.given);
      if (!stale) all.push_back({program, std::move(known), assigned, needs});
      return program;
    } catch (const CaptureError& e) {
      why = e.what();
    }
  }
  give_up(why);
}

Tracer::Look Training::look_at(const Call& call, const variable_list& tangents, const Layouts& how, RegionNode& node) const {
  Tracer::Look look;
  look.tangents.resize(tangents.size());
  for (size_t k = 0; k < tangents.size(); ++k)
    if (tangents[k].defined()) look.tangents[k] = laid_out(tangents[k].detach(), type_of_tangent(k), how[k]);
  for (const auto& [result, other] : node.call().assigned(true))
    if (const at::Tensor now = as_traced(other); now.defined()) look.assigned.emplace_back(result, now);
  look.values = [this, &call, &tangents, &node] {
    std::vector<std::pair<Value, at::Tensor>> values;
    const CallSizes sizes = sizes_of(call, tangents);
    for (size_t i = 0; i < joint_.given.size(); ++i)
      if (Kept k = call.given[i]; k.readable()) {
        k.take_now();
        values.emplace_back(joint_.given[i], k.tensor.detach());
      }
    for (size_t s = 0; s < saved_.size(); ++s)
      if (saved_[s].kind != Saved::Kind::Sizes && !saved_[s].snapshot) {
        Kept k = call.unpack(s, node.getptr());  // of what was freed no gradient that is asked for is computed: any numbers do, as in origin()
        k = k.freed ? any_numbers(k, saved_[s].value.type()) : laid_as_recorded(saved_[s], std::move(k), sizes);
        values.emplace_back(saved_[s].value, k.tensor.detach());
      }
    return values;
  };
  if (!call.hooked.empty())  // a hook may run compiled programs, which it could not while one is recorded
    look.values = [values = look.values()] { return values; };
  return look;
}

}  // namespace vitrify
