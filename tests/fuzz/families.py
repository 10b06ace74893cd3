"""What a line of a random program may be, by family: expressions of the values so far.

{a}: a tensor that the family wants; {b}, {c}: any values (mostly of a's dtype); {d}, {e}: dimensions of a; {v}: the line's own name, where the line is a statement.
A pair is a layer that the module owns and what is done with it as {m}; {n}: a's last size, {C}: its size 1."""
from __future__ import annotations

import torch

ELEMENTWISE = """
    torch.abs({a})                      -{a}                               torch.relu({a})                    torch.tanh({a})
    torch.sigmoid({a})                  torch.sin({a})                     torch.cos({a})                     torch.exp(-torch.abs({a}))
    torch.log1p(torch.abs({a}))         torch.sqrt(torch.abs({a}) + 1)     torch.erf({a})                     F.gelu({a})
    F.gelu({a}, approximate="tanh")     F.silu({a})                        F.mish({a})                        F.softplus({a})
    F.elu({a})                          F.leaky_relu({a}, 0.1)             F.hardswish({a})                   F.hardsigmoid({a})
    torch.floor({a})                    torch.ceil({a})                    torch.round({a})                   torch.trunc({a})
    torch.frac({a})                     torch.sign({a})                    torch.clamp({a}, -1, 2)            torch.clamp({a}, min=0.5)
    {a}.clamp(max=0)                    {a} * 2                            {a} + 1                            1.5 - {a}
    {a} / 3                             {a} ** 2                           {a} ** 3                           torch.nan_to_num({a})
    torch.isnan({a})                    torch.isfinite({a})                torch.signbit({a}.nan_to_num())  {a}.to(F32)
    {a}.to(F64)                         {a}.to(BF16)                       {a}.to(F16)                        {a} > 0
    torch.reciprocal(torch.abs({a})+1)  torch.rsqrt(torch.abs({a}) + 0.5)  {a}.clone()                        torch.zeros_like({a})
    torch.tril({a})                     torch.triu({a}, 1)                 torch.expm1(-torch.abs({a}))       torch.atan({a})
    torch.logit(torch.sigmoid({a}))     F.logsigmoid({a})                  torch.square({a})                  torch.heaviside({a}, {a})
    {a}.clamp(min=float("nan"))         torch.threshold({a}, 0.1, 20)      F.hardtanh({a})                    torch.full_like({a}, 2)
    torch.sinc({a})                     torch.deg2rad({a})                 torch.copysign({a}, {b})           torch.logical_not({a})
"""
BINARY = """
    {a} + {b}                           {a} - {b}                          {a} * {b}                          {a} / (torch.abs({b}) + 1)
    torch.maximum({a}, {b})             torch.minimum({a}, {b})            {a} < {b}                          {a} == {b}
    torch.where({a} > {b}, {a}, {b})    torch.where({b} > 0, {a}, 0)       torch.lerp({a}, {b}, 0.25)         torch.atan2({a}, {b})
    torch.addcmul({a}, {b}, {b})        torch.hypot({a}, {b})              torch.fmod({a}, torch.abs({b})+1)  torch.logaddexp({a}, {b})
    torch.add({a}, {b}, alpha=2)        torch.fmax({a}, {b})               torch.addcdiv({a}, {b}, torch.abs({c}) + 1)
    torch.remainder({a}, torch.abs({b}) + 1)                               torch.logical_and({a}, {b})        torch.rsub({a}, {b})
    torch.ldexp({a}, torch.ones_like({a}))                                 torch.xlogy({a}, torch.abs({b}) + 1)
    {a} * scale                         {a} + scale                        torch.full_like({a}, scale)        torch.add({a}, {b}, alpha=scale)
    torch.clamp({a}, min={b})           torch.isclose({a}, {b})            torch.nextafter({a}, {b})          torch.floor_divide({a}, torch.abs({b}) + 1)
"""
PRODUCT = """
    torch.matmul({a}, {b})              torch.matmul({a}, {b}.mT)          {a} @ {a}.mT                       {a}.mT @ {a}
    torch.einsum('...i,...i->...', {a}, {b})                               torch.einsum('...i,...j->...ij', {a}, {b})
    F.linear({a}, {b})                  torch.addmm({a}, {b}, {c})         torch.bmm({a}, {b})                torch.outer({a}, {b})
    torch.tensordot({a}, {b}, 1)        torch.baddbmm({a}, {b}, {c})       torch.mv({a}, {b})                 torch.dot({a}, {b})
    F.linear({a}, torch.ones(3, {n}, dtype={a}.dtype))                     torch.kron({a}, {b})
    F.linear({a}, torch.linspace(-1, 1, 5 * {n}, dtype={a}.dtype).view(5, {n}), torch.ones(5, dtype={a}.dtype))
"""
REDUCE = """
    {a}.sum({d})                        {a}.sum({d}, keepdim=True)         {a}.mean({d})                      {a}.amax({d})
    {a}.amin({d}, keepdim=True)         {a}.argmax({d})                    {a}.argmin({d})                    torch.softmax({a}, {d})
    torch.log_softmax({a}, {d})         torch.cumsum({a}, {d})             {a}.var({d})                       {a}.std({d}, keepdim=True)
    torch.any({a}, {d})                 torch.all({a} > -2, {d})           {a}.narrow({d}, 0, min({a}.shape[{d}], 999)).prod({d})             torch.logsumexp({a}, {d})
    {a} - {a}.mean({d}, keepdim=True)   {a}.sum()                          {a}.max()                          {a}.min()
    {a}.flip({d})                       torch.roll({a}, 1, {d})            torch.var_mean({a}, {d})[1]        torch.cumprod({a}.narrow({d}, 0, min({a}.shape[{d}], 40)), {d})
    {a}.max({d}).values                 {a}.min({d}).indices               torch.norm({a}, dim={d})           torch.linalg.vector_norm({a}, 1, {d})
    torch.median({a} * 1, {d}).values   {a}.sum(({d}, {e}))                {a}.mean()                         torch.count_nonzero({a}, {d})
    torch.cummax({a}, {d}).values       torch.logcumsumexp({a}, {d})       torch.aminmax({a}).max             {a}.nansum({d})
    {a}.sum({d}, dtype=F64)             {a}.sum({d}, dtype=torch.int64)    {a}.var({d}, correction=0)         torch.diff({a}, dim={d})
    {a}.prod({d}, dtype=torch.int32)    torch.quantile({a}, 0.3, {d})      torch.cov({a})                     torch.nanmean({a}, {d})
    torch.trapezoid({a}, dim={d})       torch.mode({a}, {d}).values        torch.histc({a}, 4, -2, 2)         torch.renorm({a}, 2, {d}, 1.0)
"""
VIEW = """
    {a}.transpose({d}, {e})             {a}.unsqueeze({d})                 {a}.squeeze({d})                   {a}.reshape(-1)
    {a}.flatten({d})                    {a}.mT                             {a}.narrow({d}, 0, 1)              {a}.select({d}, 0)
    {a}[1:]                             {a}[..., ::2]                      {a}[:, :-1]                        {a}.expand(2, *{a}.shape)
    {a}.contiguous()                    {a}.unflatten({d}, (-1, 2))        {a}.diagonal()                     {a}.movedim({d}, {e})
    {a}.view({a}.shape)                 {a}.detach()                       {a}.unfold({d}, 2, 1)              {a}.permute(*range({a}.dim())[::-1])
    {a}.chunk(2, {d})[0]                torch.split({a}, 2, {d})[-1]       {a}.view(-1)                       {a}[None, ..., -1]
    {a}.swapaxes({d}, {e})              {a}.narrow({d}, {a}.shape[{d}] - 1, 1)                               {a}.real
    torch.broadcast_to({a}, (2, *{a}.shape))                               {a}.view_as({a})                   torch.atleast_2d({a})
"""
STRIDED = """
    {a}.as_strided((2, 2), (1, 2))      {a}.as_strided((2, 3), (3, 1), 1)  torch.as_strided({a}, ({n},), (1,), 0)
    {a}.as_strided({a}.shape, {a}.stride())                                {a}.as_strided((3,), (2,)) + 1     {a}.contiguous(memory_format=torch.channels_last)
    {a}.to(memory_format=torch.channels_last)                              torch.empty_like({a}).copy_({a})   {a}.new_zeros({a}.shape)
    {a} * (2.0 if {a}.is_contiguous() else 3.0)                            {a} + float({a}.stride(0))         torch.empty_strided({a}.shape, {a}.stride(), dtype={a}.dtype).copy_({a})
    {a}.as_strided_scatter(torch.ones(2, dtype={a}.dtype), (2,), (1,))     {a}.sum() * {a}.storage_offset()
"""
BITS = "{a}.view(torch.int32)    {a}.view(torch.uint8)    {a}.view(torch.int16)    {a}.view(torch.int8) + 1    {a}.view(torch.int64)"
WINDOW = """
    {a}.transpose({d}, {e}).reshape({a}.shape)      torch.roll({a}, (1, 2), (1, 2))         torch.roll({a}, -1, {d}).flip({e})
    {a}.reshape({a}.shape[0], {a}.shape[1] // 2, 2, {a}.shape[2] // 2, 2, -1).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, {n})
    {a}.reshape(-1, 2, {n} // 2).transpose(1, 2).reshape({a}.shape)        {a}.unfold({d}, 2, 2).flatten(-2)
    F.pixel_shuffle({a}, 2)             F.pixel_unshuffle({a}, 2)          F.unfold({a}, 2)                   {a}.reshape(*{a}.shape[:-1], 2, -1).flip(-2).flatten(-2)
    torch.rot90({a}, 1, (0, 1))         F.channel_shuffle({a}, 2)          {a}.repeat(1, *(2,) * ({a}.dim() - 1))    {a}.tile(2)
"""
WRITE = """
    {a}.add_({b})                       {a}.mul_(2)                        {a}.relu_()                        {a}.copy_({b})
    {a}.fill_(0.5)                      {a}.zero_()                        {a}.masked_fill_({a} > 0, 1)       {a}.clamp_(-1, 1)
    {a}[0] = {b}                        {a}[..., 0] = 3                    {a}[{a} > 1] = 0                   {a}.sub_({b})
    {a} += {b}                          {a}.t_()                           {a}.transpose_({d}, {e})           {a}.exp_()
    {a}.neg_()                          {a}.index_fill_({d}, index, 2)     {a}.index_add_({d}, index, {a}.index_select({d}, index))
    {a}.scatter_({d}, {a}.argsort({d}), {b})                               {a}[index] = {b}                   {a}.unsqueeze_({d})
    {a}.addcmul_({a}, {a}, value=0.1)   {a}.lerp_({b}, 0.5)                {a}.index_copy_({d}, index[:1], {a}.index_select({d}, index[:1]) * 2)
    {a}.mT.add_(1)                      {a}.diagonal().fill_(2)            {a}.select({d}, 0).mul_(3)         {a}.view(-1).cumsum_(0)
    {a}[1:].copy_({a}[:-1])             {a}.narrow({d}, 0, 1).zero_()      {a}.neg_()                         {a}.squeeze_()
    {a}.index_put_((index,), {b}, accumulate=True)                         {a}.pow_(2)                        {a}.masked_scatter_({a} > 0, {b})
    {a}.tanh_()                         {a}.data.mul_(0.5)                 {a}.swapaxes_({d}, {e})
"""
MANY = """
    torch.cat([{a}, {b}], {d})          torch.stack([{a}, {b}], {d})       torch.index_select({a}, {d}, index)                  {a}[index]
    torch.gather({a}, {d}, torch.zeros_like({a}, dtype=torch.int64))       F.pad({a}, (1, 2))                 F.pad({a}, (1, -1))
    torch.zeros_like({a}).index_add({d}, index, torch.index_select({a}, {d}, index))                          {a}.topk(1, {d}).values
    torch.sort({a}, {d}).values         {a}.argsort({d}, stable=True)      {a}.repeat_interleave(2, {d})      torch.arange({a}.shape[{d}]) + 0 * {a}.sum()
    F.pad({a}, (1, 1), mode="reflect")  F.pad({a}, (1, 1), mode="replicate")                                  F.pad({a}, (1, 1, 1, 1), mode="circular")
    F.one_hot(index, 40)                torch.take({a}, index)             torch.cdist({a}, {b})              torch.meshgrid({a}.reshape(-1)[:3], {b}.reshape(-1)[:2], indexing="ij")[0]
    torch.hstack([{a}, {b}])            torch.searchsorted({a}.sort(-1).values, {a})                          torch.bucketize({a}, torch.tensor([-1.0, 0.0, 1.0], dtype=F32))
    {a}.scatter_reduce({d}, {a}.argsort({d}, stable=True), {a}, "amax")    torch.block_diag({a}, {b})         torch.cartesian_prod({a}.reshape(-1)[:3], {b}.reshape(-1)[:3])
    {a}.select_scatter({a}.select({d}, 0) * 2, {d}, 0)                     {a}.slice_scatter({a}[1:] + 1, 0, 1)              {a}.diagonal_scatter({a}.diagonal() * 3)
    torch.tensor([1.0, 2.0], dtype=F32)[:, None] * {a}.reshape(-1)[:1]     torch.linspace(0, 1, {n}, dtype=F32) + {a}          torch.triu_indices({n}, 4)
    torch.stack([{a}, {a}], {d}).unbind({d})[1]                            torch.ops.aten.im2col({a}, (2, 2), (1, 1), (0, 0), (1, 1))
"""
WHOLE = """
    {a} // 3                            {a} % 4                            {a} & {b}                          {a} | 3
    {a} ^ {b}                           ~{a}                               {a} << 1                           {a} >> 1
    {a}.to(torch.uint8)                 {a}.to(torch.int8)                 {a}.to(torch.int16)                {a}.to(torch.int32)
    {a}.to(torch.int64)                 {a}.bool()                         {a}.sum({d}, dtype=torch.int16)    {a}.sum()
    torch.gcd({a}, {b})                 {a} * {b}                          {a} + 200                          {a} - {b}
    {a}.cumsum({d})                     {a} / 3                            {a}.float() * 0.5                  torch.div({a}, 2, rounding_mode="trunc")
    torch.bincount({a}.flatten().clamp(0, 9))                              torch.where({a} > 0, {a}, {b})     {a}.clamp(0, 5)
    {a} // (torch.abs({b}) + 1)         torch.bitwise_left_shift({a}, 2)   -{a}                               {a} * 1.5
    {a}.abs()                           {a}.sign()                         {a} == {b}                         {a} ** 2
    torch.remainder({a}, 3)             {a}.prod({d})                      {a}.sort({d}).values               torch.fmod({a}, 3)
"""
COMPLEX = """
    {a}.real                            {a}.imag                           {a}.conj()                         torch.view_as_real({a})
    {a}.conj().imag + 1                 {a}.abs()                          {a} * 1j                           {a} + {b}
    {a} * {b}                           {a}.conj() * {b}                   torch.fft.fft({a}, dim={d})        torch.fft.ifft({a}, dim={d})
    torch.fft.fft2({a})                 torch.fft.fftshift({a}, {d})       {a}.sum({d})                       {a}.mT.conj()
    {a}.mH                              torch.exp({a} * 0.1)               torch.polar({a}.abs(), {a}.real)   {a} @ {a}.mH
    {a}.conj().imag.neg()               {a} / (torch.abs({b}) + 1)         {a}.resolve_conj()                 {a}.imag.resolve_neg()
    {a}.reshape(-1).conj()              {a} == {b}                         {a}.clone()                        {a}.conj().real * {a}.conj().imag
    torch.fft.irfft({a})                torch.fft.hfft({a})                {a}.conj().transpose({d}, {e})     {a}.conj()[..., 1:].imag
"""
FOURIER = """
    torch.fft.rfft({a})                 torch.fft.ihfft({a}).imag + 1      torch.fft.rfft2({a}).abs()         torch.fft.irfft(torch.fft.rfft({a}), {n})
    torch.complex({a}, {a})             torch.complex({a}, {a}).conj().imag                                  torch.fft.fft({a}).real
    torch.view_as_complex({a}.reshape(-1, 2))                              torch.fft.fftfreq({n}) + 0 * {a}  torch.stft({a}.reshape(-1), 4, return_complex=True, center=False, window=torch.ones(4, dtype={a}.dtype)).abs()
"""
RANDOM = """
    F.dropout({a}, 0.3)                 F.dropout({a}, 0.5, training=False)                                  torch.rand_like({a})               torch.randn_like({a})
    torch.randn_like({a}[:, :2])        torch.rand_like({a}.mT[..., :2])   torch.randint_like({a}.transpose({d}, {e})[:2], 9)                    {a}.transpose({d}, {e})[..., 1:].bernoulli(0.3)
    torch.randn({a}.shape, dtype=F32)   torch.rand(3, {n}, dtype=F32)      torch.randint(0, 9, {a}.shape)     torch.randperm({n})
    torch.bernoulli(torch.sigmoid({a})) torch.multinomial(torch.softmax({a}.reshape(-1), 0), 3, replacement=True)                                torch.normal({a}, 0.5)
    torch.normal(0.0, 1.0, (2, {n}), dtype=F32)                            torch.randint_like({a}, 5)         torch.poisson(torch.abs({a}))      torch.empty_like({a}).exponential_()
    {a}.normal_()                       {a}.bernoulli_(0.4)                {a}.uniform_(-1, 1)                {a}.mT.normal_()                   {a}[..., ::2].normal_()
    {a}.random_(0, 7)                   torch.randn({n}, generator=generator, dtype=F32)                     torch.rand({a}.shape, generator=generator, dtype=F32) + {a}
    {a}.bernoulli_(generator=generator) {a}.uniform_(generator=generator)  F.feature_alpha_dropout({a}, 0.2, training=True)                      F.dropout1d({a}, 0.3)
    F.rrelu({a}, 0.1, 0.3, training=True)                                  F.gumbel_softmax({a}, dim={d})     {a}.cauchy_()                      {a}.geometric_(0.4)
    {a}[:, torch.randperm({a}.shape[1])]                                   torch.multinomial(torch.ones({n}), 2)
"""
MASK = """
    {a}[{a} > 0]                        {a}.nonzero()                      torch.unique({a})                  torch.where({a} > 0)[0]
    torch.masked_select({a}, {a} > 0.1) {a}[{a} > 0].sum()                 {a}[{a}.isfinite()] * 2            torch.nonzero({a} > 0)[:, 0] + 1
    torch.unique({a}, return_counts=True)[1]                               torch.unique_consecutive({a})      {a}.reshape(-1)[({a}.reshape(-1) > 0).nonzero().squeeze(1)]
    torch.repeat_interleave(torch.arange(3), torch.tensor([2, 0, 1]))      torch.argwhere({a} > 0).float().sum(0)                                {a}[{a} > 99]
    torch.cat([{a}[{a} > 0], {a}.reshape(-1)])                             torch.relu({a}[{a} != 0]).reshape(-1, 1) * 2                          torch.ops.fuzz.positive({a})
"""
OUT = """
    {v} = torch.empty_like({a}); torch.add({a}, 1, out={v})                {v} = torch.empty(0, dtype={a}.dtype); torch.sum({a}, {d}, out={v})
    {v} = torch.zeros({a}.shape, dtype={a}.dtype); torch.mul({a}, {a}, out={v})                              {v} = torch.empty({a}.shape[::-1], dtype={a}.dtype).permute(*range({a}.dim())[::-1]); torch.sub({a}, 2, out={v})
    {v} = torch.zeros(2, *{a}.shape, dtype={a}.dtype); torch.exp(-{a}.abs(), out={v}[0])                     torch.add({a}, 1, out={b})         torch.clamp({a}, -1, 1, out={a})
    {v} = torch.empty(0, dtype={a}.dtype); torch.cat([{a}, {a}], out={v})  {v} = torch.empty(0, dtype={a}.dtype); torch.matmul({a}, {a}.mT, out={v})
    {v} = torch.zeros({a}.shape, dtype=F64); torch.sigmoid({a}, out={v})   {v} = torch.zeros(1, dtype={a}.dtype); torch.amax({a}, 0, out={v})
"""
FOREACH = """
    torch._foreach_add([{a}, {b}], 1.0)[0]                                 torch._foreach_mul([{a}, {b}], [2.0, 3.0])[1]                         torch._foreach_add_([{a}, {b}], 1.0)
    torch._foreach_mul_([{a}], [{b}])   torch._foreach_norm([{a}, {b}])[0] torch._foreach_sqrt(torch._foreach_abs([{a}, {b}]))[0]                torch._foreach_lerp_([{a}], [{b}], 0.3)
    torch._foreach_addcmul([{a}], [{a}], [{b}], 0.5)[0]                    torch._foreach_zero_([{a}])        torch._foreach_copy_([{a}], [{b}]) torch._foreach_neg([{a}])[0]
"""
CUSTOM = """
    torch.ops.fuzz.scaled({a}, 2.5)     torch.ops.fuzz.bump_({a})          torch.ops.fuzz.rows_first({a})     torch.ops.fuzz.positive({a}) + 1   torch.ops.fuzz.pair({a})[1]
"""
NUMBER = """
    {a} * (torch.tensor(3.0) + 1).item()                                   {a} / torch.tensor(16.0).sqrt().item()                                {a} + torch.tensor(2.0, dtype=F64).mul(3).item()
    {a} * (torch.tensor(3.0, dtype=F32) * 2 - 1).item()                    {a} * (torch.tensor(2.0) / 3).item()                                 {a} + float(torch.tensor(16.0).sqrt())
    {a} / {n} ** 0.5                    {a} * {a}.shape[{d}]               {a} + sum({a}.shape)               {a} * (len({a}) // 2 + 1)          {a} + {a}.numel() % 7
    torch.full_like({a}, {n} / 2)       {a} * max({n}, 3) - min({n}, 3)    {a} * (scale * {n})                {a} + scale ** 2                   {a} * (2.0 if {n} > 3 else 3.0)
    {a} * (scale if scale > 2 else 0.5)  torch.add({a}, {b}, alpha=1 / {n})  {a}.clamp(-scale, scale)           {a} * abs(-scale) + round(scale)   torch.arange(0, {n}, 2) * scale
    {a} * torch.full((), 3.0).item()    {v} = torch.ones((), dtype=F32); {v} += 2; {v} = {a} * {v}.item()     {a} * torch.tensor([1.0, {n}])[1]  {a} * torch.tensor(1 + 2j).conj().imag.item()
"""
# What the program computes, as a number: eager where gradients come back through the call.
ITEM = """
    {a} * {a}.mean().item()             {a} - {a}.amax().item()            {a} + ({b}.sum() * 0.5).item()     {a} * (torch.tensor(scale, dtype=F32) * 2).item()
"""
LINALG = """
    torch.linalg.inv({a} @ {a}.mT + torch.eye({a}.shape[-2], dtype={a}.dtype))                               torch.linalg.cholesky({a} @ {a}.mT + torch.eye({a}.shape[-2], dtype={a}.dtype))
    torch.linalg.solve({a} @ {a}.mT + torch.eye({a}.shape[-2], dtype={a}.dtype), {a})                        torch.linalg.det({a} @ {a}.mT)     torch.linalg.slogdet({a} @ {a}.mT + 1)[0]
    torch.linalg.eigvalsh({a} @ {a}.mT) torch.linalg.svdvals({a})          torch.linalg.qr({a})[1].abs()      torch.linalg.matrix_power({a} @ {a}.mT, 2)
    torch.linalg.norm({a})              torch.linalg.matrix_norm({a}, 1)   torch.trace({a}[..., :2, :2])      torch.linalg.multi_dot([{a}, {a}.mT, {a}])
    torch.linalg.cross({a}[..., :3], {a}[..., :3])                         torch.linalg.lu_factor({a} @ {a}.mT + torch.eye({a}.shape[-2], dtype={a}.dtype))[0]
    torch.cholesky_inverse(torch.linalg.cholesky({a} @ {a}.mT + torch.eye({a}.shape[-2], dtype={a}.dtype)))  torch.linalg.solve_triangular(torch.tril({a} @ {a}.mT) + 3 * torch.eye({a}.shape[-2], dtype={a}.dtype), {a}, upper=False)
"""
# What raises, mostly only when it runs: after writes that stay, and also where nobody uses the result.
ERROR = """
    {a}[torch.tensor([99])]             torch.multinomial(-torch.ones(3), 1)                                 torch.gather({a}, 0, torch.full({a}.shape, 77))
    torch.ones(3, dtype=torch.int64) // torch.zeros(3, dtype=torch.int64)  torch.index_select({a}, 0, index + 99)                                torch.linalg.cholesky(-torch.eye(3))
    F.embedding(index + 99, {a})        torch.linalg.inv(torch.zeros(2, 2))                                  F.one_hot(index - 9, 3)            {a}.view(7777)
    torch.zeros(3).scatter_(0, torch.tensor([5]), 1.0)                     {a} @ torch.zeros(77, 2, dtype={a}.dtype)                             {a}.squeeze(0)[99]
    torch.bincount(torch.tensor([-1]))  ({a}[torch.tensor([99])], 1)[1] + {a}                                (torch.ones(2, dtype=torch.int32) % torch.zeros(2, dtype=torch.int32))[:0]
    F.nll_loss(torch.zeros(2, 3), torch.tensor([0, 7]))                    torch.bernoulli(torch.full((2,), 3.0))                                torch.zeros_like({a}).index_add(0, torch.tensor([44]), {a}[:1])
    torch.normal({a}, -1.0)             torch.repeat_interleave({a}, torch.tensor([-1]), 0)                  {a}.add_(torch.ones(3, 1, 5, 7))   torch.logsumexp({a}, ())
    {a}.half().clamp(min=1e30)          torch.linalg.solve(torch.zeros(2, 2), torch.ones(2))                 int({a}.sum()) and {a}.foo         torch.take({a}, torch.tensor([10**6]))
"""


