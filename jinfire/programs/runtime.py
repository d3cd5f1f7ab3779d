"""A model placed on one mesh, and jitted programs that count their compilations."""

import ctypes
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jinfire.checkpoints import TensorSource
from jinfire.config import ModelConfig
from jinfire.kvcache.pages import Pages, Pools, group_slots
from jinfire.layers.attention import LayerKV
from jinfire.layers.rope import PositionTables
from jinfire.layout import StageLayout
from jinfire.loading import load_params
from jinfire.models.transformer import Transformer
from jinfire.unweight.policy import UnweightPolicy
from jinfire.unweight.tensor import UnweightTensor
from jinfire.weights import Weight
from sharding import PIPELINE, Device, MeshSpec, make_mesh

REPLICATED = PartitionSpec()
GPU_PLATFORMS = ("gpu", "cuda")
Params = dict[str, Weight]


@dataclasses.dataclass
class CompileLog:
    """How many programs were traced and compiled, and the seconds that took."""

    count: int = 0
    seconds: float = 0.0
    names: list[str] = dataclasses.field(default_factory=list)


class Program:
    """A jitted function that records every compilation in a log.

    Counting happens while tracing, which is when jit compiles; a call that compiles is timed from
    outside (dispatch is asynchronous, so that is compile time and not execution).
    """

    def __init__(
        self, name: str, function: Callable[..., Any], log: CompileLog, **jit_options: Any
    ) -> None:
        def traced(*args: Any) -> Any:
            log.count += 1
            log.names.append(name)
            return function(*args)

        self.name = name
        self._log = log
        self._call = jax.jit(traced, **jit_options)

    def __call__(self, *args: Any) -> Any:
        before, start = self._log.count, time.perf_counter()
        result = self._call(*args)
        if self._log.count > before:
            self._log.seconds += time.perf_counter() - start
            _return_free_memory()
        return result

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program lowered for abstract or concrete arguments."""
        return self._call.lower(*args)


def _return_free_memory() -> None:
    """Gives the pages that a compilation freed back to the system, where the C library can.

    glibc keeps them for its next allocation, and every compiler thread has a heap of its own: after
    a dozen programs that is as much as a small model's weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PagedKV(LayerKV, Protocol):
    """One layer's keys and values in pages."""

    @property
    def pages(self) -> Pages: ...


