"""The Llama family: Llama 2 and 3.x, SmolLM2 and what else declares `model_type` "llama"."""

from jinfire.config import ModelConfig
from jinfire.models.family import DENSE_GGUF_NAMES, DENSE_NAMES, GGUFForm, ModelFamily
from jinfire.models.hf_fields import (
    INERT_VALUES,
    READ,
    Defaults,
    Json,
    check_keys,
    decoder_config,
    read_kv_heads,
    shared_head_dim,
)

DEFAULTS = Defaults(vocab_size=32000, mlp_width=11008, max_position=2048, bos_id=1, eos_id=2)


def parse_config(config: Json, generation: Json) -> ModelConfig:
    """A dense decoder; without `head_dim` the heads share the width."""
    check_keys(config, READ, {**INERT_VALUES, "sliding_window": (None,)})
    return decoder_config(
        config,
        generation,
        DEFAULTS,
        family=LLAMA.name,
        head_dim=shared_head_dim(config, DEFAULTS),
        num_kv_heads=read_kv_heads(config, DEFAULTS),
    )


LLAMA = ModelFamily(
    name="llama",
    architectures=("LlamaForCausalLM",),
    parse_config=parse_config,
    tensor_names=DENSE_NAMES,
    gguf=GGUFForm(DENSE_GGUF_NAMES, has_paired_rope=True),
)
