"""Networks of the zoo as things to train: a loss for each, from labels where the library takes them."""
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
import zoo  # noqa: E402

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
# Batch norm over a single value (1x1 images of a batch of one), where eager raises or the result is all rounding; side: pixels that give it more.
SIZES = {"torchvision/densenet121": (2, 64), "torchvision/googlenet": (2, 96), "torchvision/inception_v3": (2, 299), "torchvision/efficientnet_b0": (2, 96), "torchvision/vgg11_bn": (2, 64),
         "torchvision/wide_resnet50_2": (2, 64), "torchvision/shufflenet_v2_x0_5": (2, 96), "torchvision/fcn_resnet50": (2, 64), "torchvision/mnasnet0_5": (2, 96),
         "timm/efficientnet_lite0": (2, 96), "timm/ghostnet_100": (2, 96), "timm/res2net50_14w_8s": (4, 96), "timm/repvgg_a0": (2, 96), "timm/levit_128s": (2, 224), "timm/mobilevit_xxs": (2, 96), "timm/xcit_nano_12_p16_224": (2, 224)}


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
