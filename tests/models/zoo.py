"""Unmodified networks from four libraries, small enough for a test: name -> Entry. Random weights, small inputs or small configurations."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch


@dataclass(frozen=True)
class Entry:
    name: str
    build: Callable[[], tuple]  # -> (module, args, kwargs)
    quick: bool = False
    eagerly: str | None = None  # runs eagerly, with a warning that says this; the rest must run native kernels


ZOO: dict[str, Entry] = {}


def add(name, make, quick=False, eagerly=None):
    def build():
        module, args, kwargs = make()
        with torch.no_grad():  # heads that start at zero would hide every error before them
            for parameter in module.parameters():
                if parameter.is_floating_point() and not parameter.any():
                    parameter.normal_(0, 0.02)
        return module.eval(), args, kwargs
    assert name not in ZOO
    ZOO[name] = Entry(name, build, quick, eagerly)


def image(side=64, batch=2, channels=3):
    return torch.randn(batch, channels, side, side)


# ---- torchvision ------------------------------------------------------------------------------------------------------------------------
def vision(name, side=64, batch=2, quick=False, **kwargs):
    def build():
        import torchvision
        return torchvision.models.get_model(name, weights=None, **kwargs), (image(side, batch),), {}
    add(f"torchvision/{name}", build, quick)


vision("resnet18", quick=True)
vision("resnext50_32x4d")
vision("wide_resnet50_2", batch=1)
vision("alexnet", side=96)
vision("vgg11_bn", batch=1)
vision("squeezenet1_1")
vision("densenet121", batch=1)
vision("googlenet", side=96, batch=1, init_weights=False)
vision("inception_v3", side=96, batch=1, init_weights=False)
vision("mobilenet_v2")
vision("mobilenet_v3_small", quick=True)
vision("shufflenet_v2_x0_5")
vision("mnasnet0_5")
vision("efficientnet_b0", batch=1)
vision("regnet_y_400mf")
vision("convnext_tiny", batch=1)
vision("vit_b_32", side=64, batch=1, image_size=64)
vision("swin_t", batch=1)
vision("swin_v2_t", side=64, batch=1)
vision("maxvit_t", side=224, batch=1)
vision("fcn_resnet50", side=64, batch=1, weights_backbone=None)
vision("deeplabv3_mobilenet_v3_large", side=64, weights_backbone=None)


def _video():
    import torchvision
    return torchvision.models.get_model("r3d_18", weights=None), (torch.randn(1, 3, 4, 32, 32),), {}


add("torchvision/r3d_18", _video)


# ---- timm -------------------------------------------------------------------------------------------------------------------------------
def timm_model(name, side=64, batch=1, quick=False, **kwargs):
    def build():
        import timm
        return timm.create_model(name, **kwargs), (image(side, batch),), {}
    add(f"timm/{name}", build, quick)


timm_model("vit_tiny_patch16_224", side=224, quick=True)
timm_model("deit_tiny_distilled_patch16_224", side=224)
timm_model("mixer_s32_224", side=224)
timm_model("resmlp_12_224", side=224)
timm_model("gmlp_s16_224", side=224)
timm_model("convnextv2_atto", quick=True)
timm_model("efficientnet_lite0")
timm_model("ghostnet_100")
timm_model("levit_128s", side=224)
timm_model("edgenext_xx_small")
timm_model("poolformer_s12")
timm_model("repvgg_a0")
timm_model("res2net50_14w_8s")
timm_model("nfnet_l0")
timm_model("eva02_tiny_patch14_224", side=224)
timm_model("xcit_nano_12_p16_224", side=224)
timm_model("mobilevit_xxs")


# ---- transformers -----------------------------------------------------------------------------------------------------------------------
SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=1000)


def text(name, model, config, quick=False, inputs=None, eagerly=None, **small):
    def build():
        import transformers
        cfg = getattr(transformers, config)(**small)
        cfg.use_cache = False
        ids = torch.randint(3, 900, (2, 12))
        return getattr(transformers, model)(cfg), (), inputs() if inputs else {"input_ids": ids}
    add(f"transformers/{name}", build, quick, eagerly=eagerly)


def masked():
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return {"input_ids": torch.randint(3, 900, (2, 12)), "attention_mask": mask}


text("bert", "BertForSequenceClassification", "BertConfig", quick=True, **SMALL)
text("bert_masked", "BertForMaskedLM", "BertConfig", inputs=masked, **SMALL)
text("roberta", "RobertaForTokenClassification", "RobertaConfig", **SMALL)
text("distilbert", "DistilBertForQuestionAnswering", "DistilBertConfig", dim=64, n_layers=2, n_heads=4, hidden_dim=128, vocab_size=1000)
text("albert", "AlbertForMaskedLM", "AlbertConfig", embedding_size=32, **SMALL)
text("electra", "ElectraForPreTraining", "ElectraConfig", embedding_size=32, **SMALL)
text("deberta_v2", "DebertaV2ForSequenceClassification", "DebertaV2Config", relative_attention=True, position_buckets=16, pos_att_type=["p2c", "c2p"],
     eagerly="neither an argument nor reachable", **SMALL)  # made inside a TorchScript function
text("mpnet", "MPNetForMaskedLM", "MPNetConfig", **SMALL)
text("gpt2", "GPT2LMHeadModel", "GPT2Config", quick=True, n_layer=2, n_embd=64, n_head=4, vocab_size=1000)
text("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", **SMALL)
text("opt", "OPTForCausalLM", "OPTConfig", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128, vocab_size=1000, word_embed_proj_dim=64)
text("bloom", "BloomForCausalLM", "BloomConfig", hidden_size=64, n_layer=2, n_head=4, vocab_size=1000)
text("llama", "LlamaForCausalLM", "LlamaConfig", quick=True, num_key_value_heads=2, **SMALL)
text("llama_masked", "LlamaForCausalLM", "LlamaConfig", inputs=masked, num_key_value_heads=2, **SMALL)
text("mistral", "MistralForCausalLM", "MistralConfig", num_key_value_heads=2, sliding_window=8, **SMALL)
text("qwen2", "Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2, **SMALL)
text("qwen3", "Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=16, **SMALL)
text("gemma", "GemmaForCausalLM", "GemmaConfig", num_key_value_heads=2, head_dim=16, **SMALL)
text("phi", "PhiForCausalLM", "PhiConfig", **SMALL)
text("mixtral", "MixtralForCausalLM", "MixtralConfig", num_key_value_heads=2, num_local_experts=4, experts_implementation="eager", **SMALL)  # the grouped matmul has no fp64
text("mamba", "MambaForCausalLM", "MambaConfig", hidden_size=64, num_hidden_layers=2, vocab_size=1000, state_size=8)
text("t5", "T5ForConditionalGeneration", "T5Config", d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=1000, decoder_start_token_id=0,
     inputs=lambda: {"input_ids": torch.randint(3, 900, (2, 12)), "decoder_input_ids": torch.randint(3, 900, (2, 6))})
text("bart", "BartForConditionalGeneration", "BartConfig", d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
     encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=1000)
text("vit", "ViTForImageClassification", "ViTConfig", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=64,
     inputs=lambda: {"pixel_values": image(64)})
text("clip", "CLIPModel", "CLIPConfig", inputs=lambda: {"input_ids": torch.randint(3, 900, (2, 12)), "pixel_values": image(64)},
     text_config=dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=1000, eos_token_id=2),
     vision_config=dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=64, patch_size=16))
text("segformer", "SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], inputs=lambda: {"pixel_values": image(64)})
text("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=32,
     conv_dim=(32, 32, 32), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
     inputs=lambda: {"input_values": torch.randn(2, 1600)})
text("whisper_encoder", "WhisperForAudioClassification", "WhisperConfig", d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128,
     decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=128, vocab_size=1000, max_source_positions=50, num_mel_bins=16, pad_token_id=0, bos_token_id=1,
     eos_token_id=2, decoder_start_token_id=1, inputs=lambda: {"input_features": torch.randn(2, 16, 100)})


# ---- PyTorch Geometric ------------------------------------------------------------------------------------------------------------------
def graph(name, quick=False, **kwargs):
    def build():
        import torch_geometric.nn as gnn
        model = getattr(gnn, name)(16, 32, 2, 8, **kwargs)
        return model, (torch.randn(40, 16), torch.randint(0, 40, (2, 200))), {}
    add(f"pyg/{name}", build, quick)


graph("GCN", quick=True)
graph("GraphSAGE", quick=True)
graph("GIN")
graph("GAT", heads=4)
graph("EdgeCNN")


def pyg_layer(name, make, quick=False):
    def build():
        import torch_geometric.nn as gnn
        return make(gnn), (torch.randn(40, 16), torch.randint(0, 40, (2, 200))), {}
    add(f"pyg/{name}", build, quick)


pyg_layer("ChebConv", lambda gnn: gnn.ChebConv(16, 8, K=3))
pyg_layer("GATv2Conv", lambda gnn: gnn.GATv2Conv(16, 8, heads=2))
pyg_layer("TransformerConv", lambda gnn: gnn.TransformerConv(16, 8, heads=2))
pyg_layer("TAGConv", lambda gnn: gnn.TAGConv(16, 8))
pyg_layer("SGConv", lambda gnn: gnn.SGConv(16, 8, K=2))
