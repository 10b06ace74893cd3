// as_strided looks at memory, which values have none of: passes and the schedule choose where their elements lie. It is recorded as what it means,
// a choice among all elements of the memory in the order in which eager has them there.
#include <torch/library.h>

#include <algorithm>

#include "torch/executor.h"
#include "torch/learned.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using capture::fail;
using compat::Stack;
using ir::TensorType;
using ir::Value;

namespace {

std::vector<sym::Int> to_ints(const std::vector<int64_t>& v) { return {v.begin(), v.end()}; }

// Sizes and strides as numbers.
TensorType specialized(sym::Context& ctx, TensorType t) {
  for (ir::Dims* dims : {&t.sizes, &t.strides})
    for (sym::Int& i : *dims) i = ctx.specialize(i);
  return t;
}

// Dims from the outermost, where the elements lie one after the other; others: none.
std::optional<std::vector<size_t>> dense_order(const TensorType& t) {
  std::vector<size_t> order(t.dim());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  std::ranges::stable_sort(order, [&](size_t a, size_t b) {
    const bool one_a = t.sizes[a].is(1), one_b = t.sizes[b].is(1);
    return one_a != one_b ? one_a : !one_a && t.strides[a].value() > t.strides[b].value();
  });
  int64_t expected = 1;
  for (size_t k = order.size(); k-- > 0;) {
    const int64_t n = t.sizes[order[k]].value();
    if (n == 1) continue;
    if (n == 0 || t.strides[order[k]].value() != expected) return {};
    expected *= n;
  }
  return order;
}

// Whether a view has the bits of its base, so that an element of it is one of that.
bool keeps_elements(std::string_view op) {
  return op != "aten::view.dtype" && op != "aten::view_as_real" && op != "aten::view_as_complex" && op != "aten::_conj" && op != "aten::_neg_view";
}

TensorType dense_type(const TensorType& like, const std::vector<int64_t>& sizes) {
  TensorType t = like;
  t.wrapped_number = false;
  t.sizes.assign(sizes.begin(), sizes.end());
  t.strides = ir::contiguous_strides(t.sizes);
  return t;
}

}  // namespace

// The memory that `child`, made by as_strided, is cut from: null where that is not a value's whole.
std::optional<Tracer::Impl::Memory> Tracer::Impl::memory_of(const View& child) {
  sym::Context& ctx = graph->ctx();
  const TensorType part = specialized(ctx, child.type);  // a derivative's own has the symbols of what it is the gradient of
  if (child.parent && std::ranges::any_of(part.sizes, [](sym::Int n) { return n.is(0); }))  // looks at nothing
    return Memory{child.parent.get(), specialized(ctx, child.parent->type), {}};
  Memory m;
  // The furthest is the largest.
  for (View* p = child.parent.get(); p; p = p->parent.get()) {
    const TensorType type = specialized(ctx, p->type);
    if (const auto order = dense_order(type)) m = {p, type, *order};
    if (p->step.op && !keeps_elements(p->step.op->name)) break;
  }
  if (!m.of) return {};
  int64_t count = 1;
  for (sym::Int n : m.type.sizes) count *= n.value();
  m.begin = child.offset - m.of->offset;
  m.end = m.begin + 1;
  for (size_t d = 0; d < part.dim(); ++d) m.end += (part.sizes[d].value() - 1) * part.strides[d].value();
  if (m.begin < 0 || m.end > count) return {};
  return m;
}

// All elements in the order of memory, [count].
Value Tracer::Impl::elements_of(const Memory& m, Value v) {
  std::vector<int64_t> order(m.order.begin(), m.order.end()), sizes;
  for (size_t d : m.order) sizes.push_back(m.type.sizes[d].value());
  int64_t count = 1;
  for (int64_t n : sizes) count *= n;
  if (!std::ranges::is_sorted(order)) v = append("aten::permute", {v, to_ints(order)}, {dense_type(v.type(), sizes)})->out();
  return sizes.size() == 1 ? v : append("aten::view", {v, to_ints({count})}, {dense_type(v.type(), {count})})->out();
}

