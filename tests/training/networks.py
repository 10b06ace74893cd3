"""Networks to train: those of the zoo with a loss for each, from labels where the library takes them; a diffusion network; actor and critic."""
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
import zoo  # noqa: E402

PACKAGE = {"torchvision": "torchvision", "timm": "timm", "transformers": "transformers", "pyg": "torch_geometric"}
# name -> labels that the model makes its own loss of
LABELS = {
    "bert": lambda: torch.tensor([0, 1]), "bert_masked": lambda: torch.randint(0, 1000, (2, 12)), "roberta": lambda: torch.randint(0, 2, (2, 12)),
    "albert": lambda: torch.randint(0, 1000, (2, 12)), "electra": lambda: torch.randint(0, 2, (2, 12)), "mpnet": lambda: torch.randint(0, 1000, (2, 12)),
    "vit": lambda: torch.tensor([0, 1]), "segformer": lambda: torch.randint(0, 2, (2, 64, 64)), "whisper_encoder": lambda: torch.tensor([0, 1]),
    "bart": lambda: torch.randint(3, 900, (2, 12)), "t5": lambda: torch.randint(3, 900, (2, 6)),
    **{name: lambda: torch.randint(0, 1000, (2, 12)) for name in ("gpt2", "gpt_neox", "opt", "bloom", "llama", "llama_masked", "mistral", "qwen2", "qwen3", "gemma", "phi", "mamba")},
}
QUICK = {"torchvision/resnet18", "timm/convnextv2_atto", "transformers/gpt2", "pyg/GCN"}
# What the zoo leaves out for training, because it runs eagerly: a TorchScript function inside; experts chosen by Python code; a loss that reads a value of a tensor;
# layers dropped by Python code that reads a random number.
LEFT_OUT = {"transformers/deberta_v2", "transformers/mixtral", "transformers/wav2vec2", "transformers/opt", "transformers/bart", "transformers/whisper_encoder"}
# Eager's native_batch_norm_backward misreads a gradient of a batch of one whose channels lie closest (xcit).
# Batch norm over a single value (1x1 images of a batch of one), where eager raises or the result is all rounding; side: pixels that give it more. Of two values (levit's
# head) its derivative is the rounding of their difference: gradients of the first step are known to 1e-3, and after twenty no run is near another.
SIZES = {"torchvision/densenet121": (2, 64), "torchvision/googlenet": (4, 96), "torchvision/inception_v3": (2, 299), "torchvision/efficientnet_b0": (2, 96), "torchvision/vgg11_bn": (2, 64),
         "torchvision/wide_resnet50_2": (2, 64), "torchvision/shufflenet_v2_x0_5": (4, 96), "torchvision/fcn_resnet50": (2, 64), "torchvision/mnasnet0_5": (2, 96),
         "timm/efficientnet_lite0": (2, 96), "timm/ghostnet_100": (2, 96), "timm/res2net50_14w_8s": (4, 96), "timm/repvgg_a0": (2, 96), "timm/levit_128s": (8, 224), "timm/mobilevit_xxs": (2, 96), "timm/xcit_nano_12_p16_224": (2, 224)}


def present(entry):
    package = PACKAGE[entry.name.split("/")[0]]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def tensors(value):
    from vitrify import measure
    return [t for t in measure.tensors(value) if t.is_floating_point() and t.requires_grad]


