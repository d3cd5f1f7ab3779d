"""The device side of an engine: two meshes (or one), their pools and the programs between them.

The runner turns a plan's lists into arrays and issues programs; it decides nothing. All calls
return before the devices are done.
"""

import dataclasses
from collections.abc import Sequence as Listed
from typing import Any

import jax
import numpy as np

from jinfire.checkpoints import TensorSource
from jinfire.config import EngineConfig, Placement
from jinfire.kvcache.page_set import HeldPages, KVGroup, PageSet, kv_groups
from jinfire.kvcache.page_table import pages_for
from jinfire.kvcache.pages import Pools, make_pools, pool_bytes
from jinfire.layout import StageLayout
from jinfire.programs.batch import (
    DecodeControl,
    DecodeRows,
    DecodeTokens,
    NewRow,
    PrefillBatch,
    sampling_arrays,
    set_sampling,
)
from jinfire.programs.decode import decode_microbatches, decode_program
from jinfire.programs.handoff import Handoff, Transit
from jinfire.programs.prefill import prefill_program
from jinfire.programs.runtime import CompileLog, MeshModel, Program
from jinfire.programs.sampler import Sampled
from jinfire.progress import progress
from jinfire.sequence import DecodePlan, Grants, PrefillPlan, Sequence
from jinfire.unweight.policy import Unweight, UnweightPolicy, as_policies, check_dtype
from sharding import Device, Schedule, split_devices

DEVICE_STOP_IDS = 8
"""Stop ids a row carries on the device. The host checks all of them; these save steps."""


