// Tensors made from nothing but numbers and positions. Contents of `empty` are zeros: any value is as good.
#include <algorithm>
#include <cmath>

#include "ops/rules.h"

namespace vitrify::ops {
namespace {

Tensor filled(const Args& a, const ir::Arg& value) {
  const DType out = a.out().dtype, t = compute_type(out);
  return a.L.map(out, a.out().sizes, [value, t](Body& b, const Index&) { return number(b, value, t); }, 0, 0);
}
template <size_t at>
bool lower_full(const Args& a, std::vector<Tensor>& r) {
  const ir::Arg& v = a.n.args[at];
  if (!is_number(v)) return false;
  if (a.out().dtype == DType::Bool) {
    auto s = a.scalar(at);
    if (!s) return false;
    return r.push_back(a.L.full(DType::Bool, a.out().sizes, *s != 0)), true;
  }
  if (!number_converts(v, a.out().dtype)) return false;
  return r.push_back(filled(a, v)), true;
}
template <int value>
bool lower_constant(const Args& a, std::vector<Tensor>& r) {
  return r.push_back(a.L.full(a.out().dtype, a.out().sizes, value)), true;
}

bool lower_fill_tensor(const Args& a, std::vector<Tensor>& r) {
  Tensor v = a.tensor(1);
  const DType out = a.out().dtype;
  if (!v.sizes.empty() || (is_float(v.dtype) && !is_float(out))) return false;
  v = a.L.expand(v, a.out().sizes);
  r.push_back(map1(a.L, v, out, [out](Body&, Val x) { return cast(x, compute_type(out)); }));
  return true;
}

bool is_whole(const ir::Arg& a) {
  auto* d = std::get_if<double>(&a);
  return !d || std::floor(*d) == *d;
}

// start + i * step. Of fractions and halves ATen's vectors round each step as wide as they are: its kernel is called.
bool arange(const Args& a, std::vector<Tensor>& r, const ir::Arg& start, const ir::Arg& step) {
  const DType out = a.out().dtype;
  if (out == DType::Bool || out != compute_type(out) || !is_number(start) || !is_number(step)) return false;
  const DType t = is_float(out) ? DType::F64 : DType::I64;
  if (!number_fits(start, t) || !number_fits(step, t) || !is_whole(start) || !is_whole(step)) return false;
  r.push_back(a.L.map(
      out, a.out().sizes,
      [=](Body& b, const Index& i) { return cast(number(b, start, t) + cast(b.index(i[0]), t) * number(b, step, t), compute_type(out)); }, 3, 0));
  return true;
}
bool lower_arange(const Args& a, std::vector<Tensor>& r) { return arange(a, r, Int(0), Int(1)); }
bool lower_arange_start(const Args& a, std::vector<Tensor>& r) { return arange(a, r, a.n.args[0], Int(1)); }
bool lower_arange_step(const Args& a, std::vector<Tensor>& r) { return arange(a, r, a.n.args[0], a.n.args[2]); }

bool lower_unpack_bits(const Args& a, std::vector<Tensor>& r) {
  const Tensor bits = a.L.realize(a.tensor(0));
  const std::vector<Int> strides = a.ints(2);
  r.push_back(a.L.map(DType::Bool, a.out().sizes, [bits, strides](Body& b, const Index& i) {
    Int at = bits.offset * 8;
    for (size_t d = 0; d < i.size(); ++d) at = at + i[d] * strides[d];
    return b.load_bit(static_cast<uint32_t>(bits.buffer), at);
  }));
  return true;
}

bool lower_eye(const Args& a, std::vector<Tensor>& r) {
  const DType t = compute_type(a.out().dtype);
  r.push_back(a.L.map(
      a.out().dtype, a.out().sizes,
      [t](Body& b, const Index& i) { return where(eq(b.index(i[0]), b.index(i[1])), b.constant(t, 1), b.constant(t, 0)); }, 2, 0));
  return true;
}
template <bool lower_part>
bool lower_triangle(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const size_t n = x.sizes.size();
  if (n < 2) return false;
  const Int diagonal = a.integer(1);
  r.push_back(a.L.map(
      x.dtype, x.sizes,
      [=](Body& b, const Index& i) {
        Val d = b.index(i[n - 1] - i[n - 2]), k = b.index(diagonal), v = x.at(b, i);
        return where(lower_part ? d <= k : d >= k, v, v.lit(0));
      },
      x.cost + 2, x.reads));
  return true;
}

// --- shapes

TensorType with_options(ArgSpan args, size_t first, DType dtype, Device device, Dims sizes) {
  if (auto* d = std::get_if<DType>(&args[first])) dtype = *d;
  if (args.size() > first + 2)
    if (auto* d = std::get_if<Device>(&args[first + 2])) device = *d;
  return contiguous_type(dtype, device, std::move(sizes));
}
bool sizes_arg(ArgSpan args, size_t i, Dims& sizes) {
  auto* v = std::get_if<std::vector<Int>>(&args[i]);
  if (!v) return false;
  sizes.assign(v->begin(), v->end());
  for (auto& s : sizes)
    if (s.is_const() && s.value() < 0) return false;
  return true;
}
template <size_t options, bool has_format = false, size_t size = 0>
Shape shape_new(sym::Context&, ArgSpan args) {
  Dims sizes;
  if (args.size() <= options || !sizes_arg(args, size, sizes)) return {};
  auto t = with_options(args, options, default_float(), {}, sizes);
  if (t.dtype == DType::Opaque) return {};
  if (has_format)
    if (auto* f = std::get_if<ir::MemoryFormat>(&args[options + 4])) {
      if ((*f == ir::MemoryFormat::ChannelsLast && sizes.size() != 4) || (*f == ir::MemoryFormat::ChannelsLast3d && sizes.size() != 5) ||
          *f == ir::MemoryFormat::Preserve)
        return {};
      t.strides = strides_for(*f, sizes);
    }
  return one(t);
}
Shape shape_permutation(sym::Context&, ArgSpan args) {
  const auto* n = std::get_if<sym::Int>(&args[0]);
  if (!n || (n->is_const() && n->value() < 0) || args.size() <= 2) return {};
  auto t = with_options(args, 2, DType::I64, {}, {*n});
  if (t.dtype == DType::Opaque) return {};
  return one(t);
}
template <size_t options>
Shape shape_new_from(sym::Context&, ArgSpan args) {  // new_*: options default to self's
  const TensorType* x = tensor_arg(args, 0);
  Dims sizes;
  if (!x || args.size() <= options || !sizes_arg(args, 1, sizes)) return {};
  auto t = with_options(args, options, x->dtype, x->device, sizes);
  if (t.dtype == DType::Opaque) return {};
  return one(t);
}
template <size_t options>
Shape shape_like(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || args.size() < options + 5) return {};
  auto t = with_options(args, options, x->dtype, x->device, x->sizes);
  if (t.dtype == DType::Opaque) return {};
  auto* f = std::get_if<ir::MemoryFormat>(&args[options + 4]);
  if (!f || *f == ir::MemoryFormat::Preserve)
    t.strides = preserved_strides(ctx, *x);
  else if ((*f == ir::MemoryFormat::ChannelsLast && x->sizes.size() != 4) || (*f == ir::MemoryFormat::ChannelsLast3d && x->sizes.size() != 5))
    return {};
  else
    t.strides = strides_for(*f, x->sizes);
  return one(t);
}
template <size_t size>
Shape shape_strided(sym::Context&, ArgSpan args) {
  const TensorType* x = size ? tensor_arg(args, 0) : nullptr;
  Dims sizes;
  const auto* strides = args.size() > size + 2 ? std::get_if<std::vector<Int>>(&args[size + 1]) : nullptr;
  if ((size && !x) || !strides || !sizes_arg(args, size, sizes) || strides->size() != sizes.size()) return {};
  auto t = with_options(args, size + 2, x ? x->dtype : default_float(), x ? x->device : Device(), sizes);
  if (t.dtype == DType::Opaque) return {};
  t.strides.assign(strides->begin(), strides->end());
  return one(t);
}
Shape shape_fill(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x) return {};
  TensorType t = *x;
  t.wrapped_number = false;
  t.strides = preserved_strides(ctx, *x);
  return one(t);
}
Shape shape_bernoulli_p(sym::Context&, ArgSpan args) {  // the one of its family that forgets how its argument lies
  const TensorType* x = tensor_arg(args, 0);
  if (!x) return {};
  return one(contiguous_type(x->dtype, x->device, x->sizes));
}
// Its kernel takes no zeros, and Meta's is Python code, whose import takes longer than most captures.
Shape shape_multinomial(sym::Context& ctx, ArgSpan args) {  // self, num_samples, replacement
  const TensorType* x = tensor_arg(args, 0);
  const auto* samples = args.size() > 2 ? std::get_if<Int>(&args[1]) : nullptr;
  if (!x || !samples || !is_float(x->dtype) || x->sizes.empty() || x->sizes.size() > 2) return {};
  constexpr int64_t kMostCategories = int64_t{1} << 24;
  const Int categories = x->sizes.back();
  if (!ctx.guard_lt(0, *samples) || ctx.guard_lt(kMostCategories, categories) || (!bool_arg(args, 2) && ctx.guard_lt(categories, *samples)))
    return {};
  Dims sizes = x->sizes;
  sizes.back() = *samples;
  return one(contiguous_type(DType::I64, x->device, std::move(sizes)));
}
template <bool lower>
Shape shape_indices(sym::Context& ctx, ArgSpan args) {  // rows, columns, offset; Meta's kernel is Python code as well
  const auto rows = int_arg(ctx, args, 0), columns = int_arg(ctx, args, 1), offset = int_arg(ctx, args, 2);
  constexpr int64_t kMost = 1 << 20;
  if (!rows || !columns || !offset || *rows < 0 || *columns < 0 || *rows > kMost || *columns > kMost || std::abs(*offset) > kMost) return {};
  int64_t below = 0;
  for (int64_t r = 0; r < *rows; ++r) below += std::clamp<int64_t>(r + *offset + (lower ? 1 : 0), 0, *columns);
  const auto t = with_options(args, 3, DType::I64, {}, {Int(2), Int(lower ? below : *rows * *columns - below)});
  return t.dtype == DType::I64 || t.dtype == DType::I32 ? one(t) : Shape();
}
Shape shape_triangle(sym::Context&, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || x->sizes.size() < 2) return {};
  return one(contiguous_type(x->dtype, x->device, x->sizes));
}
Shape shape_full(sym::Context&, ArgSpan args) {  // the type is the number's by default
  Dims sizes;
  if (args.size() < 5 || !sizes_arg(args, 0, sizes) || !is_number(args[1])) return {};
  const DType natural = std::holds_alternative<double>(args[1]) ? default_float() : std::holds_alternative<bool>(args[1]) ? DType::Bool : DType::I64;
  auto t = with_options(args, 2, natural, {}, sizes);
  return t.dtype == DType::Opaque ? Shape{} : one(t);
}
Shape shape_scalar_tensor(sym::Context&, ArgSpan args) {
  if (args.size() < 4) return {};
  auto t = with_options(args, 1, default_float(), {}, {});
  return t.dtype == DType::Opaque ? Shape{} : one(t);
}
// A number that has a value now; sizes are specialized.
std::optional<double> value_of(sym::Context& ctx, const ir::Arg& a) {
  if (auto* i = std::get_if<Int>(&a)) return static_cast<double>(ctx.specialize(*i));
  auto* d = std::get_if<double>(&a);
  return d && number_converts(a, DType::F32) && std::isfinite(*d) ? std::optional<double>(*d) : std::nullopt;
}
// From `start` to `end` by `step`. Of integers as an expression; of floats the length depends on rounding, and is counted in double as ATen does.
Shape arange_type(sym::Context& ctx, ArgSpan args, const ir::Arg& start, const ir::Arg& end, const ir::Arg& step, size_t options) {
  if (args.size() < options + 4) return {};
  auto* d = std::get_if<DType>(&args[options]);
  if (d && (!is_native(*d) || *d == DType::Bool)) return {};
  auto *s = std::get_if<Int>(&start), *e = std::get_if<Int>(&end), *k = std::get_if<Int>(&step);
  const auto large = [](const Int* i) { return i->is_const() && std::abs(static_cast<double>(i->value())) > 0x1p53; };
  const bool integers = s && e && k;
  if (integers && !(d && is_float(*d) && (large(s) || large(e) || large(k)))) {
    const bool up = ctx.guard_lt(0, *k);
    if (!up && !ctx.guard_lt(*k, 0)) return {};
    const Int from = up ? *s : *e, to = up ? *e : *s;
    if (!ctx.guard_le(from, to)) return {};
    return one(with_options(args, options, DType::I64, {}, Dims{sym::ceildiv(to - from, up ? *k : -*k)}));
  }
  if (!is_number(start) || !is_number(end) || !is_number(step) || (d && !is_float(*d))) return {};
  const auto x = value_of(ctx, start), y = value_of(ctx, end), by = value_of(ctx, step);
  if (!x || !y || !by || static_cast<float>(*by) == 0) return {};
  const double from = *by > 0 ? *x : *y, to = *by > 0 ? *y : *x;
  if (!(static_cast<float>(to) >= static_cast<float>(from)) || !(to >= from)) return {};
  const double length = std::ceil((*y - *x) / *by);
  if (!(length < 0x1p53)) return {};
  return one(with_options(args, options, default_float(), {}, Dims{static_cast<int64_t>(length)}));
}
Shape shape_arange(sym::Context& ctx, ArgSpan args) { return arange_type(ctx, args, Int(0), args[0], Int(1), 1); }
Shape shape_arange_start(sym::Context& ctx, ArgSpan args) { return arange_type(ctx, args, args[0], args[1], Int(1), 2); }
Shape shape_arange_step(sym::Context& ctx, ArgSpan args) { return arange_type(ctx, args, args[0], args[1], args[2], 3); }

