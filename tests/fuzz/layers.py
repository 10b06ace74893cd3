"""Lines of networks: layers that the module owns, and functions of networks. As in families.py; a pair is a layer and what is done with it as {m}.

EVENTS change a module between two calls: whatever the engine keeps of its weights is stale then."""
from __future__ import annotations

from families import both, floating, has_heads, rank

CONVOLUTION = [
    ("nn.Conv1d({C}, 4, 3, padding=1)", "{m}({a})"), ("nn.Conv1d({C}, {C}, 2, groups={C})", "{m}({a})"), ("nn.ConvTranspose1d({C}, 3, 2, stride=2)", "{m}({a})"),
    ("nn.Conv2d({C}, 6, 3, padding=1)", "{m}({a})"), ("nn.Conv2d({C}, 8, 1)", "{m}({a})"), ("nn.Conv2d({C}, {C}, 1)", "{a} + {m}({a})"), ("nn.Conv2d({C}, {C}, 3, padding=1)", "{m}({a}) + {a}"),
    ("nn.Conv2d({C}, {C}, 3, padding=1, groups={C})", "{m}({a})"), ("nn.Conv2d({C}, 4, 3, stride=2, padding=1)", "torch.relu({m}({a}))"), ("nn.Conv2d({C}, 4, 2, dilation=2, bias=False)", "{m}({a})"),
    ("nn.Conv2d({C}, 5, (1, 3), padding=\"same\")", "F.silu({m}({a}))"), ("nn.Conv2d({C}, 4, 3, padding=1, padding_mode=\"reflect\")", "{m}({a})"), ("nn.ConvTranspose2d({C}, 4, 2, stride=2)", "{m}({a})"),
    ("nn.ConvTranspose2d({C}, 3, 3, stride=2, padding=1, output_padding=1, dilation=1)", "{m}({a})"), ("nn.Conv2d({C}, 16, 3, padding=1).to(memory_format=torch.channels_last)", "{m}({a})"),
    ("nn.Conv2d({C}, 16, 3, padding=1).requires_grad_(False)", "{m}({a}).tanh()"), ("nn.Conv2d({C}, 4, 3, padding=1)", "{m}({a}.contiguous(memory_format=torch.channels_last))"),
    ("nn.Conv3d({C}, 4, 2)", "{m}({a})"), ("nn.ConvTranspose3d({C}, 2, 2)", "{m}({a})"), ("nn.Conv2d({C}, 6, 1)", "F.pad({m}({a}), (2, 2, 2, 2))"), ("nn.Conv2d({C}, 6, 1)", "F.pad({m}({a}), (1, 1, 1, 1)).as_strided((2, 3), (3, 1), 1)"),
    ("nn.Conv2d({C}, {C}, 1)", "{m}({a}.mean((2, 3), keepdim=True)) * {a}"), ("nn.Conv2d({C}, {C}, 1)", "{a}[:, :, :1, :1] + {m}({a}[:, :, :1, :1])"),
    ("nn.Conv2d({C}, 8, 2, stride=2)", "{m}({a}).flatten(2).transpose(1, 2)"), ("nn.Conv2d({C}, 4, 3, padding=1)", "{m}({a}).view(torch.int32) if F32 is torch.float32 else {m}({a})"),
]
NORMS_BETWEEN = ["nn.BatchNorm2d(8)", "nn.GroupNorm(2, 8)", "nn.GroupNorm(8, 8)", "nn.InstanceNorm2d(8, affine=True)", "nn.BatchNorm2d(8, track_running_stats=False)", "nn.GroupNorm(4, 8, affine=False)"]
FROZEN = ["", ', "1.weight"', ', "1.bias"', ', "1.weight", "1.bias"', ', "0.weight"', ', "3.weight"']
AROUND = [  # the first convolution, what stands between norm and second, the second
    ("3, padding=1, bias=False", "nn.ReLU()", "nn.Conv2d(8, {C}, 3, padding=1)"), ("1, bias=False", "nn.Identity()", "nn.Conv2d(8, {C}, 1)"), ("3, padding=1, bias=False", "nn.SiLU(inplace=True)", "nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4)"),
    ("2, bias=False", "nn.PReLU(8)", "nn.ConvTranspose2d(8, 4, 2, stride=2)"), ("3, padding=1, bias=False", "nn.MaxPool2d(2, ceil_mode=True)", "nn.Conv2d(8, 8, 1)"), ("1, bias=False", "nn.GLU(1)", "nn.Conv2d(4, 4, 3, padding=1)"),
    ("1, bias=False", "nn.PixelShuffle(2)", "nn.Conv2d(2, 4, 3, padding=1)"),
]
# The layout pass chooses how memory between two convolutions lies, and each subset of what the norm learns may be frozen. A bias before a norm would have a
# gradient of nothing but roundings.
CHAIN = [(f"held(nn.Sequential(nn.Conv2d({{C}}, 8, {first}), {norm}, {between}, {last}){frozen})", use)
         for norm in NORMS_BETWEEN for frozen in FROZEN for (first, between, last), use in zip(AROUND, ["{m}({a}) + {a}", "{a} + {m}({a})", "F.relu({m}({a}))", "{m}({a})", "F.interpolate({m}({a}), scale_factor=2)", "{m}({a}).mean((2, 3), keepdim=True)", "{m}({a})"])]