def rank(*allowed):
    return lambda t: t.dim() in allowed


def floating(t):
    return t.is_floating_point()


def has_heads(t):
    """Eager's attention divides by their number, and the process ends."""
    return t.dim() != 4 or t.shape[1] > 0


def both(*wants):
    return lambda t: all(w(t) for w in wants)


def lines(text):
    """Templates are two spaces apart."""
    return [part.strip() for part in text.replace("\n", "  ").split("  ") if part.strip()]


ANY, MATRIX = (lambda t: True), lambda t: t.dim() >= 2
FAMILIES = {  # family: its templates, the tensors it wants
    "elementwise": (lines(ELEMENTWISE), lambda t: not t.is_complex()), "binary": (lines(BINARY), lambda t: not t.is_complex()),
    "product": (lines(PRODUCT), floating), "reduce": (lines(REDUCE), ANY), "view": (lines(VIEW), ANY), "strided": (lines(STRIDED), ANY),
    "bits": (lines(BITS), lambda t: t.dtype is torch.float32), "window": (lines(WINDOW), MATRIX), "write": (lines(WRITE), ANY), "many": (lines(MANY), ANY),
    "whole": (lines(WHOLE), lambda t: not t.is_floating_point() and not t.is_complex()), "complex": (lines(COMPLEX), torch.is_complex),
    "fourier": (lines(FOURIER), both(floating, lambda t: t.dtype.itemsize >= 4)), "random": (lines(RANDOM), floating), "mask": (lines(MASK), lambda t: not t.is_complex()),
    "out": (lines(OUT), floating), "foreach": (lines(FOREACH), floating), "custom": (lines(CUSTOM), floating), "number": (lines(NUMBER), floating), "item": (lines(ITEM), floating), "linalg": (lines(LINALG), both(floating, MATRIX)), "error": (lines(ERROR), ANY),
}
WRITES = {"write", "foreach", "out"}  # families of statements that may write to a value: what they read must not overlap it in part