// The other way round, as a value of the type that the memory has.
Value Tracer::Impl::from_elements(const Memory& m, Value v) {
  std::vector<int64_t> inverse(m.order.size()), sizes;
  for (size_t k = 0; k < m.order.size(); ++k) {
    inverse[m.order[k]] = static_cast<int64_t>(k);
    sizes.push_back(m.type.sizes[m.order[k]].value());
  }
  if (sizes.size() != 1) v = append("aten::view", {v, to_ints(sizes)}, {dense_type(v.type(), sizes)})->out();
  TensorType type = m.type;
  type.wrapped_number = false;
  if (!std::ranges::is_sorted(m.order)) v = append("aten::permute", {v, to_ints(inverse)}, {type})->out();
  return v;
}

void Tracer::Impl::assume_of_input(std::string_view what, std::vector<ir::Arg> args, uint32_t flags) {
  const ir::Op* op = graph->op(std::string(what), ir::kEffect | flags);
  if (std::ranges::none_of(graph->nodes(), [&](const ir::Node* n) { return n->op == op && n->args == args; }))
    graph->append(op, std::move(args), {})->source = source;
}

// The program counts from where the memory begins: what it reads depends on where in it the input lies.
void Tracer::Impl::assume_offset(uint32_t input) {
  assume_of_input("vitrify::assume_offset", {graph->inputs[input].value, sym::Int(capture::as_fake(inputs[input]->fake)->view->storage->offset)},
                  ir::kLooksAtOffset);
}
// What lies behind the input comes into view.
void Tracer::Impl::assume_end(uint32_t input) { assume_of_input("vitrify::assume_end", {graph->inputs[input].value}); }

// The program looks at where in its memory something lies. Of what a custom op gives the run sees whether it is all of that.
void Tracer::Impl::assume_place(const StorageState& s) {
  if (s.input >= 0) return assume_offset(static_cast<uint32_t>(s.input));
  if (s.shrunk) assume_of_input(kLooksAtMemory, {});
}

void Tracer::Impl::note_memory(const OpInfo& info, uint32_t result, const at::Tensor& fake, const at::Tensor& meta) {
  if (!(info.flags & ir::kEffect) || info.name.starts_with("aten::") || !fake.defined()) return;
  StorageState& s = *capture::as_fake(fake)->view->storage;
  if ((meta.defined() && (meta.is_conj() || meta.is_neg())) || capture::is_known(info.name, result, capture::Given::Bits))
    fail(fmt::format("{} gives a conjugate or negative view", info.name));
  s.shrunk = true;
  s.in_part = (meta.defined() && shows_part(meta)) || capture::is_known(info.name, result, capture::Given::Part);
}

// What `child` looks at.
Value Tracer::Impl::read_strided(View& child) {
  const View& parent = *child.parent;
  // Other strides of dims of one element, as global average pooling gives its result.
  bool same = child.offset == parent.offset && child.type.sizes == parent.type.sizes;
  for (size_t d = 0; same && d < child.type.dim(); ++d) same = child.type.sizes[d].is(1) || child.type.strides[d] == parent.type.strides[d];
  if (same) return append("aten::alias", {read(*child.parent)}, {child.type})->out();
  const auto m = memory_of(child);
  if (!m) {
    if (child.storage->generation) capture::fail("aten::as_strided of memory with gaps, after a write");
    const Value v = read(*child.parent);
    const TensorType part = specialized(graph->ctx(), child.type);
    const std::vector<ir::Arg> args{v, std::vector<sym::Int>(part.sizes.begin(), part.sizes.end()),
                                    std::vector<sym::Int>(part.strides.begin(), part.strides.end()), sym::Int(child.offset)};
    assume_of_input("vitrify::looks_between", {});  // where another argument may lie: see results.cpp
    assume_place(*child.storage);
    return append("aten::as_strided", args, {child.type})->out();
  }
  if (m->end == 0 && child.type.dtype == DType::Opaque) return apply(child, read(*child.parent));
  const auto nothing = [&] {
    const TensorType none = dense_type(child.type, {0});
    return append("aten::full", {std::vector<sym::Int>{sym::Int(0)}, sym::Int(0), none.dtype, ir::None{}, none.device, ir::None{}}, {none})->out();
  };
  Value v = m->end == 0 ? nothing() : elements_of(*m, read(*m->of));
  if (m->begin != 0)
    v = append("aten::slice.Tensor", {v, sym::Int(0), sym::Int(m->begin), sym::Int(m->end), sym::Int(1)}, {dense_type(v.type(), {m->end - m->begin})})
            ->out();
  TensorType type = child.type;
  type.wrapped_number = false;
  return append("aten::as_strided",
                {v, std::vector<sym::Int>(type.sizes.begin(), type.sizes.end()), std::vector<sym::Int>(type.strides.begin(), type.strides.end()),
                 ir::None{}},
                {type})
      ->out();
}

