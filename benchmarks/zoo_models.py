"""The models of the zoo: how each is built small, and what it is called with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sliceout.cli.models import make_torchvision_importable

MEMBERS = Path(__file__).with_name("zoo_members.json")
"""timm's models by family, smallest first: ``[[name, parameters], ...]``; written by ``zoo.py choose``."""


make_torchvision_importable()  # timm needs it

# -- timm --------------------------------------------------------------------------------------------------------------


def choose_timm() -> dict[str, list[list[Any]]]:
    """All models of all families by size, counted on the meta device."""
    import timm
    from timm.models import _registry

    families: dict[str, list[list[Any]]] = {}
    for name in timm.list_models():
        try:
            with torch.device("meta"):
                model = timm.create_model(name, pretrained=False)
        except Exception as error:
            print(f"{name} cannot be built: {error}")
            continue
        family = _registry._model_to_module[name]
        families.setdefault(family, []).append([name, sum(p.numel() for p in model.parameters())])
    return {family: sorted(found, key=lambda f: f[1]) for family, found in sorted(families.items())}


def timm_families() -> dict[str, list[str]]:
    """Names by family, smallest first."""
    return {family: [name for name, _ in found] for family, found in json.loads(MEMBERS.read_text()).items()}


def build_timm(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and an input, at the smallest image size that it accepts; two layers deep if it is huge otherwise."""
    import timm

    parameters = dict(pair for found in json.loads(MEMBERS.read_text()).values() for pair in found)
    settings = {"depth": 2} if parameters[name] > 2e8 else {}

    config = timm.get_pretrained_cfg(name)
    channels, full = (config.input_size[0], config.input_size[-1]) if config else (3, 224)
    for size in (64, 96, 128, 160, 192, full):
        model = None
        with contextlib.suppress(Exception):
            model = timm.create_model(name, pretrained=False, img_size=size, **settings)
        if model is None and config is not None and config.fixed_input_size and size != full:
            continue
        model = model if model is not None else timm.create_model(name, pretrained=False, **settings)
        x = torch.randn(2, channels, size, size)
        with contextlib.suppress(Exception), torch.no_grad():
            model.train()(x)
            return model, x
    raise ValueError(f"{name} runs at no image size up to {full}")


def build_timm_on_meta(name: str) -> nn.Module:
    """The model as it is, without memory for its parameters."""
    import timm

    with torch.device("meta"):
        return timm.create_model(name, pretrained=False)


# -- HF ----------------------------------------------------------------------------------------------------------------

_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 128,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GQA = {**_SMALL, "num_key_value_heads": 2}
_MOE = {**_GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
_SEQ2SEQ = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 128}

HF: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**_SMALL, "embedding_size": 32}),
    "bart": ("BartConfig", "BartForConditionalGeneration", _SEQ2SEQ),
    "bert": ("BertConfig", "BertForMaskedLM", _SMALL),
    "big_bird": ("BigBirdConfig", "BigBirdForMaskedLM", {**_SMALL, "attention_type": "original_full"}),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", _SMALL),
    "blenderbot": ("BlenderbotConfig", "BlenderbotForConditionalGeneration", _SEQ2SEQ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**_GPT2, "rotary_dim": 8}),
    "cohere": ("CohereConfig", "CohereForCausalLM", _GQA),
    "convbert": ("ConvBertConfig", "ConvBertForMaskedLM", {**_SMALL, "embedding_size": 64}),
    "deberta": ("DebertaConfig", "DebertaForMaskedLM", _SMALL),
    "deberta-v2": ("DebertaV2Config", "DebertaV2ForMaskedLM", _SMALL),
    "distilbert": (
        "DistilBertConfig", "DistilBertForMaskedLM",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 128},
    ),
    "electra": ("ElectraConfig", "ElectraForPreTraining", {**_SMALL, "embedding_size": 32}),
    "ernie": ("ErnieConfig", "ErnieForMaskedLM", _SMALL),
    "falcon": (
        "FalconConfig", "FalconForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128},
    ),
    "fnet": ("FNetConfig", "FNetForMaskedLM", {k: v for k, v in _SMALL.items() if k != "num_attention_heads"}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_GQA, "head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_GQA, "head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GQA, "head_dim": 16}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT2),
    "gpt_neo": (
        "GPTNeoConfig", "GPTNeoForCausalLM",
        {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128, "max_position_embeddings": 64,
             "attention_types": [[["global", "local"], 1]]},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _SMALL),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**_GPT2, "rotary_dim": 8}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", _GQA),
    "led": ("LEDConfig", "LEDForConditionalGeneration", {
        **{k: v for k, v in _SEQ2SEQ.items() if k != "max_position_embeddings"}, "attention_window": 8,
        "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    }),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GQA),
    "longformer": ("LongformerConfig", "LongformerForMaskedLM", {**_SMALL, "attention_window": 8}),
    "m2m_100": ("M2M100Config", "M2M100ForConditionalGeneration", _SEQ2SEQ),
    "mamba": (
        "MambaConfig", "MambaForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8},
    ),
    "mamba2": (
        "Mamba2Config", "Mamba2ForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8, "num_heads": 8,
         "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    ),
    "marian": ("MarianConfig", "MarianMTModel", {**_SEQ2SEQ, "pad_token_id": 0}),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", _SEQ2SEQ),
    "mistral": ("MistralConfig", "MistralForCausalLM", _GQA),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_GQA, "num_local_experts": 4}),
    "mobilebert": ("MobileBertConfig", "MobileBertForMaskedLM", {
        **_SMALL, "embedding_size": 32, "intra_bottleneck_size": 32, "intermediate_size": 64,
    }),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", _SMALL),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", _SMALL),
    "mpt": (
        "MptConfig", "MptForCausalLM",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 128, "max_seq_len": 64},
    ),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", _T5),
    "nystromformer": ("NystromformerConfig", "NystromformerForMaskedLM", {
        **_SMALL, "num_landmarks": 4, "segment_means_seq_len": 16,
    }),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", _GQA),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _GQA),
    "opt": (
        "OPTConfig", "OPTForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": 128,
             "max_position_embeddings": 64, "word_embed_proj_dim": 64},
    ),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", _SEQ2SEQ),
    "phi": ("PhiConfig", "PhiForCausalLM", _SMALL),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _GQA),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GQA),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_MOE, "shared_expert_intermediate_size": 64}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GQA, "head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _MOE),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _SMALL),
    "roformer": ("RoFormerConfig", "RoFormerForMaskedLM", _SMALL),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}),
    "squeezebert": ("SqueezeBertConfig", "SqueezeBertForMaskedLM", {**_SMALL, "embedding_size": 64}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", _GQA),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", _GQA),
    "switch_transformers": (
        "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", {**_T5, "num_experts": 4}
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "xlm": (
        "XLMConfig", "XLMWithLMHeadModel",
        {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 128, "n_words": 128},
    ),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaForMaskedLM", _SMALL),
    "xlnet": (
        "XLNetConfig", "XLNetLMHeadModel", {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, "vocab_size": 128}
    ),
}  # fmt: skip


def build_hf(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model with random weights from a tiny config, and keyword inputs."""
    import transformers

    config_class, model_class, settings = HF[name]
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config)
    ids = torch.randint(3, 128, (2, 16))
    inputs: dict[str, Any] = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids.flip(1)
    return model, inputs


def prepare_hf_(model: Any) -> None:
    """For float64 without noise: no dropout where code reads its rate from the config, no fused expert kernels."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    config = getattr(model, "config", None)
    for key, value in list(vars(config).items()) if config is not None else []:
        if isinstance(value, float) and "drop" in key:
            setattr(config, key, 0.0)


Builder = Callable[[str], tuple[nn.Module, Any]]