POOLING = """
    F.max_pool2d({a}, 2)                F.max_pool2d({a}, 3, 2, 1)         F.avg_pool2d({a}, 2)               F.adaptive_avg_pool2d({a}, 1)
    F.adaptive_avg_pool2d({a}, (3, 2))  F.adaptive_max_pool2d({a}, 2)      F.max_pool2d({a}, 2, return_indices=True)[1]                          F.lp_pool2d({a}.abs() + 0.1, 2, 2)
    F.avg_pool2d({a}, 3, 1, 1, count_include_pad=False)                    F.avg_pool1d({a}, 2)               F.max_pool1d({a}, 2)               F.max_pool3d({a}, 2)
    F.avg_pool3d({a}, 2)                F.interpolate({a}, scale_factor=2)                                    F.interpolate({a}, size=(5, 4), mode="bilinear", align_corners=False)
    F.interpolate({a}, scale_factor=2, mode="bicubic")                     F.pad({a}, (1, 1, 1, 1), mode="reflect")                              F.pad({a}, (1, 1, 1, 1), mode="replicate")
    F.grid_sample({a}, torch.zeros({a}.shape[0], 2, 3, 2, dtype={a}.dtype), align_corners=False)             F.pixel_shuffle({a}.repeat(1, 4, 1, 1), 2)
    F.max_unpool2d(*F.max_pool2d({a}, 2, return_indices=True), 2)          F.local_response_norm({a}, 2)      F.fold(F.unfold({a}, 2), {a}.shape[-2:], 2)
"""
NORM = [
    ("nn.BatchNorm2d({C})", "{m}({a})"), ("nn.BatchNorm2d({C}, momentum=None)", "torch.relu({m}({a}))"), ("nn.BatchNorm1d({C})", "{m}({a})"), ("nn.BatchNorm2d({C}, track_running_stats=False)", "{m}({a})"),
    ("nn.GroupNorm(1, {C})", "{m}({a})"), ("nn.GroupNorm({C}, {C})", "F.silu({m}({a}))"), ("nn.InstanceNorm2d({C}, affine=True)", "{m}({a})"), ("nn.InstanceNorm1d({C}, track_running_stats=True)", "{m}({a})"),
    ("nn.LayerNorm({n})", "{m}({a})"), ("nn.LayerNorm({n}, elementwise_affine=False)", "{m}({a}) + {a}"), ("nn.RMSNorm({n})", "{m}({a})"), ("nn.BatchNorm3d({C})", "{m}({a})"),
    ("nn.LayerNorm({n})", "F.gelu({m}({a}))"), (None, "F.layer_norm({a}, {a}.shape[-1:])"), (None, "F.normalize({a}, dim={d})"), (None, "F.group_norm({a}, 1)"), (None, "F.batch_norm({a}, None, None, training=True)"),
    (None, "F.instance_norm({a})"), (None, "F.rms_norm({a}, {a}.shape[-1:])"), (None, "torch.native_layer_norm({a}, {a}.shape[-1:], None, None, 1e-5)[2]"),
]
LINEAR = [
    ("nn.Linear({n}, 8)", "{m}({a})"), ("nn.Linear({n}, {n})", "{m}({a}) + {a}"), ("nn.Linear({n}, 4, bias=False)", "F.gelu({m}({a}))"), ("nn.Linear({n}, 64)", "torch.relu({m}({a}))"),
    ("nn.Sequential(nn.Linear({n}, 32), nn.ReLU(), nn.Linear(32, {n}))", "{a} + {m}({a})"), ("nn.Bilinear({n}, {n}, 3)", "{m}({a}, {a})"), ("nn.Linear({n}, 4).requires_grad_(False)", "{m}({a})"),
    ("nn.utils.parametrizations.weight_norm(nn.Linear({n}, 5))", "{m}({a})"), ("nn.utils.parametrizations.spectral_norm(nn.Linear({n}, 5))", "{m}({a})"), ("nn.PReLU()", "{m}({a})"),
    ("nn.Sequential(nn.Linear({n}, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))", "{m}({a})"),
]
ATTENTION = [
    (None, "F.scaled_dot_product_attention({a}, {a}, {a})"), (None, "F.scaled_dot_product_attention({a}, {a}, {a}, is_causal=True)"), (None, "F.scaled_dot_product_attention({a}, {b}, {b})"),
    (None, "F.scaled_dot_product_attention({a}, {a}, {a}, attn_mask=torch.ones({a}.shape[-2], {a}.shape[-2], dtype=torch.bool).tril(), scale=0.3)"),
    (None, "F.scaled_dot_product_attention({a}, {a}, {a}, attn_mask=torch.zeros({a}.shape[-2], {a}.shape[-2], dtype={a}.dtype).index_fill(1, index.clamp(max={a}.shape[-2] - 1), -torch.inf))"),
    (None, "F.scaled_dot_product_attention({a}, {a}, {a}, attn_mask={a}.sum(-1).unsqueeze(-2) > 0)"), (None, "torch.softmax({a} @ {a}.mT * 0.3, -1) @ {a}"),
    (None, "(({a} @ {a}.mT).masked_fill(torch.ones({a}.shape[-2], {a}.shape[-2]).triu(1) > 0, -torch.inf)).softmax(-1) @ {a}"),
    ("nn.MultiheadAttention({n}, 1, batch_first=True)", "{m}({a}, {a}, {a}, need_weights=False)[0]"), ("nn.MultiheadAttention({n}, 1)", "{m}({a}, {a}, {a})[1]"), ("nn.MultiheadAttention({n}, 1)", "{m}({a}, {a}, {a})[0]"),
    ("nn.TransformerEncoderLayer({n}, 1, 16, batch_first=True)", "{m}({a})"), ("nn.TransformerEncoderLayer({n}, 1, 16, dropout=0.0, norm_first=True)", "{m}({a})"),
    ("nn.Linear({n}, 3 * {n})", "F.scaled_dot_product_attention(*{m}({a}).chunk(3, -1))"), ("nn.Conv2d({C}, 6, 3, padding=1)", "F.scaled_dot_product_attention(*{m}({a}).chunk(3, 1))"),
    ("nn.Conv2d({C}, 8, 1)", "F.scaled_dot_product_attention({m}({a})[:, :3], {m}({a})[:, 1:4], {m}({a})[:, -3:])"), (None, "F.scaled_dot_product_attention({a}[:, 1:], {a}[:, :-1], {a}[:, 1:])"),
    ("nn.Conv1d({C}, 6, 3, padding=1)", "F.scaled_dot_product_attention(*{m}({a}).transpose(1, 2).chunk(3, -1))"), (None, "F.scaled_dot_product_attention(*[{a}.transpose(1, 2)[:, :2]] * 3)"),
]
RECURRENT = [("nn.GRU({n}, 4, batch_first=True)", "{m}({a})[0]"), ("nn.LSTM({n}, 3)", "{m}({a})[1][0]"), ("nn.RNN({n}, 3)", "{m}({a})[0]"), ("nn.GRUCell({n}, 4)", "{m}({a})")]
EMBEDDING = [("nn.Embedding(40, 6)", "{m}(index)"), ("nn.Embedding(40, 6, padding_idx=0)", "{m}(index) * 2"), ("nn.EmbeddingBag(40, 5, mode=\"mean\")", "{m}(index, torch.tensor([0]))"), ("nn.EmbeddingBag(40, 5)", "{m}(index.view(1, -1))"),
             ("nn.Embedding(40, 4, max_norm=1.0)", "{m}(index)"), (None, "F.embedding(index.clamp(max={a}.shape[0] - 1), {a})"), ("nn.Embedding(40, 8)", "{m}(index)[:, None] + {m}(index.flip(0))")]
