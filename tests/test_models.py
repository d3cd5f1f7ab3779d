"""The registry: every family's record agrees with itself and with the abstract tree."""

import re
from typing import Any

import pytest

from jinfire.config import ModelConfig
from jinfire.errors import UnsupportedConfig
from jinfire.models import MODELS, ModelFamily, parse_config
from jinfire.models.family import Fused
from jinfire.models.spec import abstract_tree

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,  # two digits in a layer's name
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}

INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "experts": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn", "re:.*shared_experts", "re:.*mlp.(gate|up|down)_proj"],
}
SMALL_EXPERTS = {"num_local_experts": 12, "num_experts_per_tok": 2}  # two digits
SMALL_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
# What a family needs to be small, in forms that together have all of its tensors.
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama4": (SMALL_EXPERTS | {"interleave_moe_layer_step": 2},),
    "qwen3_moe": (SMALL_EXPERTS | {"decoder_sparse_step": 2},),
    "mixtral": (SMALL_EXPERTS,),
    "deepseek_v3": (
        SMALL_DEEPSEEK,
        SMALL_DEEPSEEK | {"q_lora_rank": None},
        SMALL_DEEPSEEK | {"quantization_config": INT4},
    ),
}
FORMS |= {
    "llama4_text": FORMS["llama4"],
    "kimi_k2": FORMS["deepseek_v3"],
    "kimi_k25": FORMS["deepseek_v3"],
}
NESTED = ("llama4", "kimi_k25")

families = pytest.mark.parametrize("family", MODELS.values(), ids=MODELS)


def small(
    family: ModelFamily, form: dict[str, Any] | None = None, *, architectures=None, **changes
) -> ModelConfig:
    form = FORMS.get(family.name, ({},))[0] if form is None else form
    config = {**SMALL, **form, **changes}
    if family.name in NESTED:
        config = {"text_config": config}
    if architectures is not None:
        config |= {"architectures": architectures}
    return parse_config({"model_type": family.name, **config}, {"eos_token_id": 2})


def test_keys_are_names() -> None:
    assert list(MODELS) == [family.name for family in MODELS.values()]


@families
def test_config_names_its_family(family: ModelFamily) -> None:
    assert small(family).family == family.name
    for architecture in family.architectures:
        assert small(family, architectures=[architecture]) == small(family)
    with pytest.raises(UnsupportedConfig, match=f"architectures.*{family.architectures[0]}"):
        small(family, architectures=["OtherModel"])


@families
def test_tensor_names_are_those_of_the_tree(family: ModelFamily) -> None:
    """Each logical name of the untied model has a place in each format, and no other has."""
    trees = [
        abstract_tree(small(family, form, tie_word_embeddings=False))
        for form in FORMS.get(family.name, ({},))
    ]
    patterns = {pattern_of(name) for tree in trees for name in tree}
    for table in (family.tensor_names, family.gguf.tensor_names if family.gguf else None):
        if table is not None:
            assert table.keys() == patterns
            assert len(set(table.values())) == len(table)


def pattern_of(name: str) -> str:
    return re.sub(r"layers\.[0-9]+\.", "layers.{i}.", name)


@families
def test_names_begin_with_what_is_read(family: ModelFamily) -> None:
    """What is ignored is not what is read."""
    for stored in family.tensor_names.values():
        name = (
            stored
            if isinstance(stored, str)
            else stored.name
            if isinstance(stored, Fused)
            else stored.prefix
        )
        assert not name.startswith(family.ignored or "-")
        assert name.startswith("language_model.") == (family.name in NESTED)