@dataclasses.dataclass
class MeshModel:
    """A model's weights on one mesh, with the layout that says what lies where."""

    layout: StageLayout
    mesh: Mesh
    params: Params
    log: CompileLog
    dtype: np.dtype

    @classmethod
    def load(
        cls,
        source: TensorSource,
        mesh_spec: MeshSpec,
        devices: Sequence[Device],
        dtype: np.dtype,
        log: CompileLog,
        desc: str = "weights",
        unweight: UnweightPolicy | None = None,
    ) -> "MeshModel":
        """Weights read from `source` onto a new mesh over `devices`."""
        layout = StageLayout(source.config, mesh_spec, unweight)
        mesh = make_mesh(mesh_spec, devices)
        return cls(layout, mesh, load_params(source, layout, mesh, dtype, desc), log, dtype)

    @property
    def config(self) -> ModelConfig:
        return self.layout.config

    @property
    def stages(self) -> int:
        return self.layout.mesh_spec.pipeline

    def param_specs(self) -> dict[str, PartitionSpec]:
        """Of every weight; that of a compressed one is the spec of all its arrays."""
        return {name: tensor.device_spec for name, tensor in self.layout.tensors.items()}

    def sharding(self, spec: PartitionSpec = REPLICATED) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def replicate(self, tree: Any) -> Any:
        """A tree of host or other-mesh arrays, copied to every device of this mesh."""
        return jax.device_put(tree, self.sharding())

    def program(
        self,
        name: str,
        body: Callable[..., Any],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Program:
        """`body` on local shards, under `shard_map` and jit.

        Output shardings are pinned, so that a result fed back in never compiles anew.
        """
        mapped = jax.shard_map(
            functools.partial(_exact, body) if self._rounds_float32 else body,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
        shardings = jax.tree.map(
            self.sharding, out_specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        return Program(name, mapped, self.log, out_shardings=shardings, donate_argnums=donate)

    @property
    def _rounds_float32(self) -> bool:
        """Whether products would be of lower precision than the data: float32 weights on a GPU."""
        return self.mesh.devices.flat[0].platform in GPU_PLATFORMS and self.dtype == np.float32

    def bind(self, local_params: Params) -> Transformer:
        """The stage's module on local shards (inside `shard_map`): axes of the mesh are dropped."""
        tensors = self.layout.tensors

        def local(name: str, weight: Weight) -> Weight:
            if isinstance(weight, UnweightTensor):
                return weight.local()
            return weight.reshape(weight.shape[1:]) if tensors[name].stacked else weight

        return self.layout.skeleton.bind(
            {name: local(name, weight) for name, weight in local_params.items()}
        )

    def run_layers(
        self,
        model: Transformer,
        hidden_BTD: jax.Array,
        positions_BT: jax.Array,
        pools: Pools,
        view: Callable[[str, Pages, jax.Array | bool], PagedKV],
    ) -> tuple[jax.Array, Pools]:
        """All layers of this stage, each over its own pages.

        `pools` holds local pages; `view(group, pages, filled)` makes the layer's KV, whose `pages`
        are taken back after the layer. `filled` is false where this stage has no layer in the
        slot: zero weights would send every token to the same few experts.
        """
        tables = model.tables(positions_BT)
        slot_of = {
            slot: (group, index)
            for group, slots in group_slots(self.layout).items()
            for index, slot in enumerate(slots)
        }
        updated = {group: list(pairs) for group, pairs in pools.items()}
        for slot, layer in enumerate(model.layers):
            group, index = slot_of[slot]
            graphdef, state = nnx.split(layer)
            kv = view(group, updated[group][index], self._filled(slot))
            with jax.named_scope(f"slot_{slot}"):
                hidden_BTD, kv = _run_layer(graphdef, state, hidden_BTD, tables, kv)
            updated[group][index] = kv.pages
        return hidden_BTD, {group: tuple(pairs) for group, pairs in updated.items()}

    def _filled(self, slot: int) -> jax.Array | bool:
        """Whether the stage that this runs on has a layer in a slot."""
        stages = range(self.stages)
        filled = [self.layout.layer_at(stage, slot) is not None for stage in stages]
        return all(filled) or jnp.asarray(filled)[jax.lax.axis_index(PIPELINE)]


@functools.partial(jax.jit, static_argnums=0)
def _run_layer[KV: PagedKV](
    graphdef: nnx.GraphDef,
    state: nnx.State,
    hidden_BTD: jax.Array,
    tables: PositionTables,
    kv: KV,
) -> tuple[jax.Array, KV]:
    """One layer, traced and lowered once for all slots of its kind: kernels take long for that."""
    return nnx.merge(graphdef, state)(hidden_BTD, tables, kv)


def _exact(body: Callable[..., Any], *args: Any) -> Any:
    """`body` with products in the precision of the data: a GPU's default for float32 is TF32."""
    with jax.default_matmul_precision("highest"):
        return body(*args)


def local_pools(pools: Pools) -> Pools:
    """Pools inside `shard_map`, without the stage axis."""
    return jax.tree.map(lambda pages: pages.reshape(pages.shape[1:]), pools)


def global_pools(pools: Pools) -> Pools:
    """Inverse of `local_pools`."""
    return jax.tree.map(lambda pages: pages[None], pools)


def shift_stages(x: jax.Array, stages: int) -> jax.Array:
    """Activations handed to the next stage (inside `shard_map`); the first stage gets zeros."""
    if stages == 1:
        return x
    return jax.lax.ppermute(x, PIPELINE, [(stage, stage + 1) for stage in range(stages - 1)])
