"""Which weights are held compressed, in which form, and how each product reads them: plain data.

A *variant* is a way from a resident form to a product. The choice of one falls per projection and
row bucket, and per mesh.
"""

import dataclasses
import fnmatch
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

DENSE = "dense"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A resident form and what a product makes of it.

    `decompressed` weights are multiplied as dense ones are, by the same operation. `written` is
    what goes through device memory before the product, relative to the bfloat16 weights.
    """

    form: str
    decompressed: bool
    written: float
    meaning: str


VARIANTS = {
    "full": Variant("huffman", True, 1, "decompress, then the dense product"),
    "exponent": Variant("huffman", False, 1 / 2, "exponents, then the reconstructive product"),
    "transcode": Variant("huffman", False, 1 / 4, "palette codes, then the reconstructive product"),
    "direct": Variant("palette", False, 0, "the reconstructive product of palette codes"),
    "full_palette": Variant("palette", True, 1, "decompress, then the dense product"),
    "compact": Variant("compact", False, 0, "the reconstructive product of 3-bit codes"),
    "full_compact": Variant("compact", True, 1, "decompress, then the dense product"),
}

# Weights that are operands of something else than a plain product are decompressed for it.
DECOMPRESSED = {"huffman": "full", "palette": "full_palette", "compact": "full_compact"}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The variant of one projection for every number of rows.

    `buckets` are (most rows, variant), ascending; None is any number, and comes last.
    Raises: ValueError for an unknown variant, buckets out of order, or variants of several forms:
    a weight is resident in one.
    """

    buckets: tuple[tuple[int | None, str], ...]

    def __post_init__(self) -> None:
        for _, variant in self.buckets:
            if variant != DENSE and variant not in VARIANTS:
                raise ValueError(
                    f"variant: expected {DENSE!r} or one of {', '.join(map(repr, VARIANTS))}, "
                    f"got {variant!r}"
                )
        limits = [limit for limit, _ in self.buckets]
        numbers = [limit for limit in limits[:-1] if type(limit) is int and limit > 0]
        ascending = all(a < b for a, b in itertools.pairwise(numbers))
        if not limits or limits[-1] is not None or len(numbers) < len(limits) - 1 or not ascending:
            raise ValueError(
                "buckets: expected (most rows, variant) in ascending order, the last of None, "
                f"got {list(self.buckets)}"
            )
        forms = {
            DENSE if variant == DENSE else VARIANTS[variant].form for _, variant in self.buckets
        }
        if len(forms) > 1:
            raise ValueError(
                f"buckets: expected variants of one resident form, got {list(self.buckets)} of "
                f"{', '.join(sorted(forms))}"
            )

    @classmethod
    def always(cls, variant: str) -> Self:
        return cls(((None, variant),))

    @property
    def is_dense(self) -> bool:
        return self.buckets[0][1] == DENSE

    @property
    def form(self) -> str:
        """The resident form. Raises: KeyError for a dense choice, which has none."""
        return VARIANTS[self.buckets[0][1]].form

    def variant(self, num_rows: int) -> str:
        """The variant of a product with so many rows."""
        return next(v for limit, v in self.buckets if limit is None or num_rows <= limit)

    def __str__(self) -> str:
        if len(self.buckets) == 1:
            return self.buckets[0][1]
        *some, (_, rest) = self.buckets
        return ", ".join([f"{variant} to {limit} rows" for limit, variant in some] + [rest])