class Runner:
    """Weights, pools, decode rows and programs of one placement.

    Raises: ValueError when the devices or the model do not allow the placement.
    """

    def __init__(
        self,
        source: TensorSource,
        placement: Placement,
        config: EngineConfig,
        dtype: np.dtype,
        devices: Listed[Device] | None = None,
        unweight: Unweight = None,
    ) -> None:
        self.placement = placement
        self.config = config
        self.log = CompileLog()
        specs = [placement.prefill, *([placement.decode] if placement.decode else [])]
        groups = split_devices(specs, devices)
        policies = _policies(unweight, len(specs), dtype)
        for spec in specs:  # an impossible one is refused before any weight is read
            StageLayout(source.config, spec)
        self._groups = kv_groups(source.config, config)
        names = ["weights"] if len(specs) == 1 else ["prefill weights", "decode weights"]
        models = [
            MeshModel.load(source, spec, group, dtype, self.log, name, policy)
            for spec, group, name, policy in zip(specs, groups, names, policies, strict=True)
        ]
        self.prefill_model, self.decode_model = models[0], models[-1]
        self._models = models
        self._dtype = dtype
        self.reset()
        self._prefill = prefill_program(self.prefill_model)
        self._decode: dict[tuple[int, int], Program] = {}
        rings = {group.name: group.ring for group in self._groups}
        self._handoff = Handoff(self.prefill_model, self.decode_model, rings)

    def reset(self) -> None:
        """Empty pools and rows: at the start, and after a step that was broken off."""
        self._pools: list[Pools] = []  # the old ones are freed first
        # One entry for both phases when colocated: donated pools are replaced in one place.
        sizes = {group.name: group.pool_pages for group in self._groups}
        self._pools = [
            make_pools(model.layout, model.mesh, sizes, self.config.page_size, self._dtype)
            for model in self._models
        ]
        self._rows = self._empty_rows()
        self._halt: set[int] = set()

    def page_sets(self) -> tuple[PageSet, PageSet]:
        """The books of empty pools, of prefill and decode; one for both when colocated."""
        config = self.config
        sets = [
            PageSet(self._groups, config.page_size, config.prefix_caching) for _ in self._models
        ]
        return sets[0], sets[-1]

    @property
    def is_colocated(self) -> bool:
        return self.placement.is_colocated

    @property
    def prefill_microbatches(self) -> int:
        """Microbatches M of a prefill dispatch: enough to keep every stage at work."""
        return self.config.microbatches or self.prefill_model.stages

    def stats(self) -> dict[str, Any]:
        """Sizes and counters of the device side. Units are in the names."""
        weights = [weight for model in self._models for weight in model.params.values()]
        return {
            "placement": str(self.placement),
            "weight_bytes": sum(weight.nbytes for weight in weights),
            "unweight": [
                {name: str(choice) for name, choice in model.layout.coded_projections.items()}
                for model in self._models
            ],
            "kv_pool_bytes": sum(map(pool_bytes, self._pools)),
            "compile_count": self.log.count,
            "compile_seconds": self.log.seconds,
            "bubble_fraction": self.bubble_fractions(),
        }

    def bubble_fractions(self) -> dict[str, float]:
        """Share of stage time without work, of a full prefill and of a full decode dispatch."""
        config, stages = self.config, self.decode_model.stages
        rows = config.decode_rows()[-1]
        microbatches = decode_microbatches(stages, rows, config.microbatches)
        return {
            "prefill": Schedule(
                self.prefill_model.stages, self.prefill_microbatches
            ).bubble_fraction,
            "decode": Schedule(stages, microbatches, config.decode_steps).bubble_fraction,
        }

    def prefill(self, plan: PrefillPlan) -> Sampled:
        """Issue one prefill; row (m, r) of the result belongs to `plan.chunks[m][r]`."""
        microbatches, rows, chunk_size = plan.shape
        shape = (microbatches, rows)
        token_ids = np.zeros((*shape, chunk_size), np.int32)
        starts, lengths = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        wants_token = np.zeros(shape, np.bool_)
        tables = self._tables((*shape, plan.width))
        sampling = sampling_arrays(shape)
        for m, chunks in enumerate(plan.chunks):
            for r, chunk in enumerate(chunks):
                sequence, end = chunk.sequence, chunk.start + chunk.length
                token_ids[m, r, : chunk.length] = sequence.tokens[chunk.start : end]
                starts[m, r], lengths[m, r] = chunk.start, chunk.length
                wants_token[m, r] = chunk.is_last
                columns = pages_for(end, self.config.page_size)
                _fill(tables, (m, r), sequence.prefill_pages, columns)
                if chunk.is_last:
                    set_sampling(sampling, (m, r), sequence.request)
        batch = PrefillBatch(token_ids, starts, lengths, wants_token, tables, sampling)
        self._pools[0], sampled = self._prefill(self.prefill_model.params, self._pools[0], batch)
        return sampled

    def send(self, sequence: Sequence, sampled: Sampled) -> Transit:
        """Start moving a prefilled sequence to the decode mesh; right behind its prefill."""
        count = pages_for(sequence.computed, self.config.page_size)
        return self._handoff.send(self._pools[0], sequence.prefill_pages.first(count), sampled)

    def install(self, sequence: Sequence, transit: Transit, source: tuple[int, int]) -> None:
        """Put an arrived sequence into its row. `source` is its (m, r) in the prefill."""
        assert sequence.row is not None
        self._halt.discard(sequence.row)  # the row has a new owner, and new state
        tables = self._tables((self.config.table_width,))
        _fill(tables, (), sequence.decode_pages, sequence.decode_pages.columns)
        stop_ids = np.full(DEVICE_STOP_IDS, -1, np.int32)
        known = sorted(sequence.stop_ids)[:DEVICE_STOP_IDS]
        stop_ids[: len(known)] = known
        sampling = sampling_arrays((1,))
        set_sampling(sampling, (0,), sequence.request)
        row = NewRow(
            row=np.int32(sequence.row),
            source=np.array(source, np.int32),
            position=np.int32(sequence.computed),
            remaining=np.int32(sequence.limit - sequence.computed - 1),
            page_tables=tables,
            stop_ids=stop_ids,
            sampling=jax.tree.map(lambda leaf: leaf[0], sampling),
        )
        self._pools[-1], self._rows = self._handoff.install(
            self._pools[-1], self._rows, transit, sequence.decode_pages.by_group, row
        )

    def halt(self, rows: list[int]) -> None:
        """Stop rows before the next decode dispatch."""
        self._halt.update(rows)

    def decode(self, plan: DecodePlan) -> DecodeTokens:
        """Issue one decode dispatch; tokens come back [J, row bucket]."""
        return self._dispatch_decode(plan.row_bucket, plan.width, plan.grants)

    def warmup(self) -> None:
        """Compile every program that any plan can ask for, by running it on padding."""
        config = self.config
        shapes = [(r, c, w) for r, c in config.prefill_shapes for w in config.context_widths()]
        sampled: dict[int, Sampled] = {}
        for rows, chunk, width in progress(shapes, desc="compile prefill"):
            plan = PrefillPlan((self.prefill_microbatches, rows, chunk), width, [])
            sampled[rows] = self.prefill(plan)
        for result in progress(sampled.values(), desc="compile install"):
            self._warm_handoff(result, 1)
        if not self.is_colocated:
            for bucket in progress(self._handoff.buckets, desc="compile handoff"):
                self._warm_handoff(next(iter(sampled.values())), bucket)
        buckets = [(b, w) for b in config.decode_rows() for w in config.context_widths()]
        for rows, width in progress(buckets, desc="compile decode"):
            self._dispatch_decode(rows, width, {})
        jax.block_until_ready(self._rows.token)

    def _warm_handoff(self, sampled: Sampled, num_pages: int) -> None:
        # Null pages to null pages, into a row with nothing left to decode.
        pages = {group.name: [0] * min(num_pages, group.ring) for group in self._groups}
        transit = self._handoff.send(self._pools[0], pages, sampled)
        row = NewRow(
            row=np.int32(0),
            source=np.zeros(2, np.int32),
            position=np.int32(0),
            remaining=np.int32(0),
            page_tables=self._tables((self.config.table_width,)),
            stop_ids=np.full(DEVICE_STOP_IDS, -1, np.int32),
            sampling=jax.tree.map(lambda leaf: leaf[0], sampling_arrays((1,))),
        )
        self._pools[-1], self._rows = self._handoff.install(
            self._pools[-1], self._rows, transit, pages, row
        )

    def _dispatch_decode(self, rows: int, width: int, grants: Grants) -> DecodeTokens:
        config = self.config
        program = self._decode.get((rows, width))
        if program is None:
            program = self._decode[rows, width] = decode_program(
                self.decode_model, config.decode_steps, rows, width, config.microbatches
            )
        halt = np.zeros(config.max_rows, np.bool_)
        halt[list(self._halt)] = True
        self._halt.clear()
        control = DecodeControl(halt, {g.name: self._granted(grants, g) for g in self._groups})
        self._pools[-1], self._rows, tokens = program(
            self.decode_model.params, self._pools[-1], self._rows, control
        )
        return tokens

    def _granted(self, grants: Grants, group: KVGroup) -> np.ndarray:
        """One group's grants, padded to what all rows can need for J more tokens."""
        config = self.config
        capacity = config.max_rows * (config.decode_steps // config.page_size + 2)
        granted = np.full((capacity, 3), config.max_rows, np.int32)  # row max_rows is padding
        if listed := grants.get(group.name):
            granted[: len(listed)] = listed
        return granted

    def _tables(self, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        return {group.name: np.zeros(shape, np.int32) for group in self._groups}

    def _empty_rows(self) -> DecodeRows:
        count = self.config.max_rows
        zeros = np.zeros(count, np.int32)
        return self.decode_model.replicate(
            DecodeRows(
                token=zeros,
                position=zeros,
                remaining=zeros,
                active=np.zeros(count, np.bool_),
                page_tables=self._tables((count, self.config.table_width)),
                stop_ids=np.full((count, DEVICE_STOP_IDS), -1, np.int32),
                sampling=sampling_arrays((count,)),
            )
        )


def _policies(unweight: Unweight, num_meshes: int, dtype: np.dtype) -> list[UnweightPolicy | None]:
    """How each mesh compresses its weights.

    Raises: ValueError where one mesh has two policies, or the data type is not compressed.
    """
    policies = as_policies(unweight)
    if not policies.are_dense:
        check_dtype(dtype)
    if num_meshes == 1 and policies.prefill != policies.decode:
        raise ValueError(
            "unweight: expected one policy where prefill and decode share a mesh, got two"
        )
    return [policies.prefill, policies.decode][:num_meshes]


def _fill(
    tables: dict[str, np.ndarray], row: tuple[int, ...], held: HeldPages, columns: int
) -> None:
    """Writes a sequence's first columns into its row of every group's table."""
    for group, table in tables.items():
        table[row][:columns] = held.table(group, 0, columns)


@dataclasses.dataclass
class Issued:
    """A decode dispatch whose tokens the host has not read."""

    plan: DecodePlan
    tokens: DecodeTokens
