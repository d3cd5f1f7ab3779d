"""The `quantization_config` of a checkpoint: the one int4 scheme that is read, and refusals."""

import dataclasses
import itertools
import math
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

# A pattern comes from an untrusted file: it is a list of these, of which none repeats another, and
# it is matched without going back.
TOKEN = re.compile(r"\.\*|\\?\.|[\w-]+|\((?:[\w-]+\|)*[\w-]+\)")
ANYTHING = ".*"
MAX_PATTERN = 200
MAX_PATTERNS = 32


def read_int4(
    config: Json, whole: Iterable[str], quantised: Iterable[str], prefix: str = ""
) -> bool:
    """Whether the routed experts are stored as 4-bit integers, 32 to a scale.

    `whole` are names of modules that must be ignored by the scheme, `quantised` of such that must
    not; they may stand in the file with `prefix` or without.
    Source: compressed-tensors, format "pack-quantized".

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
    _check_ignored(scheme.get("ignore"), f"{where}.ignore", whole, quantised, prefix)
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
    entries: Any, where: str, whole: Iterable[str], quantised: Iterable[str], prefix: str
) -> None:
    ok = isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)
    require(ok, where, "a list of names", entries)
    exact = set(entries)
    patterns: list[Glob] = []
    for text in dict.fromkeys(entry[3:] for entry in entries if entry.startswith("re:")):
        patterns += _globs(text, where, MAX_PATTERNS - len(patterns))

    def is_ignored(module: str) -> bool:
        return any(
            name in exact or any(pattern.matches(name) for pattern in patterns)
            for name in dict.fromkeys((module, prefix + module))
        )

    for module in whole:
        if not is_ignored(module):
            raise UnsupportedConfig(f"{where}: expected {module} too: only experts may be int4")
    for module in quantised:
        if is_ignored(module):
            raise UnsupportedConfig(f"{where}: {module} is ignored: expected int4 experts")


@dataclasses.dataclass(frozen=True)
class Glob:
    """A pattern without alternatives: `pieces` of fixed length, with anything between them.

    `ends`: the last piece is the end of the name.
    """

    pieces: tuple[re.Pattern[str], ...]
    last_length: int
    ends: bool

    def matches(self, name: str) -> bool:
        """Whether the beginning of a name matches.

        The first place of each piece leaves the most to the others, so none is tried twice.
        """
        first, *rest = self.pieces
        found = first.match(name)
        for piece in rest:
            if found is None:
                return False
            found = piece.search(name, found.end())
        if found is None or not self.ends:
            return found is not None
        start = len(name) - self.last_length
        # With one piece alone it begins where the name does.
        in_place = start >= found.start() if rest else start == 0
        return in_place and self.pieces[-1].match(name, start) is not None


def _globs(text: str, where: str, room: int) -> list[Glob]:
    """A pattern with each choice of its alternatives.

    Raises: UnsupportedConfig where it has other parts than `TOKEN`, or more choices than `room`.
    """
    require(len(text) <= MAX_PATTERN, where, "plain patterns", text)
    body = text.removeprefix("^")
    ends = body.endswith("$")
    body = body.removesuffix("$")
    choices: list[list[str]] = []
    position = 0
    while position < len(body):
        token = TOKEN.match(body, position)
        require(token is not None, where, "plain patterns", text)
        assert token is not None
        part = token.group()
        choices.append(part[1:-1].split("|") if part.startswith("(") else [part])
        position = token.end()
    choices = [list(dict.fromkeys(parts)) for parts in choices]
    few = math.prod(map(len, choices)) <= room
    require(few, where, f"at most {MAX_PATTERNS} patterns, alternatives counted", text)
    return [_glob(parts, ends) for parts in itertools.product(*choices)]


def _glob(parts: Iterable[str], ends: bool) -> Glob:
    pieces = [""]
    length = 0
    for part in parts:
        if part == ANYTHING:
            pieces.append("")
            length = 0
        else:
            pieces[-1] += part
            length += 1 if part in (".", "\\.") else len(part)
    return Glob(tuple(map(re.compile, pieces)), length, ends)
