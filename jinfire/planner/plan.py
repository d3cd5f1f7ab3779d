"""A plan by the names of things, and as a document."""

import dataclasses
from pathlib import Path
from typing import Any

from jinfire.checkpoints import open_checkpoint
from jinfire.checkpoints.source import read_json
from jinfire.config import LATENTS, Layout, ModelConfig
from jinfire.models import parse_architecture
from jinfire.models.presets import PRESETS, preset
from jinfire.planner.footprint import Workload
from jinfire.planner.gpus import WORKSPACE_BYTES
from jinfire.planner.layouts import Candidate, Fitting, Plan, plan_model
from jinfire.planner.roofline import PhaseTime
from jinfire.planner.unweight import DENSE_KINDS, FORMS, NONE, SOURCES
from jinfire.planner.verify import verified


def plan(
    model: str | Path | ModelConfig,
    gpus: str,
    *,
    layout: Layout | None = None,
    dtype: str = "bfloat16",
    unweight: str = NONE,
    latents: str = LATENTS[0],
    verify: bool = False,
    show_progress: bool = False,
    **load: int,
) -> Plan:
    """What a model needs on `gpus`, e.g. "8xH100"; `load` are fields of `Workload`.

    `model` is a preset's name, a `config.json`, a checkpoint or a config; weights are not read.
    A context that is not given is 8,192 tokens, or all that the model has.
    `layout` is (pipeline, tensor) or (pipeline, tensor, expert); None compares all. `unweight` is
    the form that weights lie in on the devices: "none", "huffman", "palette" or "compact".
    `latents` are "replicated" or "split" over the devices of a stage; "auto" compares both. With
    `verify` the steps of the chosen layout are compiled at full size, with dense weights, and say
    what weights and activations take; where that does not fit, those of the next layout, if none
    was asked for.
    Raises: ValueError for what is not known or does not go together; UnsupportedConfig;
    ToolchainMissing where `verify` finds no compiler; TypeError for an unknown keyword.
    """
    config = model if isinstance(model, ModelConfig) else read_config(model)
    workload = Workload.of(config, **load)
    if verify and unweight != NONE:
        raise ValueError(
            f"verify: expected dense weights, which steps compile with, got {unweight}"
        )
    found = plan_model(
        config,
        gpus,
        layout=layout,
        load=workload,
        dtype=dtype,
        unweight=unweight,
        latents=latents,
    )
    if not verify:
        return found
    return found.verified(lambda candidate: verified(candidate, show_progress))


def read_config(model: str | Path) -> ModelConfig:
    """The config that a name, a file or a folder describes, with fp8 weights as any others.

    Raises: ValueError listing the names; UnsupportedConfig, CheckpointMismatch.
    """
    if str(model) in PRESETS:
        return parse_architecture(preset(str(model)))
    path = Path(model).expanduser()
    if not path.exists():
        raise ValueError(
            f"model: expected a checkpoint, a config.json or one of {', '.join(sorted(PRESETS))}, "
            f"got {str(model)!r}"
        )
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.exists():
        source = open_checkpoint(path)
        source.close()
        return source.config
    generation = file.with_name("generation_config.json")
    return parse_architecture(
        read_json(file), read_json(generation) if generation.exists() else None
    )


def plan_json(found: Plan) -> dict[str, Any]:
    """The plan as JSON values. Bytes are of one device where a key does not say otherwise.

    `bytes_per_device.kv` are the pools that the workload asks for; `kv_bytes_left` is what weights
    and activations leave for pages on all devices together, those pools included.
    """
    chosen = found.chosen
    document: dict[str, Any] = {
        "fits": found.fits,
        "min_gpus": found.min_gpus,
        "min_gpus_source": "analytic",
        "layout": None,
        "latents": None,
        "bytes_per_device": None,
        "kv_bytes_left": 0,
        "kv_tokens_left": 0,
        "source": "analytic",
    }
    if chosen is not None:
        footprint = chosen.footprint
        document |= {
            **_memory_json(chosen),
            "weights_by_kind": footprint.weights,
            "temp_by_phase": {
                "prefill": chosen.prefill_temp_bytes,
                "decode": chosen.decode_temp_bytes,
            },
            "kv_bytes_per_token": footprint.kv_bytes_per_token,
            "parameters": sum(footprint.parameters.values()),
            "parameters_by_kind": footprint.parameters,
            "model_bytes": sum(footprint.model_bytes.values()),
            "prefill": _time_json(chosen.prefill),
            "decode": _time_json(chosen.decode),
            "compiled": chosen.compiled,
        }
    document |= {
        "gpu": {"count": found.num_gpus, **dataclasses.asdict(found.gpu), "kind": "cited"},
        "usable_bytes": found.gpu.usable_bytes,
        "workspace_bytes": WORKSPACE_BYTES,
        "dtype": found.dtype,
        "unweight": _unweight_json(found),
        "workload": found.load,
        "layouts": [_candidate_json(candidate) for candidate in found.candidates],
    }
    return document


def _unweight_json(found: Plan) -> dict[str, Any] | None:
    """Coded weights beside dense ones of the same layout; None for a plan of dense weights.

    `moved_bytes` of a variant are what a decode microbatch reads and writes of weights on one
    device.
    """
    own = found.unweight
    if own.form == NONE:
        return None
    bits = FORMS[own.form]
    document: dict[str, Any] = {
        "form": own.form,
        "variant": own.variant,
        "bits_per_value": bits,
        "bits_source": {kind: SOURCES[kind] for kind in bits},
        "dense_kinds": DENSE_KINDS,
        "min_gpus_dense": found.min_gpus_dense,
    }
    if found.chosen is None:
        return document
    chosen, dense = found.chosen, found.chosen.dense
    return document | {
        "weights_by_coding": chosen.footprint.weights_by_coding,
        "dense": {**_memory_json(dense), "fits": dense.fits, "decode_s": dense.decode.total_s},
        "kv_tokens_more": chosen.kv_tokens_left - dense.kv_tokens_left,
        "variants": {
            each.footprint.unweight.variant: {
                "temp_bytes": each.footprint.decoding_temp,
                "moved_bytes": each.decode.tick.weight_bytes,
                "prefill_s": each.prefill.total_s,
                "decode_s": each.decode.total_s,
            }
            for each in map(chosen.decoded_by, own.variants())
        },
    }


def _memory_json(found: Fitting) -> dict[str, Any]:
    return {
        "layout": found.shape,
        "latents": found.latents,
        "bytes_per_device": {
            "weights": found.weights_bytes,
            "kv": found.kv_bytes,
            "temp": found.temp_bytes,
            "total": found.total_bytes,
        },
        "kv_bytes_left": found.kv_bytes_left,
        "kv_tokens_left": found.kv_tokens_left,
        "source": found.source,
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    if not isinstance(candidate, Fitting):
        named = {"layout": candidate.shape, "latents": candidate.latents}
        return {**named, "fits": False, "refusal": candidate.refusal}
    return {
        **_memory_json(candidate),
        "fits": candidate.fits,
        "refusal": candidate.refusal,
        "prefill_s": candidate.prefill.total_s,
        "prefill_tokens": candidate.prefill.tokens,
        "prefill_tokens_per_s": candidate.prefill.tokens_per_s,
        "decode_s": candidate.decode.total_s,
        "decode_tokens_per_s": candidate.decode.tokens_per_s,
    }


def _time_json(time: PhaseTime) -> dict[str, Any]:
    return {**dataclasses.asdict(time), "tokens_per_s": time.tokens_per_s, "bound": time.bound}
