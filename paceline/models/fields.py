"""Fields of a config.json that make another network of it: refused by name and value, never passed over in silence."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from paceline.models.config import ConfigReader

log = logging.getLogger(__name__)

# Field -> the values that mean "not used". A family that reads a field names it in its FIELDS.
OTHERS: dict[str, tuple[Any, ...]] = {
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attention_sinks": (None, False),
    "attn_logit_softcapping": (None, 0),
    "clip_qkv": (None,),
    "cross_attention_layers": (None, []),
    "decoder_sparse_step": (None, 1),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None, 0),
    "hidden_size_per_layer_input": (None, 0),
    "is_encoder_decoder": (None, False),
    "kv_lora_rank": (None, 0),
    "layer_rope_theta": (None,),
    "linear_num_value_heads": (None, 0),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "mlp_only_layers": (None, []),
    "moe_intermediate_size": (None, 0),
    "n_routed_experts": (None, 0),
    "no_rope_layer_interval": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_experts_per_tok": (None, 0),
    "num_kv_shared_layers": (None, 0),
    "num_local_experts": (None, 0),
    "output_multiplier": (None, 1),
    "position_embedding_type": (None, "rope", "rotary"),
    "post_norm_eps": (None,),
    "q_lora_rank": (None, 0),
    "qk_layernorm": (None, False),
    "qk_scale_factor": (None, 1),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "rope_local_base_freq": (None,),
    "shared_expert_intermediate_size": (None, 0),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "use_qk_norm": (None, False),
    "v_head_dim": (None,),
}
# Read by every family.
SHARED = frozenset(
    [
        "attention_bias",
        "compression_config",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    ]
)
# Say nothing about the network that runs: training, tokens, provenance.
NEUTRAL = frozenset(
    [
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "use_cache",
    ]
)


def check_fields(config: dict[str, Any], own: Collection[str], where: str) -> None:
    """Refuse fields of other networks that are in use; warn about names that nothing here knows.

    Raises ConfigError naming the field and its value.
    """
    reader = ConfigReader(config, where)
    unknown = {}
    for name, value in config.items():
        if name in own or name in SHARED or name in NEUTRAL:
            continue
        if name in OTHERS:
            if value not in OTHERS[name]:
                kind = config.get("model_type")
                raise reader.fail(name, f"is not supported for {kind} models; it makes another network of them")
        elif not name.startswith("_") and value not in (None, False, [], {}):
            unknown[name] = value
    if unknown:
        log.warning("%s: fields that are not known here have no effect: %s", where, unknown)