@dataclasses.dataclass(frozen=True)
class UnweightPolicy:
    """The choice for every projection of a model on one mesh.

    `projections` are (pattern, choice): the first pattern that a projection's name fits decides,
    and `default` where none does. Names are those of the layers, such as `attention.query`,
    `mlp.gate`, `mlp.experts.down`, `mlp.shared.up`, `embed` and `head`; `*` stands for anything.
    """

    default: Choice
    projections: tuple[tuple[str, Choice], ...] = ()

    @classmethod
    def uniform(cls, variant: str, projections: Sequence[str] = ("*",)) -> Self:
        """One variant for all projections, or for those of some patterns and the others dense."""
        choice = Choice.always(variant)
        if "*" in projections:
            return cls(choice)
        return cls(Choice.always(DENSE), tuple((pattern, choice) for pattern in projections))

    def choice(self, projection: str) -> Choice:
        """What the policy says of a projection, whatever the weight is used for."""
        for pattern, choice in self.projections:
            if fnmatch.fnmatchcase(projection, pattern):
                return choice
        return self.default

    def to_json(self) -> dict[str, Any]:
        return {
            "default": [list(bucket) for bucket in self.default.buckets],
            "projections": {
                pattern: [list(bucket) for bucket in choice.buckets]
                for pattern, choice in self.projections
            },
        }

    @classmethod
    def from_json(cls, document: Any, where: str = "policy") -> Self:
        """The policy that `to_json` wrote; a variant alone stands for all numbers of rows.

        Raises: ValueError naming the part that is wrong.
        """
        if not isinstance(document, dict) or not document.keys() <= {"default", "projections"}:
            raise ValueError(
                f'{where}: expected {{"default": ..., "projections": {{...}}}}, got {document!r}'
            )
        projections = document.get("projections", {})
        if not isinstance(projections, dict):
            raise ValueError(f"{where}.projections: expected an object, got {projections!r}")
        return cls(
            _read_choice(document.get("default", DENSE), f"{where}.default"),
            tuple(
                (pattern, _read_choice(value, f"{where}.projections[{pattern!r}]"))
                for pattern, value in projections.items()
            ),
        )


def _read_choice(value: Any, where: str) -> Choice:
    buckets = [[None, value]] if isinstance(value, str) else value
    if not isinstance(buckets, list) or not all(
        isinstance(bucket, list) and len(bucket) == 2 and isinstance(bucket[1], str)
        for bucket in buckets
    ):
        raise ValueError(f"{where}: expected a variant or [[most rows, variant], ...], got {value}")
    try:
        return Choice(tuple((limit, variant) for limit, variant in buckets))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class PhasePolicies:
    """The policies of both meshes; one for both where phases share a mesh. None: all is dense."""

    prefill: UnweightPolicy | None = None
    decode: UnweightPolicy | None = None

    @property
    def are_dense(self) -> bool:
        return self.prefill is None and self.decode is None


Unweight = str | UnweightPolicy | PhasePolicies | None
"""A variant for all projections, a policy, one for each phase, or nothing: all is dense."""


def check_dtype(dtype: Any) -> None:
    """Raises: ValueError for weights of a data type that is not compressed."""
    if str(dtype) != "bfloat16":
        raise ValueError(f"unweight: expected dtype 'bfloat16', whose bits it codes, got '{dtype}'")


def as_policies(unweight: Unweight) -> PhasePolicies:
    """The policies that a caller means.

    Raises: ValueError for an unknown variant.
    """
    if isinstance(unweight, PhasePolicies):
        return unweight
    policy = UnweightPolicy.uniform(unweight) if isinstance(unweight, str) else unweight
    return PhasePolicies(policy, policy)


def read_policies(path: str | Path) -> PhasePolicies:
    """A policy file: of one policy, or of `{"prefill": policy, "decode": policy}`.

    Raises: ValueError naming the file and the part that is wrong.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if isinstance(document, dict) and document and document.keys() <= {"prefill", "decode"}:
        phases = {
            phase: None if part is None else UnweightPolicy.from_json(part, f"{path}: {phase}")
            for phase, part in document.items()
        }
        return PhasePolicies(phases.get("prefill"), phases.get("decode"))
    return as_policies(UnweightPolicy.from_json(document, str(path)))


def write_policies(path: str | Path, policies: PhasePolicies) -> None:
    """A policy file that `read_policies` reads."""
    if policies.prefill is not None and policies.prefill == policies.decode:
        document = policies.prefill.to_json()
    else:
        phases = {"prefill": policies.prefill, "decode": policies.decode}
        document = {
            phase: None if policy is None else policy.to_json() for phase, policy in phases.items()
        }
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
