"""A tiny random network of each model type that transformers knows, by the names of its configuration's fields."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from biphase.encoder.network import language_model_class

VOCAB_SIZE = 120
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "pooler_hidden_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "attention_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "hidden_dim", "ffn_hidden_size", "dff"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "intermediate_size_mlp", "mamba_d_ssm"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "dense_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("head_dim", "v_head_dim", "d_kv", "d_head", "dim_head", "kv_channels", "swa_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "kv_lora_rank", "q_lora_rank", "linear_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 160),
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_dt_rank", "time_step_rank", "laurel_rank", "embed_dim"), 8),
    **dict.fromkeys(("linear_num_heads", "index_n_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    "embedding_size": 16,
    "entity_emb_size": 16,
    "entity_vocab_size": 16,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "rotary_dim": 4,
    "query_pre_attn_scalar": 8,
    "sliding_window": 8,
    "local_attention": 16,
    "attention_window": 8,
    "decoder_vocab_size": VOCAB_SIZE,
    "word_embed_proj_dim": 24,
    "nope_head_dim": 4,
}
"""What a field of this name becomes, where a type's configuration has one with a number."""

TOKENS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}

WITHOUT_HEAD = ("embedding_gemma2_text", "openai_privacy_filter", "splinter", "t5", "umt5")
SEVERAL_PARTS = (
    *("blt", "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma4_unified"),
    *("gemma4_unified_assistant", "git", "got_ocr2", "llama4", "mllama", "modernvbert", "moshi"),
    *("moss_transcribe_diarize", "musicgen", "musicgen_melody", "perceiver", "phi4_multimodal", "qwen3_5"),
    *("qwen3_5_moe", "qwen4_exp", "ultravbert"),
)

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_experts_per_token": 2, "num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), DEFAULT_ROPE),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8},  # as published
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_top_k": 2},
        "num_key_value_heads": None,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dory": {
        "num_hidden_layers": 3,  # its published form lists attention and MLP as layers of their own
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 1),
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esm": {"mask_token_id": 4, "vocab_size": VOCAB_SIZE, "token_dropout": True},  # as published
    "esmc": {"num_key_value_heads": 4},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling2_loop_text": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_gate_rank": 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_experts_per_token": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "neomme": {"head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 8},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 20)},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "squeezebert": {"embedding_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the names of the fields do not tell."""


def model_types() -> list[str]:
    """Types with a language model's head, causal or masked, or encoders of text without; not those with several parts,
    whose text part has a type of its own."""
    named = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES, *WITHOUT_HEAD}
    return sorted(named - {*SEVERAL_PARTS})


def tiny_config(model_type: str) -> PretrainedConfig:
    """A configuration of a few thousand weights, with a layer of each kind that the type mixes."""
    kind = CONFIG_MAPPING[model_type]
    fields = kind().to_dict()
    num_layers = next((fields[key] for key in LAYERS if isinstance(fields.get(key), int)), 2)
    layer_types = fields.get("layer_types") or []
    kinds = list(dict.fromkeys(layer_types))
    tiny_layers = max(2, len(kinds))
    changes: dict[str, Any] = {key: tiny_layers for key in LAYERS if isinstance(fields.get(key), int)}
    for key, value in fields.items():
        if key in SIZES and isinstance(value, int) and value:
            changes[key] = SIZES[key]
        elif key in TOKENS:
            changes[key] = TOKENS[key]
        elif isinstance(value, list | tuple) and len(value) == num_layers:
            unique = list(dict.fromkeys(value))
            changes[key] = (unique + [unique[-1]] * tiny_layers)[:tiny_layers]
    if "kv_lora_rank" in fields or fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        changes.pop("num_key_value_heads", None)
        changes |= {"head_dim": 4} if "qk_rope_head_dim" in fields and fields.get("head_dim") else {}
        changes |= {"num_key_value_heads": 4} if fields.get("num_key_value_heads") else {}
    return kind(**changes | SPECIAL.get(model_type, {}))


def make_tiny(model_type: str) -> PreTrainedModel:
    """The network, with its head where there is one; weights, biases and norms drawn so that each matters."""
    config = tiny_config(model_type)
    text_config = config.get_text_config()
    kind = AutoModel if text_config.is_encoder_decoder else language_model_class(text_config) or AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = kind.from_config(text_config)
        assert sum(weight.numel() for weight in network.parameters()) < 40_000_000, "not tiny"
        with torch.no_grad():
            for weight in network.parameters():
                if weight.is_floating_point():
                    weight += torch.randn(weight.shape) * (0.1 if weight.ndim > 1 else 0.05)
    return network.eval()


def save_tiny(model_type: str, folder: Path) -> Path:
    make_tiny(model_type).save_pretrained(folder)
    return folder


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """The classes of modules that a configuration leads to, and the kinds of layers that it names."""
    text_config: Any = config.get_text_config()
    lists = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types", "attention_layers")
    named = {str(kind) for key in lists for kind in getattr(text_config, key, None) or []}
    kind = AutoModel if text_config.is_encoder_decoder else language_model_class(text_config) or AutoModel
    some_make_none = suppress(AttributeError, KeyError, TypeError)
    with some_make_none, torch.device("meta"), no_init_weights():
        return named | {type(module).__name__ for module in kind.from_config(text_config).modules()}
    return named
