"""`jinfire inspect`: what a checkpoint is and how it can be split, without loading weights."""

import argparse
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from gguf import LlamaFileType

from jinfire.checkpoints import load_tokenizer, open_checkpoint
from jinfire.checkpoints.gguf import read_metadata
from jinfire.checkpoints.source import read_json
from jinfire.checkpoints.store import CONFIG_NAME, config_to_json
from jinfire.cli import compressed, console, options
from jinfire.config import ModelConfig
from jinfire.errors import UnsupportedConfig
from jinfire.layout import StageLayout, projection_of
from jinfire.models.spec import (
    ParamSpec,
    abstract_tree,
    flops_per_token,
    kv_bytes_per_token,
    parameter_count,
    parameters_by_tensor,
)
from jinfire.unweight.describe import Description, describe_compressed, is_compressed
from jinfire.unweight.policy import PhasePolicies, UnweightPolicy
from jinfire.weights import parse_dtype
from sharding import MeshSpec

EXAMPLES = """\
examples:
  jinfire inspect
  jinfire inspect --model ~/models/Llama-3.2-1B --tensors
  jinfire inspect --model ~/models/Llama-3.1-8B-unweight
  jinfire inspect --prefill 2x3 --decode 4x1
  jinfire inspect --unweight compact --colocated 1x3
  jinfire inspect --json | jq .kv_bytes_per_token
"""
DTYPES = ("float32", "bfloat16")
MAX_TEXT = 60


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="describe a checkpoint",
        description="Describe a checkpoint: model, sizes, valid layouts, tokenizer, metadata. "
        "No weights are loaded. A layout flag shows how the model lies on that mesh. A compressed "
        "folder or file shows what is saved where, too.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    options.add_model(parser, dtype=False)
    options.add_layout(parser)
    options.add_unweight(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    options.add_output(parser)


def run(args: argparse.Namespace) -> int:
    path, policies = options.model_path(args), options.unweight(args)
    unweight = describe_compressed(path) if is_compressed(path) else None
    document = _model(path, _meshes(args), args.tensors, policies, unweight is not None)
    if args.json:
        if unweight is not None:
            tensors = compressed.tensor_documents(unweight)
            document["unweight"] = {**compressed.document(unweight), "tensors": tensors}
        console.print_json({"command": "inspect", **document})
        return console.OK
    if "config" in document:
        _print(document)
    elif "error" in document:
        console.print_note(f"jinfire: {document['error']}")
    if unweight is not None:
        _print_unweight(path, unweight, args.tensors)
    return console.OK


def _model(
    path: Path,
    meshes: dict[str, MeshSpec],
    with_tensors: bool,
    policies: PhasePolicies,
    is_coded: bool,
) -> dict[str, Any]:
    """What is known about the model, of which a compressed folder may be none that is read."""
    if is_coded and not (path / "config.json").is_file():
        return {"path": path}
    try:
        return describe(path, meshes, with_tensors, policies)
    except UnsupportedConfig as error:
        if not is_coded:
            raise
        return {"path": path, "error": str(error)}


def _meshes(args: argparse.Namespace) -> dict[str, MeshSpec]:
    none_given = args.colocated is None and args.prefill is None and args.decode is None
    if none_given and args.unweight is None:
        return {}
    where = options.placement(args)
    if where.decode is None:
        return {"colocated": where.prefill}
    return {"prefill": where.prefill, "decode": where.decode}


def describe(
    path: Path,
    meshes: dict[str, MeshSpec],
    with_tensors: bool,
    policies: PhasePolicies,
) -> dict[str, Any]:
    """All facts about a checkpoint, as JSON values.

    Raises: CheckpointMismatch, UnsupportedConfig, or ValueError for a mesh that does not fit.
    """
    source = open_checkpoint(path)
    config = source.config
    source.close()
    per_token = flops_per_token(config)

    def weight_bytes(itemsize: int) -> int:
        tree = abstract_tree(config)
        return sum(spec.size * stored_itemsize(spec, itemsize) for spec in tree.values())

    document = {
        "path": path,
        "config": config_to_json(config),
        "parameters": parameter_count(config),
        "weight_bytes": _per_dtype(weight_bytes),
        "kv_bytes_per_token": _per_dtype(lambda itemsize: kv_bytes_per_token(config, itemsize)),
        "flops_per_token": per_token,
        "flops_per_token_and_context_token": flops_per_token(config, context=1) - per_token,
        "tensor_sizes": tensor_sizes(config),
        "expert_sizes": expert_sizes(config),
        "max_pipeline": config.num_layers,
        "layouts": [
            _layout(config, name, spec, policies.decode if name == "decode" else policies.prefill)
            for name, spec in meshes.items()
        ],
        "tokenizer": _tokenizer(path),
        "metadata": _metadata(path),
    }
    if with_tensors:
        counts = parameters_by_tensor(config)
        document["tensors"] = [
            {"name": name, "shape": spec.shape, "axes": spec.axes, "parameters": counts[name]}
            for name, spec in abstract_tree(config).items()
        ]
    return document


def tensor_sizes(config: ModelConfig) -> list[int]:
    """Sizes of the tensor axis that the model can be split over."""
    most = config.num_heads
    return [size for size in range(1, most + 1) if _fits(config, MeshSpec(tensor=size))]


def expert_sizes(config: ModelConfig) -> list[int]:
    """Sizes of the expert axis that the model can be split over, with a tensor axis of 1."""
    most = config.experts.count if config.experts else 1
    return [size for size in range(1, most + 1) if _fits(config, MeshSpec(expert=size))]


def _fits(config: ModelConfig, spec: MeshSpec) -> bool:
    try:
        StageLayout(config, spec)
    except ValueError:
        return False
    return True


def stored_itemsize(spec: ParamSpec, itemsize: int) -> int:
    """Bytes of one value of a tensor in a model whose data type has `itemsize`."""
    return itemsize if spec.dtype is None else jnp.dtype(spec.dtype).itemsize


def _layout(
    config: ModelConfig, phase: str, spec: MeshSpec, policy: UnweightPolicy | None
) -> dict[str, Any]:
    layout = StageLayout(config, spec, policy)
    logical = abstract_tree(config)

    def weight_bytes(itemsize: int) -> int:
        total = 0
        for tensor in layout.tensors.values():
            axes = [axis for entry in tensor.spec for axis in _axes(entry)]
            elements = math.prod(tensor.shape) // math.prod(getattr(spec, axis) for axis in axes)
            source = next(name for name in tensor.sources if name)
            total += elements * stored_itemsize(logical[source], itemsize)
        return total

    kv_heads = layout.kv_heads // layout.shards
    kv_elements = layout.slots * kv_heads * sum(config.kv_widths)
    return {
        "phase": phase,
        "mesh": str(spec),
        "devices": spec.size,
        "layers_per_stage": layout.counts,
        "slots": layout.slots,
        "padded_slots": layout.padded_slots,
        "query_heads_per_device": config.num_heads // layout.shards,
        "kv_heads_per_device": kv_heads,
        "experts_per_device": config.experts.count // spec.expert if config.experts else None,
        "padded_vocabulary": layout.padded_vocab,
        "weight_bytes_per_device": _per_dtype(weight_bytes),
        "kv_bytes_per_token_per_device": _per_dtype(lambda itemsize: kv_elements * itemsize),
        "unweight": [] if policy is None else _unweight(layout),
    }


def _unweight(layout: StageLayout) -> list[dict[str, Any]]:
    """What the policy comes to, by projection: the variants, or why the weight stays dense."""
    found: dict[tuple[str, str, str | None], int] = {}
    for name, tensor in layout.tensors.items():
        if tensor.coded is not None or tensor.why_dense is not None:
            key = (projection_of(name), str(tensor.coded or "dense"), tensor.why_dense)
            found[key] = found.get(key, 0) + sum(source is not None for source in tensor.sources)
    return [
        {"projection": projection, "variant": variant, "why_dense": why, "tensors": count}
        for (projection, variant, why), count in found.items()
    ]


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _per_dtype(size: Any) -> dict[str, int]:
    return {name: size(parse_dtype(name).itemsize) for name in DTYPES}


def _tokenizer(path: Path) -> dict[str, Any] | None:
    try:
        tokenizer = load_tokenizer(path)
    except UnsupportedConfig as error:  # the model may still run on token ids
        return {"error": str(error)}
    if tokenizer is None:
        return None
    bos = tokenizer.bos_id
    return {
        "vocabulary": tokenizer.vocab_size,
        "start": None if bos is None else {"id": bos, "token": tokenizer.token(bos)},
        "ends": [{"id": i, "token": tokenizer.token(i)} for i in sorted(tokenizer.eos_ids)],
        "chat_template": tokenizer.chat_template is not None,
    }


def _metadata(path: Path) -> dict[str, Any]:
    """What the checkpoint says of itself; the tables of a tokenizer are left out."""
    if path.is_dir() and (path / CONFIG_NAME).exists():
        return {"format": "jinfire", **read_json(path / CONFIG_NAME)}
    if path.is_dir() and (path / "config.json").exists():
        return {"format": "Hugging Face", **read_json(path / "config.json")}
    file = path if path.is_file() else next(path.glob("*.gguf"))
    metadata = read_metadata(file)
    kept = {key: value for key, value in metadata.items() if not isinstance(value, list)}
    kept.pop("tokenizer.chat_template", None)
    return {"format": "GGUF", **kept}


# Text.


def _print(document: dict[str, Any]) -> None:
    config = document["config"]
    kinds = {f"{layer['attention']} attention, {layer['mlp']} MLP" for layer in config["layers"]}
    rope, chunk = config["rope"], config["attention_chunk"]
    console.print_table(
        f"{document['path']} ({_format(document['metadata'])})",
        [
            ("family", config["family"]),
            ("layers", f"{len(config['layers'])}, {'; '.join(sorted(kinds))}"),
            ("width", f"{config['width']:,}, MLP {config['mlp_width']:,}"),
            ("heads", _heads(config)),
            *([("experts", _experts(config["experts"]))] if config["experts"] else []),
            *([("attention chunk", f"{config['attention_chunk']:,} tokens")] if chunk else []),
            (
                "vocabulary",
                f"{config['vocab_size']:,}, embeddings "
                + ("tied" if config["tie_embeddings"] else "not tied"),
            ),
            ("context", f"{config['max_position']:,} tokens"),
            ("rope", f"theta {rope['theta']:g}, scaling {rope['scaling'] or 'none'}"),
            ("end tokens", ", ".join(map(str, config["eos_ids"])) or "none"),
        ],
    )
    print()
    context_flops = document["flops_per_token_and_context_token"]
    console.print_table(
        "sizes",
        [
            ("parameters", f"{document['parameters']:,}"),
            ("weights", _sizes(document["weight_bytes"])),
            ("kv per token", _sizes(document["kv_bytes_per_token"])),
            (
                "flops per token",
                f"{document['flops_per_token']:,} + {context_flops:,} per token of context",
            ),
            ("tensor", _devices(document["tensor_sizes"])),
            *([("expert", _devices(document["expert_sizes"]))] if config["experts"] else []),
            ("pipeline", f"1 to {document['max_pipeline']} stages"),
        ],
    )
    for layout in document["layouts"]:
        print()
        console.print_table(f"{layout['phase']}: {layout['mesh']}", _layout_rows(layout))
        if layout["unweight"]:
            print()
            console.print_table(f"{layout['phase']}: unweight", _unweight_rows(layout["unweight"]))
    print()
    console.print_table("tokenizer", _tokenizer_rows(document["tokenizer"]))
    print()
    metadata = document["metadata"].items()
    console.print_table("metadata", [(key, _short(value)) for key, value in metadata])
    if "tensors" in document:
        print()
        _print_tensors(document["tensors"])


def _heads(config: dict[str, Any]) -> str:
    latent = config["latent"]
    if latent is not None:
        cached = f"{latent['rank']} latents and {latent['rope_dim']} rotary values"
        return f"{config['num_heads']} query, of {config['head_dim']}; {cached} for all"
    norm = ", qk-norm" if config["qk_norm"] else ""
    return (
        f"{config['num_heads']} query, {config['num_kv_heads']} kv, of {config['head_dim']}{norm}"
    )


def _experts(experts: dict[str, Any]) -> str:
    shared = f", shared {experts['shared_width']:,}" if experts["shared_width"] else ""
    stored = ", int4" if experts["int4"] else ""
    return (
        f"{experts['count']}, {experts['per_token']} per token, of {experts['width']:,}"
        f"{shared}{stored}"
    )


def _format(metadata: dict[str, Any]) -> str:
    file_type = metadata.get("general.file_type")
    if isinstance(file_type, int) and file_type in set(LlamaFileType):
        kind = LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        return f"{metadata['format']}, mostly {kind}"
    return metadata["format"]


def _devices(sizes: list[int]) -> str:
    return f"{', '.join(map(str, sizes))} device{'s' if sizes != [1] else ''}"


def _sizes(per_dtype: dict[str, int]) -> str:
    return ", ".join(f"{dtype} {console.size_text(size)}" for dtype, size in per_dtype.items())


def _layout_rows(layout: dict[str, Any]) -> list[tuple[str, object]]:
    layers = " + ".join(map(str, layout["layers_per_stage"]))
    if layout["padded_slots"]:
        layers += f" in {layout['slots']} slots each, {layout['padded_slots']} of them empty"
    experts = layout["experts_per_device"]
    return [
        ("devices", layout["devices"]),
        ("layers per stage", layers),
        (
            "heads per device",
            f"{layout['query_heads_per_device']} query, {layout['kv_heads_per_device']} kv",
        ),
        *([] if experts is None else [("experts per device", experts)]),
        ("weights per device", _sizes(layout["weight_bytes_per_device"])),
        ("kv per token", _sizes(layout["kv_bytes_per_token_per_device"]) + " per device"),
    ]


def _unweight_rows(choices: list[dict[str, Any]]) -> list[tuple[str, object]]:
    rows = []
    for choice in choices:
        why = "" if choice["why_dense"] is None else f" ({choice['why_dense']})"
        rows.append((choice["projection"], f"{choice['variant']}{why}, {choice['tensors']}"))
    return rows


def _tokenizer_rows(tokenizer: dict[str, Any] | None) -> list[tuple[str, object]]:
    if tokenizer is None or "error" in tokenizer:
        return [("none", "" if tokenizer is None else tokenizer["error"])]
    start = tokenizer["start"]
    return [
        ("vocabulary", f"{tokenizer['vocabulary']:,}"),
        ("start", "none" if start is None else f"{start['id']} {start['token']}"),
        ("ends", ", ".join(f"{end['id']} {end['token']}" for end in tokenizer["ends"]) or "none"),
        ("chat template", "yes" if tokenizer["chat_template"] else "no"),
    ]


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def _print_unweight(path: Path, description: Description, with_tensors: bool) -> None:
    if (path / "config.json").is_file():
        print()
    console.print_table("Unweight", compressed.total_rows(description))
    print()
    if with_tensors:
        compressed.print_sizes("tensors", list(description.tensors))
    else:
        compressed.print_sizes("kinds of tensors", description.kinds())


def _print_tensors(tensors: list[dict[str, Any]]) -> None:
    print("tensors")
    width = max(len(tensor["name"]) for tensor in tensors)
    for tensor in tensors:
        axes = zip(tensor["axes"], tensor["shape"], strict=True)
        shape = " x ".join(f"{size} {axis or ''}".strip() for axis, size in axes)
        print(f"  {tensor['name']:<{width}}  {tensor['parameters']:>13,}  {shape}")
