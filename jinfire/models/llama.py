"""The Llama family: Llama 2 and 3.x, SmolLM2 and what else declares `model_type` "llama"."""

from jinfire.config import ModelConfig
from jinfire.errors import UnsupportedConfig
from jinfire.models.family import DENSE_GGUF_NAMES, DENSE_NAMES, GGUFForm, ModelFamily
from jinfire.models.hf_fields import INERT_VALUES, READ, Json, check_keys, dense_config, read_size


def parse_config(config: Json, generation: Json) -> ModelConfig:
    """A dense decoder; without `head_dim` the heads share the width."""
    check_keys(config, READ, {**INERT_VALUES, "sliding_window": (None,)})
    heads = read_size(config, "num_attention_heads", 32)
    width = read_size(config, "hidden_size", 4096)
    if config.get("head_dim") is None and width % heads:
        raise UnsupportedConfig(
            f"hidden_size: expected a multiple of num_attention_heads {heads}, got {width}"
        )
    return dense_config(
        config,
        generation,
        family=LLAMA.name,
        head_dim=read_size(config, "head_dim", width // heads),
        num_kv_heads=read_size(config, "num_key_value_heads", heads),
        defaults={"vocab_size": 32000, "intermediate_size": 11008, "max_position": 2048},
        default_bos=1,
        default_eos=2,
        qk_norm=False,
    )


LLAMA = ModelFamily(
    name="llama",
    architectures=("LlamaForCausalLM",),
    parse_config=parse_config,
    tensor_names=DENSE_NAMES,
    gguf=GGUFForm(DENSE_GGUF_NAMES, has_paired_rope=True),
)
