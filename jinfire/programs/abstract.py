"""Whole prefill and decode programs of a mesh, lowered from shapes: no weight, no device needed."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jinfire.config import ModelConfig
from jinfire.kvcache.pages import Pools, pages_like, pool_specs
from jinfire.layout import CODED_SPEC, StageLayout
from jinfire.models.spec import abstract_tree
from jinfire.programs.batch import (
    DecodeControl,
    DecodeRows,
    PrefillBatch,
    Tables,
    sampling_arrays,
)
from jinfire.programs.decode import decode_program
from jinfire.programs.prefill import prefill_program
from jinfire.programs.runtime import REPLICATED, CompileLog, MeshModel
from jinfire.unweight.policy import Choice, UnweightPolicy
from jinfire.unweight.tensor import UnweightTensor
from pallas_kernels import abstract_matrix
from sharding import Device, MeshSpec, make_mesh

STOP_IDS = 8


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the arguments.

    `num_pages` are those of the pool of each KV group, the null page included; `table_width` the
    columns of a page table. A prefill microbatch has `prefill_rows` rows of `chunk` tokens, and a
    dispatch one microbatch a stage.
    """

    num_pages: Mapping[str, int]
    page_size: int
    table_width: int
    rows: int
    steps: int
    prefill_rows: int
    chunk: int


class AbstractPrograms:
    """The programs of one mesh over `devices`, which may be those of a compile-only target."""

    def __init__(
        self,
        config: ModelConfig,
        mesh_spec: MeshSpec,
        devices: Sequence[Device],
        dtype: np.dtype,
        sizes: Sizes,
        unweight: UnweightPolicy | None = None,
    ) -> None:
        self.sizes = sizes
        self.model = MeshModel(
            StageLayout(config, mesh_spec, unweight),
            make_mesh(mesh_spec, devices),
            {},
            CompileLog(),
            dtype,
        )

    def lower_prefill(self) -> jax.stages.Lowered:
        sizes = self.sizes
        rows = (self.model.stages, sizes.prefill_rows)
        batch = PrefillBatch(
            token_ids=self._array((*rows, sizes.chunk), jnp.int32),
            starts=self._array(rows, jnp.int32),
            lengths=self._array(rows, jnp.int32),
            wants_token=self._array(rows, jnp.bool_),
            page_tables=self._per_group((*rows, sizes.table_width)),
            sampling=self._sampling(rows),
        )
        return prefill_program(self.model).lower(self.params(), self.pools(), batch)

    def lower_decode(self) -> jax.stages.Lowered:
        sizes = self.sizes
        rows = (sizes.rows,)
        state = DecodeRows(
            token=self._array(rows, jnp.int32),
            position=self._array(rows, jnp.int32),
            remaining=self._array(rows, jnp.int32),
            active=self._array(rows, jnp.bool_),
            page_tables=self._per_group((*rows, sizes.table_width)),
            stop_ids=self._array((*rows, STOP_IDS), jnp.int32),
            sampling=self._sampling(rows),
        )
        control = DecodeControl(
            halt=self._array(rows, jnp.bool_), grants=self._per_group((sizes.rows, 3))
        )
        program = decode_program(self.model, sizes.steps, sizes.rows, sizes.table_width)
        return program.lower(self.params(), self.pools(), state, control)

    def params(self) -> dict[str, Any]:
        """Shapes in place of weights; compressed ones are of a size that is usual."""
        logical = abstract_tree(self.model.config)
        layout, result = self.model.layout, {}
        for name, tensor in layout.tensors.items():
            spec = logical[next(source for source in tensor.sources if source is not None)]
            if tensor.coded is not None:
                result[name] = self._coded(layout.shard_shape(spec), tensor.coded)
            else:
                dtype = self.model.dtype if spec.dtype is None else jnp.dtype(spec.dtype)
                result[name] = self._array(tensor.shape, dtype, tensor.spec)
        return result

    def _coded(self, shape: tuple[int, ...], choice: Choice) -> UnweightTensor:
        axes = tuple(self.model.mesh.shape[axis] for axis in CODED_SPEC)
        *experts, F, D = shape
        return jax.tree.map(
            lambda leaf: self._array((*axes, *leaf.shape), leaf.dtype, CODED_SPEC),
            UnweightTensor(abstract_matrix(choice.form, F, D, tuple(experts)), choice),
        )

    def pools(self) -> Pools:
        layout = self.model.layout
        stages, size = self.model.stages, self.sizes.page_size

        def pages(group: str, specs: Any) -> Any:
            shape = (stages, self.sizes.num_pages[group], size, layout.kv_heads)
            arrays = iter(
                self._array((*shape, width), self.model.dtype, spec)
                for width, spec in zip(layout.config.kv_widths, specs, strict=True)
            )
            return pages_like(layout.config, lambda width: next(arrays))

        return {
            group: tuple(pages(group, specs) for specs in slots)
            for group, slots in pool_specs(layout).items()
        }

    def pool_bytes(self) -> int:
        """Pages on one device."""
        return sum(
            leaf.size * leaf.dtype.itemsize // self.model.mesh.size
            for leaf in jax.tree.leaves(self.pools())
        )

    def _per_group(self, shape: tuple[int, ...]) -> Tables:
        return {group: self._array(shape, jnp.int32) for group in self.model.config.kv_groups}

    def _sampling(self, rows: tuple[int, ...]) -> Any:
        return jax.tree.map(lambda x: self._array(x.shape, x.dtype), sampling_arrays(rows))

    def _array(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = REPLICATED) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.model.sharding(spec))