// The memory's value with `value` where `child` looks.
Value Tracer::Impl::write_strided(View& child, const Memory& m, Value value) {
  if (m.end == 0) return read(*m.of);
  const Value all = elements_of(m, read(*m.of));
  const TensorType part = dense_type(all.type(), {m.end - m.begin});
  const std::vector<sym::Int> range{m.begin, m.end};
  Value v = all;
  if (!(all.type() == part)) v = append("aten::slice.Tensor", {v, sym::Int(0), range[0], range[1], sym::Int(1)}, {part})->out();
  const ir::Dims &sizes = child.type.sizes, &strides = child.type.strides;
  v = append("aten::as_strided_scatter",
             {v, value, std::vector<sym::Int>(sizes.begin(), sizes.end()), std::vector<sym::Int>(strides.begin(), strides.end()), ir::None{}}, {part})
          ->out();
  if (!(all.type() == part)) v = append("aten::slice_scatter", {all, v, sym::Int(0), range[0], range[1], sym::Int(1)}, {all.type()})->out();
  return from_elements(m, v);
}

// as_strided_copy(self, size, stride, offset) and as_strided_scatter(self, src, size, stride, offset), by way of as_strided: what they are given may
// be laid out otherwise when they run.
at::Tensor Tracer::Impl::copy_strided(c10::ArrayRef<c10::IValue> args) {
  const bool writes = args.size() == 5;
  const at::Tensor self = fake_of(args[0].toTensor());
  Stack strided{self, args[args.size() - 3], args[args.size() - 2], args[args.size() - 1]};
  if (writes && self.requires_grad() && !self.is_contiguous())
    capture::fail("calls aten::as_strided_scatter of a tensor with gaps or in another order, which has no gradient");
  if (!writes) {
    run_special(*ops.find("aten::as_strided"), &strided);
    Stack copy{strided.back(), at::MemoryFormat::Contiguous};
    run_pure(*ops.find("aten::clone"), &copy);
    return copy.back().toTensor();
  }
  const capture::FakeImpl* f = capture::as_fake(self);
  if (!dense_order(specialized(graph->ctx(), f->view->type))) capture::fail("aten::as_strided_scatter reaches outside its tensor, which has gaps");
  Stack copy{self, at::MemoryFormat::Preserve};
  run_pure(*ops.find("aten::clone"), &copy);
  const at::Tensor result = copy.back().toTensor();
  strided[0] = result;
  if (!strided[3].isNone()) {
    if (f->view->storage->in_part) fail("aten::as_strided_scatter counts from the beginning of memory that shows in part only");
    assume_place(*f->view->storage);
    strided[3] = strided[3].toInt() - f->storage_offset();
  }
  run_special(*ops.find("aten::as_strided"), &strided);
  const at::Tensor part = strided.back().toTensor(), src = fake_of(args[1].toTensor());
  if (part.sym_sizes() != src.sym_sizes()) capture::fail("aten::as_strided_scatter of a tensor of another shape");
  Stack write{part, src, false};
  run_special(*ops.find("aten::copy_"), &write);
  capture::as_fake(result)->view->storage->in_part = !capture::is_whole(*f->view);
  return result;
}

TORCH_LIBRARY_FRAGMENT(vitrify, m) {
  m.def("looks_at_memory() -> ()", [] {});
  m.def("looks_between() -> ()", [] {});
  m.def("assume_offset(Tensor x, int offset) -> ()", [](const at::Tensor& x, int64_t offset) {
    if (x.storage_offset() != offset) throw capture::RunRefused("aten::as_strided of an argument that lies elsewhere in its memory");
  });
  m.def("assume_end(Tensor x) -> ()", [](const at::Tensor& x) {
    if (x.storage().nbytes() > static_cast<size_t>(x.storage_offset() + x.numel()) * x.itemsize())
      throw capture::RunRefused("aten::resize_ of an argument that has more memory than elements");
  });
}

}  // namespace vitrify