def loss_of(out):
    """The model's own, or a fixed target for everything it gives."""
    if getattr(out, "loss", None) is not None:
        return out.loss
    losses = []
    for i, t in enumerate(tensors(out)):
        target = torch.randn(t.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(t.dtype)
        losses.append(F.mse_loss(t.float() if t.dtype is torch.bfloat16 else t, target.float() if t.dtype is torch.bfloat16 else target))
    return torch.stack([v for v in losses]).sum()


def build(entry):
    """(module in train mode, args, kwargs), the same on every call; nothing drawn by Python code, so that one plan holds."""
    torch.manual_seed(0)
    module, args, kwargs = entry.build()
    family, name = entry.name.split("/")
    if entry.name in SIZES and args:
        batch, side = SIZES[entry.name]
        args = (torch.randn(batch, *args[0].shape[1:2], side, side),)
    if family == "transformers":
        module.config.layerdrop = 0.0
        for m in module.modules():
            for attribute in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
                if isinstance(getattr(m, attribute, None), float):
                    setattr(m, attribute, 0.0)
        if name in ("bert", "vit"):
            module.config.problem_type = "single_label_classification"  # which the first call would write
        if name in LABELS:
            kwargs = {**kwargs, "labels": LABELS[name]()}
    return module.train(), args, kwargs


def without_dropout(module):
    for m in module.modules():
        for attribute in ("p", "dropout", "attention_dropout", "activation_dropout", "drop_prob", "dropout_prob", "hidden_dropout", "resid_dropout", "attn_dropout"):
            if isinstance(getattr(m, attribute, None), float):
                setattr(m, attribute, 0.0)
    return module


# ---- a denoising UNet ---------------------------------------------------------------------------------------------------------------------
class TimeEmbedding(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.register_buffer("frequencies", torch.exp(-torch.arange(features // 2) * 9.2 / (features // 2)), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(features, 4 * features), nn.SiLU(), nn.Linear(4 * features, 4 * features))

    def forward(self, t):
        angles = t[:, None].to(self.frequencies.dtype) * self.frequencies
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))


class Residual(nn.Module):
    def __init__(self, inside, outside, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside)
        self.norm2, self.conv2 = nn.GroupNorm(8, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, channels, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x).reshape(b, c, h * w)).reshape(b, 3 * self.heads, c // self.heads, h * w).transpose(2, 3).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(b, c, h * w)
        return x + self.out(mixed).reshape(b, c, h, w)


class UNet(nn.Module):
    """Two resolutions above the middle, attention at the lowest."""

    def __init__(self, channels=3, width=16):
        super().__init__()
        time, widths = 4 * width, (width, 2 * width, 2 * width)
        self.time, self.first = TimeEmbedding(width), nn.Conv2d(channels, width, 3, padding=1)
        self.down, self.shrink, self.up, self.grow = (nn.ModuleList() for _ in range(4))
        for inside, outside in zip((width, *widths), widths):
            self.down.append(Residual(inside, outside, time))
            self.shrink.append(nn.Conv2d(outside, outside, 3, stride=2, padding=1))
        self.middle1, self.attention, self.middle2 = Residual(widths[-1], widths[-1], time), Attention(widths[-1]), Residual(widths[-1], widths[-1], time)
        for below, outside in zip((widths[-1], *widths[::-1]), widths[::-1]):
            self.grow.append(nn.Conv2d(below, outside, 3, padding=1))
            self.up.append(Residual(2 * outside, outside, time))
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x, t):
        time, x, skips = self.time(t), self.first(x), []
        for block, shrink in zip(self.down, self.shrink):
            x = block(x, time)
            skips.append(x)
            x = shrink(x)
        x = self.middle2(self.attention(self.middle1(x, time)), time)
        for grow, block in zip(self.grow, self.up):
            x = grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return self.last(F.silu(self.norm(x)))


KEPT = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)  # of the image, by time


def noised(images, noise, t):
    kept = KEPT.to(images.dtype)[t][:, None, None, None]
    return kept.sqrt() * images + (1 - kept).sqrt() * noise


def noise_loss(model, batch):
    images, noise, t = batch
    return F.mse_loss(model(noised(images, noise, t), t).to(noise.dtype), noise)


def own_noise_loss(model, images):
    """The same, drawing noise and times itself."""
    t = torch.randint(0, 1000, (images.shape[0],))
    noise = torch.randn_like(images)
    return F.mse_loss(model(noised(images, noise, t), t), noise)


def pictures(count):
    """Discs of random places and colours."""
    g = torch.Generator().manual_seed(count)
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    centers, colours = 1.2 * torch.rand(count, 2, generator=g) - 0.6, torch.rand(count, 3, generator=g)
    inside = ((rows - centers[:, :1, None]) ** 2 + (columns - centers[:, 1:, None]) ** 2 < 0.2).float()
    return 2 * inside[:, None] * colours[:, :, None, None] - 1


# ---- actor and critic ---------------------------------------------------------------------------------------------------------------------
class Agent(nn.Module):
    """Discrete actions by their logits, or continuous ones by mean and deviation. checks: of the arguments of distributions, torch's default unless torch._dynamo was imported."""

    def __init__(self, seen=6, actions=4, continuous=False, checks=True):
        super().__init__()
        self.checks = checks
        self.actor = nn.Sequential(nn.Linear(seen, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, actions))
        self.critic = nn.Sequential(nn.Linear(seen, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.deviation = nn.Parameter(torch.zeros(actions)) if continuous else None

    def policy(self, seen):
        if self.deviation is None:
            return torch.distributions.Categorical(logits=self.actor(seen), validate_args=self.checks)
        return torch.distributions.Independent(torch.distributions.Normal(self.actor(seen), self.deviation.exp(), self.checks), 1, self.checks)

    def forward(self, seen, action):
        policy = self.policy(seen)
        return policy.log_prob(action), policy.entropy(), self.critic(seen).squeeze(-1)


@torch.no_grad()
def rollout(agent, steps=16, environments=8, discount=0.98, smooth=0.95):
    """A game of holding still: an action pushes what is seen about, and reward is how near zero it is. Advantages are generalised estimates."""
    size = agent.actor[0].in_features
    push = 0.3 * torch.randn(agent.actor[-1].out_features, size)
    state, kept = torch.randn(environments, size), []
    for _ in range(steps):
        policy = agent.policy(state)
        action = policy.sample()
        kept.append((state, action, policy.log_prob(action), agent.critic(state).squeeze(-1), -0.1 * state.square().mean(-1)))
        state = 0.98 * state + (push[action] if agent.deviation is None else action @ push)
    seen, action, log_prob, value, reward = (torch.stack(column) for column in zip(*kept))
    after, ahead, advantages = agent.critic(state).squeeze(-1), torch.zeros(environments), []
    for i in reversed(range(steps)):
        ahead = reward[i] + discount * after - value[i] + discount * smooth * ahead
        after = value[i]
        advantages.insert(0, ahead)
    advantage = torch.stack(advantages)
    return [t.flatten(0, 1) for t in (seen, action, log_prob, advantage, advantage + value, value)]


def minibatches(columns, epochs, size):
    return [[c[chosen] for c in columns] for _ in range(epochs) for chosen in torch.randperm(len(columns[0])).split(size)]


def clipped_loss(agent, batch, clip=0.2):
    """Of proximal policy optimisation: the policy's and the value's, both clipped, and an entropy bonus."""
    seen, action, old_log_prob, advantage, target, old_value = batch
    log_prob, entropy, value = agent(seen, action)
    ratio = (log_prob - old_log_prob).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)).mean()
    near = old_value + (value - old_value).clamp(-clip, clip)
    worth = 0.5 * torch.max((value - target) ** 2, (near - target) ** 2).mean()
    return policy + 0.5 * worth - 0.01 * entropy.mean()
