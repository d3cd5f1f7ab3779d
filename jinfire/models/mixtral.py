"""The Mixtral family: Llama's attention, experts in every layer."""

import dataclasses

from jinfire.config import ExpertsConfig, LayerSpec, ModelConfig
from jinfire.models.family import DENSE_NAMES, ModelFamily
from jinfire.models.hf_fields import (
    INERT_VALUES,
    READ,
    Defaults,
    Json,
    check_keys,
    decoder_config,
    read_kv_heads,
    read_size,
    shared_head_dim,
)

DEFAULTS = Defaults(
    vocab_size=32_000,
    mlp_width=14_336,
    max_position=131_072,
    norm_eps=1e-5,
    rope_theta=1_000_000.0,
    bos_id=1,
    eos_id=2,
)
OWN_KEYS = frozenset(("num_local_experts", "num_experts_per_tok"))


def parse_config(config: Json, generation: Json) -> ModelConfig:
    """A decoder with experts in place of each MLP; sliding windows are refused."""
    check_keys(config, READ | OWN_KEYS, {**INERT_VALUES, "sliding_window": (None,)})
    model = decoder_config(
        config,
        generation,
        DEFAULTS,
        family=MIXTRAL.name,
        head_dim=shared_head_dim(config, DEFAULTS),
        num_kv_heads=read_kv_heads(config, DEFAULTS, absent=8),
    )
    return dataclasses.replace(
        model,
        layers=(LayerSpec(mlp="experts"),) * model.num_layers,
        experts=ExpertsConfig(
            count=read_size(config, "num_local_experts", 8),
            per_token=read_size(config, "num_experts_per_tok", 2),
            width=model.mlp_width,
            normalise=True,
        ),
    )


MIXTRAL = ModelFamily(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    parse_config=parse_config,
    tensor_names={
        **{logical: stored for logical, stored in DENSE_NAMES.items() if ".mlp." not in logical},
        "layers.{i}.mlp.router.weight": "model.layers.{i}.block_sparse_moe.gate.weight",
        **{
            f"layers.{{i}}.mlp.experts.{ours}.weight": (
                f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{theirs}.weight"
            )
            for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    },
)