template <size_t dims>
Shape shape_eye(sym::Context& ctx, ArgSpan args) {
  if (args.size() < dims + 3) return {};
  Dims sizes;
  for (size_t i = 0; i < 2; ++i) {
    auto* n = std::get_if<Int>(&args[std::min(i, dims - 1)]);
    if (!n || !ctx.guard_le(0, *n)) return {};
    sizes.push_back(*n);
  }
  auto t = with_options(args, dims, default_float(), {}, sizes);
  return is_native(t.dtype) ? one(t) : Shape{};
}
Shape shape_linspace(sym::Context& ctx, ArgSpan args) {
  if (args.size() < 6) return {};
  auto* steps = std::get_if<Int>(&args[2]);
  if (!steps || !ctx.guard_le(0, *steps)) return {};
  auto t = with_options(args, 3, default_float(), {}, Dims{*steps});
  if (!is_native(t.dtype) || t.dtype == DType::Bool || !number_converts(args[0], t.dtype) || !number_converts(args[1], t.dtype)) return {};
  return one(t);
}
// As many numbers as the first argument says; rfftfreq: those of half a spectrum. On Meta these ops fill an arange, in Python code.
template <size_t options, bool half = false>
Shape shape_samples(sym::Context& ctx, ArgSpan args) {
  if (args.size() < options + 4) return {};
  auto* n = std::get_if<Int>(&args[0]);
  if (!n || !ctx.guard_lt(0, *n)) return {};
  auto t = with_options(args, options, default_float(), {}, Dims{half ? sym::floordiv(*n, Int(2)) + 1 : *n});
  return t.dtype == DType::F32 || t.dtype == DType::F64 ? one(t) : Shape();
}