LOSS = """
    F.mse_loss({a}, {b})                F.l1_loss({a}, {b}.to({a}.dtype), reduction="none")                   F.smooth_l1_loss({a}, {b})         F.huber_loss({a}, {b}, reduction="sum")
    F.cross_entropy({a}, {a}.detach().argmax(1))                           F.cross_entropy({a}, {a}.detach().argmin(1), label_smoothing=0.1)     F.cross_entropy({a}, torch.softmax({b}, 1))
    F.nll_loss(F.log_softmax({a}, 1), {a}.detach().argmin(1), reduction="none")                              F.binary_cross_entropy_with_logits({a}, torch.sigmoid({b}))
    F.binary_cross_entropy(torch.sigmoid({a}), torch.sigmoid({a}.detach()))                                  F.kl_div(F.log_softmax({a}, -1), torch.softmax({b}, -1), reduction="batchmean")
    F.cosine_similarity({a}, {b}, dim={d})                                 F.hinge_embedding_loss({a}, torch.sign({a}.detach()))                 F.soft_margin_loss({a}, torch.sign({a}.detach()))
    F.gaussian_nll_loss({a}, {b}, torch.abs({a}) + 1)                      F.poisson_nll_loss({a}, torch.abs({b}))                               F.triplet_margin_loss({a}, {b}, {a} * 2)
    F.margin_ranking_loss({a}, {b}, torch.sign({a}.detach()))              F.multi_margin_loss({a}, {a}.detach().argmax(1))                      F.pairwise_distance({a}, {b})
    F.ctc_loss(F.log_softmax(torch.zeros(6, 1, 5, dtype={a}.dtype) + {a}.mean(), -1), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]))          F.glu({a}.repeat_interleave(2, {d}), {d})
"""
AUTOCAST = [
    ("nn.Linear({n}, 8)", "with torch.autocast(\"cpu\", BF16): {v} = {m}({a}).relu()"), (None, "with torch.autocast(\"cpu\", BF16): {v} = {a} @ {a}.mT"), ("nn.Conv2d({C}, 4, 3)", "with torch.autocast(\"cpu\", BF16): {v} = {m}({a})"),
    (None, "with torch.autocast(\"cpu\", BF16): {v} = F.scaled_dot_product_attention({a}, {a}, {a}).float()"), (None, "with torch.autocast(\"cpu\", F16): {v} = ({a} @ {a}.mT).softmax(-1)"),
]
STATE = [  # {m}: a buffer
    ("torch.zeros(())", "{m}.add_(1); {v} = {a} * {m}"), ("torch.zeros(4)", "{v} = {a} * {m}.exp().sum(); {m}.add_({a}.detach().mean())"), ("torch.ones({n})", "{v} = {a} * {m}; {m}.mul_(0.9).add_({a}.detach().mean(), alpha=0.1)"),
    ("torch.zeros((), dtype=torch.int64)", "{m} += 1; {v} = {a} / {m}"), ("torch.zeros({n})", "{m}.copy_({a}.detach().reshape(-1, {n})[0]); {v} = {a} + {m}"), ("torch.zeros(5, {n})", "{m}[index[:1] % 5] = 1.0; {v} = {m} * 2"),
    ("torch.ones(3)", "{m}.data.mul_(2); {v} = {a} * {m}.sum()"),
]


