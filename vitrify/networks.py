"""The networks that the demo and the benchmark run: public architectures, unmodified, with random weights.

Each entry builds (module, inputs). `size` is "s" for two cores and "l" for a big machine; "xs" keeps the architecture and shrinks it, for tests.
"""
from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Callable

import torch
from torch import nn


@dataclass(frozen=True)
class Network:
    name: str
    title: str
    needs: str  # the package that it comes from, or ""
    build: Callable[[str], tuple[nn.Module, tuple]]

    def missing(self) -> bool:
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None


NETWORKS: dict[str, Network] = {}


def network(name: str, title: str, needs: str = ""):
    def add(build):
        NETWORKS[name] = Network(name, title, needs, build)
        return build
    return add


def _images(size):
    batch, side = {"xs": (1, 64), "s": (4, 224), "l": (64, 224)}[size]
    return torch.randn(batch, 3, side, side)


@network("resnet18", "ResNet-18", "torchvision")
def _resnet18(size):
    import torchvision
    return torchvision.models.resnet18(), (_images(size),)


@network("resnet50", "ResNet-50", "torchvision")
def _resnet50(size):
    import torchvision
    return torchvision.models.resnet50(), (_images(size),)


@network("vit_s", "ViT-S/16", "timm")
def _vit_s(size):
    import timm
    batch = {"xs": 1, "s": 4, "l": 64}[size]
    return timm.create_model("vit_small_patch16_224"), (torch.randn(batch, 3, 224, 224),)


@network("bert", "BERT-base", "transformers")
def _bert(size):
    from transformers import BertConfig, BertForSequenceClassification
    config = BertConfig(num_hidden_layers=2, hidden_size=128, num_attention_heads=4, intermediate_size=256) if size == "xs" else BertConfig()
    batch, length = {"xs": (2, 16), "s": (2, 128), "l": (32, 128)}[size]
    return BertForSequenceClassification(config), (torch.randint(0, 30000, (batch, length)),)


@network("gpt2", "GPT-2", "transformers")
def _gpt2(size):
    from transformers import GPT2Config, GPT2LMHeadModel
    small = dict(n_layer=2, n_embd=128, n_head=4) if size == "xs" else {}
    batch, length = {"xs": (1, 16), "s": (1, 128), "l": (8, 512)}[size]
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **small)), (torch.randint(0, 50000, (batch, length)),)


@network("llama", "Llama, small", "transformers")
def _llama(size):
    from transformers import LlamaConfig, LlamaForCausalLM
    hidden, inner, layers, heads, kv = {"xs": (128, 256, 2, 4, 2), "s": (512, 1376, 8, 8, 4), "l": (2048, 5632, 16, 32, 8)}[size]
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv, vocab_size=32000, use_cache=False)
    batch, length = {"xs": (1, 16), "s": (1, 128), "l": (4, 512)}[size]
    return LlamaForCausalLM(config), (torch.randint(0, 32000, (batch, length)),)


def _graph(size):
    nodes, edges = {"xs": (50, 300), "s": (2000, 20000), "l": (20000, 400000)}[size]
    return torch.randn(nodes, 64), torch.randint(0, nodes, (2, edges))


@network("sage", "GraphSAGE", "torch_geometric")
def _sage(size):
    from torch_geometric.nn import GraphSAGE
    return GraphSAGE(64, 128, 3, 40), _graph(size)


@network("gat", "GAT", "torch_geometric")
def _gat(size):
    from torch_geometric.nn import GAT
    return GAT(64, 128, 3, 40, heads=4), _graph(size)


class ActorCritic(nn.Module):
    """A policy of the size that PPO trains: a call costs more than its arithmetic."""

    def __init__(self):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6))
        self.value = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_std = nn.Parameter(torch.zeros(6))

    def forward(self, state, action):
        mean, std = self.policy(state), self.log_std.exp()
        log_prob = -0.5 * (((action - mean) / std) ** 2 + 2 * self.log_std + 1.8378770664093453).sum(-1)
        return log_prob, self.value(state)


@network("actor_critic", "Actor-critic MLP")
def _actor_critic(size):
    batch = {"xs": 8, "s": 64, "l": 64}[size]
    return ActorCritic(), (torch.randn(batch, 17), torch.randn(batch, 6))


class NormChain(nn.Module):
    """Bound by memory: residual, LayerNorm, bias, GELU, softmax."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x, residual):
        y = nn.functional.gelu(self.norm(x + residual) + self.bias)
        return torch.softmax(y * 0.5 + x, -1)


@network("norms", "Norm, GELU, softmax")
def _norms(size):
    rows, width = {"xs": (16, 64), "s": (2048, 1024), "l": (65536, 2048)}[size]
    return NormChain(width), (torch.randn(rows, width), torch.randn(rows, width))


def _classes(out):
    """Cross-entropy with the class that each row would be given if its number decided: always the same, and no row's own choice."""
    return nn.functional.cross_entropy(out, torch.arange(len(out), device=out.device) % out.shape[-1])


def _next_token(out, ids):
    logits = out.logits[:, :-1]
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


_LOSSES = {"bert": lambda out, *_: _classes(out.logits), "gpt2": _next_token, "llama": _next_token,
           "actor_critic": lambda out, *_: out[1].square().mean() - out[0].mean(), "norms": lambda out, *_: out.square().sum(-1).mean()}


def loss(name: str, out, inputs):
    """The loss that the demo trains a network with."""
    return _LOSSES[name](out, *inputs) if name in _LOSSES else _classes(out)


def build(name: str, size: str = "s", seed: int = 0):
    """(module in eval mode, inputs), the same for the same seed."""
    torch.manual_seed(seed)
    module, inputs = NETWORKS[name].build(size)
    return module.eval(), inputs