const OpRow kRows[] = {
    {"aten::full", 0, shape_full, lower<lower_full<1>>, false, 1},
    {"aten::full_like", 0, shape_like<2>, lower<lower_full<1>>, false, 1},
    {"aten::new_full", 0, shape_new_from<3>, lower<lower_full<2>>, false, 2},
    {"aten::fill.Scalar", 0, shape_fill, lower<lower_full<1>>, false, 1},
    {"aten::fill.Tensor", 0, shape_fill, lower<lower_fill_tensor>},
    {"aten::scalar_tensor", 0, shape_scalar_tensor, lower<lower_full<0>>},
    {"aten::zeros", 0, shape_new<1>, lower<lower_constant<0>>, false, kZeros},
    {"aten::zeros_like", 0, shape_like<1>, lower<lower_constant<0>>, false, kZeros},
    {"aten::new_zeros", 0, shape_new_from<2>, lower<lower_constant<0>>, false, kZeros},
    {"aten::zero", 0, shape_fill, lower<lower_constant<0>>, false, kZeros},
    {"aten::ones", 0, shape_new<1>, lower<lower_constant<1>>, false, kOnes},
    {"aten::ones_like", 0, shape_like<1>, lower<lower_constant<1>>, false, kOnes},
    {"aten::new_ones", 0, shape_new_from<2>, lower<lower_constant<1>>, false, kOnes},
    {"aten::empty.memory_format", 0, shape_new<1, true>, lower<lower_constant<0>>, false, kNothing},
    {"aten::empty_like", 0, shape_like<1>, lower<lower_constant<0>>, false, kNothing},
    {"aten::new_empty", 0, shape_new_from<2>, lower<lower_constant<0>>, false, kNothing},
    {"aten::empty_strided", 0, shape_strided<0>, lower<lower_constant<0>>, false, kNothing},
    {"aten::new_empty_strided", 0, shape_strided<1>, lower<lower_constant<0>>, false, kNothing},
    {"aten::arange", 0, shape_arange, lower<lower_arange>},
    {"aten::arange.start", 0, shape_arange_start, lower<lower_arange_start>},
    {"aten::arange.start_step", 0, shape_arange_step, lower<lower_arange_step>},
    {"aten::eye", 0, shape_eye<1>, lower<lower_eye>},
    {"aten::eye.m", 0, shape_eye<2>, lower<lower_eye>},
    {"aten::linspace", 0, shape_linspace, nullptr},
    {"aten::fft_fftfreq", 0, shape_samples<2>, nullptr},
    {"aten::fft_rfftfreq", 0, shape_samples<2, true>, nullptr},
    {"aten::hann_window", 0, shape_samples<1>, nullptr},
    {"aten::hann_window.periodic", 0, shape_samples<2>, nullptr},
    {"aten::hamming_window", 0, shape_samples<1>, nullptr},
    {"aten::hamming_window.periodic", 0, shape_samples<2>, nullptr},
    {"aten::hamming_window.periodic_alpha", 0, shape_samples<3>, nullptr},
    {"aten::hamming_window.periodic_alpha_beta", 0, shape_samples<4>, nullptr},
    {"aten::blackman_window", 0, shape_samples<1>, nullptr},
    {"aten::blackman_window.periodic", 0, shape_samples<2>, nullptr},
    {"aten::bartlett_window", 0, shape_samples<1>, nullptr},
    {"aten::bartlett_window.periodic", 0, shape_samples<2>, nullptr},
    {"aten::tril_indices", 0, shape_indices<true>, nullptr},
    {"aten::triu_indices", 0, shape_indices<false>, nullptr},
    {"aten::tril", 0, shape_triangle, lower<lower_triangle<true>>},
    {"aten::triu", 0, shape_triangle, lower<lower_triangle<false>>},
    {"aten::rand", ir::kRandom, shape_new<1>, nullptr},
    {"aten::rand.generator", ir::kRandom, shape_new<2>, nullptr},
    {"aten::randn", ir::kRandom, shape_new<1>, nullptr},
    {"aten::randn.generator", ir::kRandom, shape_new<2>, nullptr},
    {"aten::rand_like", ir::kRandom, shape_like<1>, nullptr, true},
    {"aten::randn_like", ir::kRandom, shape_like<1>, nullptr, true},
    {"aten::randint_like", ir::kRandom, shape_like<2>, nullptr, true},
    {"aten::randint_like.low_dtype", ir::kRandom, shape_like<3>, nullptr, true},
    {"aten::randint", ir::kRandom, nullptr, nullptr},
    {"aten::randint.low", ir::kRandom, nullptr, nullptr},
    {"aten::randperm", ir::kRandom, nullptr, nullptr},
    {"aten::randperm.generator", ir::kRandom, shape_permutation, nullptr},
    {"aten::bernoulli", ir::kRandom, nullptr, nullptr},
    {"aten::bernoulli.p", ir::kRandom, shape_bernoulli_p, nullptr, true},
    {"aten::bernoulli.Tensor", ir::kRandom, nullptr, nullptr},
    {"aten::normal.float_float", ir::kRandom, shape_new<4, false, 2>, nullptr},
    {"aten::normal_functional", ir::kRandom, nullptr, nullptr, true},
    {"aten::uniform", ir::kRandom, nullptr, nullptr, true},
    {"aten::exponential", ir::kRandom, nullptr, nullptr, true},
    {"aten::geometric", ir::kRandom, nullptr, nullptr, true},
    {"aten::cauchy", ir::kRandom, nullptr, nullptr, true},
    {"aten::log_normal", ir::kRandom, nullptr, nullptr, true},
    {"aten::random", ir::kRandom, nullptr, nullptr, true},
    {"aten::random.from", ir::kRandom, nullptr, nullptr, true},
    {"aten::random.to", ir::kRandom, nullptr, nullptr, true},
    {"aten::multinomial", ir::kRandom, shape_multinomial, nullptr},
    {"vitrify::bernoulli", ir::kRandom, nullptr, nullptr},  // as bits
    {"vitrify::pack_bits", 0, nullptr, nullptr},
    {"vitrify::unpack_bits", 0, nullptr, lower<lower_unpack_bits>},
    {"vitrify::uniform", ir::kRandom, nullptr, nullptr},
    {"vitrify::random_state", ir::kRandom, nullptr, nullptr},
    {"vitrify::set_random_state", ir::kRandom, nullptr, nullptr},
};

}  // namespace

std::span<const OpRow> create_rows() { return kRows; }

}  // namespace vitrify::ops