def lines_of(text):
    from families import lines
    return [(None, template) for template in lines(text)]


FAMILIES = {
    "chain": (CHAIN, both(floating, rank(4))), "convolution": (CONVOLUTION, both(floating, rank(3, 4, 5))), "pooling": (lines_of(POOLING), both(floating, rank(3, 4, 5))), "norm": (NORM, both(floating, rank(2, 3, 4, 5))),
    "linear": (LINEAR, both(floating, rank(1, 2, 3, 4))), "attention": (ATTENTION, both(floating, rank(2, 3, 4), has_heads)), "recurrent": (RECURRENT, both(floating, rank(2, 3))),
    "embedding": (EMBEDDING, both(floating, rank(2))), "loss": (lines_of(LOSS), floating), "autocast": (AUTOCAST, both(floating, rank(2, 3, 4), has_heads)), "state": (STATE, floating),
}
BUFFERS = {"state"}  # families whose layer is a buffer

# Between two calls: {p} is a parameter or float buffer of the net.
EVENTS = [
    "{p}.data[0] = 3.0", "{p}.data[..., -1] = -2.0", "{p}.detach().numpy()[...] *= 0.5", "with torch.no_grad(): {p}.mul_(1.5)", "with torch.no_grad(): {p}.copy_(torch.ones_like({p}))", "{p}.data = {p}.data * 2",
    "net.load_state_dict({{k: v * 0.5 if v.is_floating_point() else v for k, v in net.state_dict().items()}})", "{p}.data = {p}.data.clone(memory_format=torch.contiguous_format) + 0.25", "with torch.no_grad(): {p}.view(-1)[0] = 7.0",
    "{p}.data.view(-1)[-1:].fill_(float('inf'))", "torch.optim.SGD([{p}], lr=0.1).zero_grad(); {p}.data.add_(0.5)", "{p}.requires_grad_(False)", "net.to(F64)", "torch.from_dlpack({p}.detach()).add_(1.0)",
    "net.zero_grad()", "net.train()", "net.eval()", "vector = nn.utils.parameters_to_vector(net.parameters()); nn.utils.vector_to_parameters(vector * 0.9, net.parameters())",
]
