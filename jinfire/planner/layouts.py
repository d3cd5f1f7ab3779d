"""The layouts of a number of GPUs: which fit, what they hold, how fast they could be."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Self

from jinfire.config import LATENTS, Layout, ModelConfig, Placement
from jinfire.layout import StageLayout
from jinfire.planner.footprint import Footprint, Workload
from jinfire.planner.gpus import GIB, GPU, parse_gpus
from jinfire.planner.roofline import PhaseTime, decode_time, prefill_time
from jinfire.planner.unweight import DENSE, NONE, Unweight
from sharding import Collective, MeshSpec

# Layouts of more GPUs are not searched for the least number; links between servers are slower
# than those that times are predicted for.
MAX_GPUS = 64

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of the whole steps; bytes of one device.

    `weights_bytes` are the arguments less the pages. `prefill_s` and `decode_s` are what tracing
    and compiling took, `host_bytes` the most memory of the process that did it. `kernels` are how
    often the programs call each kernel of `pallas_kernels`. The collectives are those of one
    dispatch: a chunk for every stage, or all decode steps of `Workload.steps`.
    """

    weights_bytes: int
    prefill_temp_bytes: int
    decode_temp_bytes: int
    prefill_s: float
    decode_s: float
    host_bytes: int
    kernels: dict[str, int]
    prefill_collectives: tuple[Collective, ...]
    decode_collectives: tuple[Collective, ...]


@dataclasses.dataclass(frozen=True)
class Fitting:
    """A layout that the model can be split over, and its memory per device."""

    footprint: Footprint
    gpu: GPU
    load: Workload
    compiled: Compiled | None = None

    @property
    def mesh_spec(self) -> MeshSpec:
        return self.footprint.layout.mesh_spec

    @property
    def shape(self) -> tuple[int, int, int]:
        """(pipeline, tensor, expert), as `Placement` takes it."""
        return layout_of(self.mesh_spec)

    @property
    def dense(self) -> "Fitting":
        """The same layout with dense weights."""
        return self.decoded_by(DENSE)

    def decoded_by(self, unweight: Unweight) -> "Fitting":
        """The same layout with weights in another form, or decoded by another variant."""
        footprint = dataclasses.replace(self.footprint, unweight=unweight)
        return dataclasses.replace(self, footprint=footprint, compiled=None)

    @property
    def latents(self) -> str:
        return self.footprint.layout.latents

    @property
    def source(self) -> str:
        """Where weights and temp come from."""
        return "compiled" if self.compiled else "analytic"

    @property
    def weights_bytes(self) -> int:
        if self.compiled:
            return self.compiled.weights_bytes
        return sum(self.footprint.weights.values())

    @property
    def prefill_temp_bytes(self) -> int:
        if self.compiled:
            return self.compiled.prefill_temp_bytes
        return self.footprint.prefill_temp(self.load)

    @property
    def decode_temp_bytes(self) -> int:
        if self.compiled:
            return self.compiled.decode_temp_bytes
        return self.footprint.decode_temp(self.load)

    @property
    def temp_bytes(self) -> int:
        """Activations of the larger step; one runs at a time."""
        return max(self.prefill_temp_bytes, self.decode_temp_bytes)

    @property
    def kv_bytes(self) -> int:
        """Pools for every row's whole context."""
        return self.footprint.kv_bytes(self.load)

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.temp_bytes

    @property
    def device_kv_bytes_left(self) -> int:
        """What weights and activations leave for pages on one device; below 0 they do not fit."""
        return self.gpu.usable_bytes - self.weights_bytes - self.temp_bytes

    @property
    def kv_bytes_left(self) -> int:
        """The same over all devices of the layout, 0 where there is nothing left."""
        return max(0, self.device_kv_bytes_left) * self.mesh_spec.size

    @property
    def kv_tokens_left(self) -> int:
        """Tokens of all rows that those pages hold."""
        return self.footprint.kv_tokens(self.device_kv_bytes_left, self.load)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.gpu.usable_bytes

    @property
    def prefill(self) -> PhaseTime:
        return prefill_time(self.footprint, self.gpu, self.load)

    @property
    def decode(self) -> PhaseTime:
        return decode_time(self.footprint, self.gpu, self.load)

    @property
    def refusal(self) -> str | None:
        """Why the layout does not fit, None where it does."""
        if self.fits:
            return None
        weights, kv, temp = (
            f"{size / GIB:.1f}" for size in (self.weights_bytes, self.kv_bytes, self.temp_bytes)
        )
        return (
            f"needs {self.total_bytes / GIB:.1f} GiB a device (weights {weights}, KV of "
            f"{self.load.rows} x {self.load.context} tokens {kv}, temp {temp}), "
            f"{self.gpu.name} has {self.gpu.usable_bytes / GIB:.1f}"
        )


@dataclasses.dataclass(frozen=True)
class Refused:
    """A layout over which the model cannot be split, and why."""

    shape: tuple[int, int, int]
    refusal: str
    latents: str = LATENTS[0]


