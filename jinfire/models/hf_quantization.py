"""The `quantization_config` of a checkpoint: the one int4 scheme that is read, and refusals."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jinfire.errors import UnsupportedConfig
from jinfire.models.hf_fields import Json, require

FP8 = "fp8"

# Fields of a scheme whose listed values are the ones that are read; null counts as absent.
SCHEME: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "strategy": ("group",),
    "group_size": (32,),
    "symmetric": (True,),
    "dynamic": (False, None),
    "actorder": (None,),
    "block_structure": (None,),
    "zp_dtype": (None,),
    "scale_dtype": (None,),
}
# How the values were found is of no account.
SCHEME_NOTES = frozenset(("observer", "observer_kwargs"))
GROUP: dict[str, tuple[Any, ...]] = {
    "targets": (["Linear"],),
    "input_activations": (None,),
    "output_activations": (None,),
    "format": ("pack-quantized", None),
}
WHOLE: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",),
    "format": ("pack-quantized",),
    "quantization_status": ("compressed", None),
    "kv_cache_scheme": (None,),
    "sparsity_config": ({}, None),
    "transform_config": ({}, None),
    "global_compression_ratio": (None,),
}
WHOLE_NOTES = frozenset(("version", "config_groups", "ignore"))

# Patterns come from an untrusted file: only such that cannot run away are matched.
PLAIN_PATTERN = re.compile(r"(?:[\w\-^$]|\\?\.|\.\*|\((?:[\w-]+\|)*[\w-]+\))*")
MAX_PATTERN = 200
MAX_STARS = 4
MAX_PATTERNS = 64


def read_int4(config: Json, whole: Iterable[str], quantised: Iterable[str]) -> bool:
    """Whether the routed experts are stored as 4-bit integers, 32 to a scale.

    `whole` are names of modules that must be ignored by the scheme, `quantised` of such that must
    not. Source: compressed-tensors, format "pack-quantized".

    Raises: UnsupportedConfig naming the field, for every other quantisation.
    """
    scheme = config.get("quantization_config")
    if scheme is None:
        return False
    where = "quantization_config"
    require(isinstance(scheme, Mapping), where, "a JSON object", scheme)
    if scheme.get("quant_method") == FP8:
        raise UnsupportedConfig(
            f"{where}.quant_method: fp8 weights are not read; expected a checkpoint in bfloat16 or "
            "with int4 experts (compressed-tensors)"
        )
    _check(scheme, where, WHOLE, WHOLE_NOTES)
    groups = scheme.get("config_groups")
    ok = isinstance(groups, Mapping) and len(groups) == 1
    require(ok, f"{where}.config_groups", "one group", groups)
    (name,) = groups
    where_group = f"{where}.config_groups.{name}"
    group = groups[name]
    require(isinstance(group, Mapping), where_group, "a JSON object", group)
    _check(group, where_group, GROUP, frozenset(("weights",)))
    weights = group.get("weights")
    require(isinstance(weights, Mapping), f"{where_group}.weights", "a JSON object", weights)
    _check(weights, f"{where_group}.weights", SCHEME, SCHEME_NOTES)
    _check_ignored(scheme.get("ignore"), f"{where}.ignore", whole, quantised)
    return True


def _check(
    fields: Json, where: str, values: Mapping[str, tuple[Any, ...]], notes: frozenset[str]
) -> None:
    for key, allowed in values.items():
        got = fields.get(key)
        # 4 is not 4.0, and 1 is not True.
        ok = any(got == value and type(got) is type(value) for value in allowed)
        require(ok, f"{where}.{key}", repr(allowed[0]), got)
    if unknown := fields.keys() - values.keys() - notes:
        raise UnsupportedConfig(f"{where}: unknown fields {sorted(unknown)}")


def _check_ignored(
    entries: Any, where: str, whole: Iterable[str], quantised: Iterable[str]
) -> None:
    ok = isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)
    require(ok, where, "a list of names", entries)
    texts = [entry[3:] for entry in entries if entry.startswith("re:")]
    for text in texts:
        ok = PLAIN_PATTERN.fullmatch(text[:MAX_PATTERN]) and len(text) <= MAX_PATTERN
        require(bool(ok) and text.count(".*") <= MAX_STARS, where, "plain patterns", text)
    require(len(texts) <= MAX_PATTERNS, where, f"at most {MAX_PATTERNS} patterns", len(texts))
    exact, patterns = set(entries), [re.compile(text) for text in texts]

    def is_ignored(module: str) -> bool:
        return module in exact or any(pattern.match(module) for pattern in patterns)

    for module in whole:
        if not is_ignored(module):
            raise UnsupportedConfig(f"{where}: expected {module} too: only experts may be int4")
    for module in quantised:
        if is_ignored(module):
            raise UnsupportedConfig(f"{where}: {module} is ignored: expected int4 experts")
