"""What a model family says about itself, and the tensor names that dense families share."""

import dataclasses
from collections.abc import Callable, Mapping

from jinfire.config import ModelConfig
from jinfire.models.hf_fields import Json


@dataclasses.dataclass(frozen=True)
class GGUFForm:
    """How llama.cpp stores a family.

    `tensor_names` maps logical names to GGUF's, `{i}` standing for the layer. `has_paired_rope`:
    query and key rows lie with the two halves of a RoPE pair adjacent. `required_keys` are
    metadata keys, without the architecture's prefix, that this family cannot do without.
    """

    tensor_names: Mapping[str, str]
    has_paired_rope: bool = False
    required_keys: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Fused:
    """A part of a checkpoint's tensor that holds all experts of a layer as [E, in, out].

    The logical tensor is [E, out, in]; `part` of `parts` equal runs of the out axis.
    Source: transformers `Llama4TextExperts`.
    """

    name: str
    part: int = 0
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class Packed:
    """One array of 4-bit experts: a tensor of each, `{e}` standing for the expert.

    The tensor's name is `prefix`.`suffix`, e.g. "...experts.{e}.gate_proj" and "weight_packed" or
    "weight_scale"; a `prefix`.weight_shape of each expert is checked. The order of words and
    scales becomes the device form (`pallas_kernels.pack_for_device`).
    """

    prefix: str
    suffix: str


# How a logical tensor lies in a checkpoint. A text is the name of a tensor that is stored as it
# is, `{i}` standing for the layer; with `{e}`, of one tensor for each expert of a stack [E, ...].
Stored = str | Fused | Packed


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """One family of checkpoints.

    `name` is the Hugging Face `model_type` and GGUF's `general.architecture`; `architectures` are
    the classes that a config may name. `parse_config` takes `config.json` and
    `generation_config.json` (empty where there is none) and raises UnsupportedConfig naming the
    field; `jinfire.models.parse_config` checks that sizes agree. `tensor_names` maps logical names
    to how Hugging Face stores them. `ignored` are beginnings of names of tensors that belong to
    parts which are not read, such as a vision tower.
    `gguf` None: no GGUF files of this family are read.
    """

    name: str
    architectures: tuple[str, ...]
    parse_config: Callable[[Json, Json], ModelConfig]
    tensor_names: Mapping[str, Stored]
    gguf: GGUFForm | None = None
    ignored: tuple[str, ...] = ()


DENSE_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.scale": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.query.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.key.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.value.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.output.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.mlp_norm.scale": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "final_norm.scale": "model.norm.weight",
    "head.weight": "lm_head.weight",
}

QK_NORM_NAMES = {
    "layers.{i}.attention.query_norm.scale": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.key_norm.scale": "model.layers.{i}.self_attn.k_norm.weight",
}

DENSE_GGUF_NAMES = {
    "embed.weight": "token_embd.weight",
    "layers.{i}.attention_norm.scale": "blk.{i}.attn_norm.weight",
    "layers.{i}.attention.query.weight": "blk.{i}.attn_q.weight",
    "layers.{i}.attention.key.weight": "blk.{i}.attn_k.weight",
    "layers.{i}.attention.value.weight": "blk.{i}.attn_v.weight",
    "layers.{i}.attention.output.weight": "blk.{i}.attn_output.weight",
    "layers.{i}.mlp_norm.scale": "blk.{i}.ffn_norm.weight",
    "layers.{i}.mlp.gate.weight": "blk.{i}.ffn_gate.weight",
    "layers.{i}.mlp.up.weight": "blk.{i}.ffn_up.weight",
    "layers.{i}.mlp.down.weight": "blk.{i}.ffn_down.weight",
    "final_norm.scale": "output_norm.weight",
    "head.weight": "output.weight",
}


def prefixed(names: Mapping[str, Stored], prefix: str) -> dict[str, Stored]:
    """Names as they are where the decoder is one part of a larger model."""

    def rename(stored: Stored) -> Stored:
        if isinstance(stored, str):
            return prefix + stored
        if isinstance(stored, Fused):
            return dataclasses.replace(stored, name=prefix + stored.name)
        return dataclasses.replace(stored, prefix=prefix + stored.prefix)

    return {logical: rename(stored) for logical, stored in names.items()}