Candidate = Fitting | Refused


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a model needs on a number of GPUs.

    `chosen` is the asked layout, else the fastest at decode that fits, else the one that needs the
    least memory; None where the model cannot be split over so many GPUs at all. `min_gpus` is
    counted from shapes, whatever was compiled.
    """

    config: ModelConfig
    gpu: GPU
    num_gpus: int
    load: Workload
    dtype: str
    candidates: tuple[Candidate, ...]
    chosen: Fitting | None
    min_gpus: int | None
    unweight: Unweight = DENSE

    @property
    def fits(self) -> bool:
        return self.chosen is not None and self.chosen.fits

    @functools.cached_property
    def min_gpus_dense(self) -> int | None:
        """What `min_gpus` is with dense weights."""
        if self.unweight.form == NONE:
            return self.min_gpus
        latents = tuple(dict.fromkeys(each.latents for each in self.candidates))
        return _Asked(self.config, self.gpu, self.load, self.dtype, DENSE, latents).least_gpus()

    def verified(self, verify: Callable[[Fitting], Fitting]) -> Self:
        """The plan with its choice compiled by `verify`.

        Where the compiler's figures do not fit, the next that fits by the formulas is compiled,
        until one does or none is left.
        """
        chosen, candidates = self.chosen, self.candidates
        while chosen is not None and chosen.compiled is None:
            compiled = verify(chosen)
            candidates = tuple(compiled if each is chosen else each for each in candidates)
            chosen = choose(candidates)
            if chosen is not None and not chosen.fits:
                # None is left: what the compiler said of, though a formula names less elsewhere.
                chosen = choose(tuple(each for each in candidates if is_compiled(each)))
        return dataclasses.replace(self, chosen=chosen, candidates=candidates)


def plan_model(
    config: ModelConfig,
    gpus: str,
    *,
    layout: Layout | None = None,
    load: Workload | None = None,
    dtype: str = "bfloat16",
    unweight: str = NONE,
    latents: str = LATENTS[0],
) -> Plan:
    """The plan of a model on `gpus`, e.g. "8xH100".

    `layout` is (pipeline, tensor) or (pipeline, tensor, expert); None compares all. `unweight` is
    the form that weights lie in on the devices. `latents` is one of `LATENTS`, "auto" compares
    both.
    Raises: ValueError for an unknown GPU or form, a layout of another number of GPUs, a context
    that the model does not have, split latents of a model without any.
    """
    form = Unweight.of(unweight)
    gpu, count = parse_gpus(gpus)
    load = load or Workload.of(config)
    load.check(config)
    asked = _Asked(config, gpu, load, dtype, form, _latents_choices(config, latents))
    if layout is None:
        specs = list(mesh_specs(count))
    else:
        specs = [Placement.colocated(layout).prefill]
        if specs[0].size != count:
            raise ValueError(
                f"layout {specs[0]}: expected one of {count} devices, got {specs[0].size}"
            )
    candidates = tuple(itertools.chain.from_iterable(map(asked.candidates, specs)))
    return Plan(
        config,
        gpu,
        count,
        load,
        dtype,
        candidates,
        choose(candidates),
        asked.least_gpus(),
        form,
    )


def mesh_specs(count: int) -> Iterator[MeshSpec]:
    """Every layout of so many devices; less pipeline and less expert first."""
    for pipeline in _divisors(count):
        for expert in _divisors(count // pipeline):
            tensor = count // pipeline // expert
            yield MeshSpec(pipeline=pipeline, expert=expert, tensor=tensor)


def choose(candidates: tuple[Candidate, ...]) -> Fitting | None:
    """The fastest at decode of those that fit, else the one that needs the least memory."""
    possible = [candidate for candidate in candidates if isinstance(candidate, Fitting)]
    fitting = [candidate for candidate in possible if candidate.fits]
    if fitting:
        return min(fitting, key=lambda found: found.decode.total_s)
    return min(possible, key=lambda found: found.total_bytes, default=None)


def is_compiled(candidate: Candidate) -> bool:
    return isinstance(candidate, Fitting) and candidate.compiled is not None


def layout_of(spec: MeshSpec) -> tuple[int, int, int]:
    """(pipeline, tensor, expert) of a mesh."""
    return (spec.pipeline, spec.tensor, spec.expert)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What candidates have in common. `latents` are the choices to compare."""

    config: ModelConfig
    gpu: GPU
    load: Workload
    dtype: str
    unweight: Unweight
    latents: tuple[str, ...]

    def candidates(self, spec: MeshSpec) -> Iterator[Candidate]:
        """One for each choice that makes a difference."""
        single = spec.tensor * spec.expert == 1
        for latents in self.latents[:1] if single else self.latents:
            try:
                layout = StageLayout(self.config, spec, latents=latents)
                layout.page_slots(self.load.page_size)
            except ValueError as error:
                yield Refused(layout_of(spec), str(error), latents)
            else:
                yield Fitting(Footprint(layout, self.dtype, self.unweight), self.gpu, self.load)

    def least_gpus(self) -> int | None:
        """The smallest number of GPUs of which some layout fits."""
        for count in range(1, MAX_GPUS + 1):
            for candidate in itertools.chain.from_iterable(map(self.candidates, mesh_specs(count))):
                if isinstance(candidate, Fitting) and candidate.fits:
                    return count
        return None


def _latents_choices(config: ModelConfig, latents: str) -> tuple[str, ...]:
    """Raises: ValueError for another choice, and for split latents of a model without any."""
    if latents == AUTO:
        return LATENTS if config.latent is not None else LATENTS[:1]
    if latents not in LATENTS:
        raise ValueError(f"latents: expected one of {', '.join(LATENTS)}, {AUTO}, got {latents!r}")
    StageLayout(config, MeshSpec(), latents=latents)
    return (latents,)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
