"""An architecture at a smaller size: the same kinds of layers, fewer and narrower."""

import copy
from collections.abc import Mapping
from typing import Any

from jinfire.models.hf_fields import require
from jinfire.models.hf_quantization import FP8

# By the name of a size, the fields that may hold it; the first that a config has is it.
SIZES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "head_dim": ("head_dim",),
    "mlp": ("intermediate_size_mlp", "intermediate_size"),
    "expert_mlp": ("moe_intermediate_size", "intermediate_size"),
    "vocab": ("vocab_size",),
    "query_rank": ("q_lora_rank",),
    "latent_rank": ("kv_lora_rank",),
    "nope_dim": ("qk_nope_head_dim",),
    "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
}
# Fields with one entry for each layer, and such with numbers of layers.
LAYER_LISTS = ("layer_types", "no_rope_layers")
LAYER_NUMBERS = ("moe_layers", "mlp_only_layers")
DERIVED = {
    "qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim"),
    "head_dim": ("qk_rope_head_dim",),
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def reduced(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """A `config.json` with some of `SIZES` set, and what depends on them following.

    Everything else stays, but for what random weights cannot have: fp8 values, and layers that
    predict further tokens.

    `config` is one that the families read (`parse_architecture`).

    Raises: ValueError naming a size that the architecture does not have, or two that are one;
    UnsupportedConfig naming a field that a size depends on and that the config leaves out.
    """
    whole = {key: copy.deepcopy(value) for key, value in config.items() if key[:1] != "_"}
    nested = isinstance(whole.get("text_config"), dict)
    text = whole["text_config"] if nested else whole
    for level in (whole, text):
        scheme = level.get("quantization_config")
        if isinstance(scheme, dict) and scheme.get("quant_method") == FP8:
            del level["quantization_config"]
    if "num_nextn_predict_layers" in text:
        text["num_nextn_predict_layers"] = 0
    before = dict(text)
    fields = {size: field for size in SIZES if (field := _field(text, size)) is not None}
    for size, value in sizes.items():
        if size not in fields:
            raise ValueError(
                f"{size}: expected a size that the architecture {text.get('model_type')!r} has, "
                f"one of {list(fields)}"
            )
        if same := [
            other for other in sizes if other != size and fields.get(other) == fields[size]
        ]:
            raise ValueError(f"{size}: expected one of {[size, *same]}, both are {fields[size]}")
        text[fields[size]] = value
    if "layers" in sizes:
        _cut_layers(text, sizes["layers"])
    if "experts" in sizes:
        _cut_experts(text, sizes["experts"])
    if "heads" in sizes:
        _cut_kv_heads(text, before)
    if "qk_nope_head_dim" in text:
        # What transformers v5 writes out although it follows.
        for key, parts in DERIVED.items():
            if text.get(key) is not None:
                text[key] = sum(_given(text, part) for part in parts)
    if "vocab" in sizes:
        for level in (whole, text):
            level |= fitted_tokens(level, sizes["vocab"])
    return whole


def fitted_tokens(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The token ids of a config, within a smaller vocabulary."""

    def fitted(value: Any) -> Any:
        if isinstance(value, list):
            return [fitted(token) for token in value]
        return value % vocab_size if isinstance(value, int) else value

    return {key: fitted(config[key]) for key in TOKENS if key in config}


def _field(text: Mapping[str, Any], size: str) -> str | None:
    """The field that holds a size, None where the architecture does not have it."""
    if size == "head_dim":
        # Latent attention has three others; elsewhere it is the width over the heads by default.
        return None if "kv_lora_rank" in text else "head_dim"
    if size == "expert_mlp" and _field(text, "experts") is None:
        return None
    return next((field for field in SIZES[size] if text.get(field) is not None), None)


def _given(text: Mapping[str, Any], field: str) -> int:
    value = text.get(field)
    require(value is not None, field, "a number, as a size that is set depends on it", value)
    return text[field]


def _cut_layers(text: dict[str, Any], layers: int) -> None:
    for key in LAYER_LISTS:
        if isinstance(text.get(key), list):
            text[key] = text[key][:layers]
    for key in LAYER_NUMBERS:
        if isinstance(text.get(key), list):
            text[key] = [layer for layer in text[key] if layer < layers]
    if "first_k_dense_replace" in text:
        # At least one layer of experts stays, or the architecture would be another.
        text["first_k_dense_replace"] = min(_given(text, "first_k_dense_replace"), layers - 1)


def _cut_experts(text: dict[str, Any], experts: int) -> None:
    for field in SIZES["experts"]:
        if text.get(field) is not None:
            text[field] = experts
    text["num_experts_per_tok"] = min(_given(text, "num_experts_per_tok"), experts)
    if text.get("n_group") is None:
        return
    # A group is scored by its best two.
    groups = max(
        count
        for count in range(1, min(text["n_group"], max(1, experts // 2)) + 1)
        if experts % count == 0
    )
    chosen = min(_given(text, "topk_group"), groups)
    needed = -(-text["num_experts_per_tok"] // (experts // groups))
    text["n_group"], text["topk_group"] = groups, max(chosen, needed)


def _cut_kv_heads(text: dict[str, Any], before: Mapping[str, Any]) -> None:
    heads, kv_heads = before["num_attention_heads"], before.get("num_key_value_heads")
    if kv_heads is None:
        return
    now = text["num_attention_heads"]
    wanted = max(1, now * kv_heads // heads)
    text["num_key_value_heads"] = max(n for n in range(1, wanted + 1) if now % n == 0)
