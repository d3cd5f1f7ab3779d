"""The prefill program: prompt chunks through all stages, pages written, first tokens sampled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jinfire.kvcache.pages import LatentPages, PagePair, Pages, Pools, pool_specs
from jinfire.programs.batch import PrefillBatch
from jinfire.programs.runtime import (
    REPLICATED,
    MeshModel,
    Params,
    Program,
    global_pools,
    local_pools,
    shift_stages,
)
from jinfire.programs.sampler import TOP_LOGPROBS, Sampled, sample
from jinfire.programs.split_latents import split_expanded_attention, write_split
from pallas_kernels import expanded_latent_attention, prefill_attention, write_pages
from sharding import PIPELINE, Schedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillKV:
    """One layer's pages during a prefill microbatch: attention writes, then reads.

    `split`: a device holds a part of the slots of every page.
    """

    pages: Pages
    table_RW: jax.Array
    starts_R: jax.Array
    lengths_R: jax.Array
    positions_RC: jax.Array
    valid_RC: jax.Array
    filled: jax.Array | bool = True
    split: bool = dataclasses.field(default=False, metadata={"static": True})

    def live_tokens(self) -> jax.Array:
        return self.valid_RC & self.filled

    def attend(
        self,
        query_BTNH: jax.Array,
        key_BTKH: jax.Array,
        value_BTKH: jax.Array,
        scale: float,
        attention_chunk: int | None = None,
    ) -> tuple[jax.Array, "PrefillKV"]:
        assert isinstance(self.pages, PagePair)
        pages = PagePair(
            self._written(self.pages.key, key_BTKH), self._written(self.pages.value, value_BTKH)
        )
        mixed = prefill_attention(
            query_BTNH,
            *pages,
            self.table_RW,
            self.starts_R,
            self.lengths_R,
            scale=scale,
            attention_chunk=attention_chunk,
        )
        return mixed, dataclasses.replace(self, pages=pages)

    def attend_latent(
        self, query_BTNH: jax.Array, latent_BTC: jax.Array, up_NUC: jax.Array, scale: float
    ) -> tuple[jax.Array, "PrefillKV"]:
        assert isinstance(self.pages, LatentPages)
        pages = LatentPages(self._written(self.pages.latent, latent_BTC[:, :, None]))
        attend = split_expanded_attention if self.split else expanded_latent_attention
        mixed = attend(
            query_BTNH,
            pages.latent,
            up_NUC,
            self.table_RW,
            self.starts_R,
            self.lengths_R,
            scale=scale,
        )
        return mixed, dataclasses.replace(self, pages=pages)

    def _written(self, pages: jax.Array, new_BTKH: jax.Array) -> jax.Array:
        write = write_split if self.split else write_pages
        return write(pages, new_BTKH, self.table_RW, self.positions_RC, self.valid_RC)


def prefill_program(model: MeshModel) -> Program:
    """The jitted prefill of one mesh: (params, pools, batch) -> (pools, Sampled [M, R]).

    Donates: pools. One compiled program per (M, R, C, W).
    """
    pools = pool_specs(model.layout)
    return model.program(
        "prefill",
        functools.partial(_prefill, model),
        in_specs=(model.param_specs(), pools, REPLICATED),
        out_specs=(pools, Sampled(*(REPLICATED,) * len(Sampled._fields))),
        donate=(1,),
    )


def _prefill(
    mesh_model: MeshModel, params: Params, pools: Pools, batch: PrefillBatch
) -> tuple[Pools, Sampled]:
    model = mesh_model.bind(params)
    stages = mesh_model.stages
    stage = jax.lax.axis_index(PIPELINE)
    num_microbatches, num_rows, chunk = batch.token_ids.shape
    schedule = Schedule(stages, num_microbatches)
    embedded_MRCD = model.embed(batch.token_ids)

    def tick(carry: tuple, now: jax.Array) -> tuple[tuple, None]:
        pools, received, last_MRD = carry
        entering, _, _ = schedule.index(now, 0)
        microbatch, _, valid = schedule.index(now, stage)
        rows = jax.tree.map(lambda leaf: leaf[microbatch], batch)
        lengths_R = jnp.where(valid, rows.lengths, 0)
        positions_RC = rows.starts[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
        valid_RC = jnp.arange(chunk, dtype=jnp.int32)[None] < lengths_R[:, None]
        hidden_RCD = jnp.where(stage == 0, embedded_MRCD[entering], received)

        def view(group: str, pages: Pages, filled: jax.Array | bool) -> PrefillKV:
            table_RW = rows.page_tables[group]
            where = (rows.starts, lengths_R, positions_RC, valid_RC)
            return PrefillKV(pages, table_RW, *where, filled, mesh_model.layout.splits_latents)

        hidden_RCD, pools = mesh_model.run_layers(model, hidden_RCD, positions_RC, pools, view)
        final_R = jnp.maximum(lengths_R - 1, 0)
        final_RD = jnp.take_along_axis(hidden_RCD, final_R[:, None, None], axis=1)[:, 0]
        leaves_here = valid & (stage == stages - 1)
        kept_RD = jnp.where(leaves_here, final_RD, last_MRD[microbatch])
        last_MRD = last_MRD.at[microbatch].set(kept_RD)
        return (pools, shift_stages(hidden_RCD, stages), last_MRD), None

    width = embedded_MRCD.shape[-1]
    dtype = embedded_MRCD.dtype
    carry = (
        local_pools(pools),
        jnp.zeros((num_rows, chunk, width), dtype),
        jnp.zeros((num_microbatches, num_rows, width), dtype),
    )
    if schedule.ticks == 1:
        carry, _ = tick(carry, jnp.int32(0))
    else:
        carry, _ = jax.lax.scan(tick, carry, jnp.arange(schedule.ticks, dtype=jnp.int32))
    pools, _, last_MRD = carry
    sampled = jax.lax.cond(
        jnp.any(batch.wants_token),
        lambda last: _first_tokens(model, last, batch),
        lambda last: _no_tokens(num_microbatches, num_rows),
        # Only the last stage holds the outputs; the others add zeros.
        jax.lax.psum(last_MRD, PIPELINE),
    )
    return global_pools(pools), sampled


def _first_tokens(model, last_MRD: jax.Array, batch: PrefillBatch) -> Sampled:
    num_microbatches, num_rows, width = last_MRD.shape
    flat = num_microbatches * num_rows
    logits = model.logits(model.final_norm(last_MRD.reshape(flat, width)))
    positions = (batch.starts + batch.lengths).reshape(flat)
    sampling = jax.tree.map(lambda leaf: leaf.reshape(flat), batch.sampling)
    sampled = sample(logits, positions, sampling)
    return jax.tree.map(
        lambda leaf: leaf.reshape(num_microbatches, num_rows, *leaf.shape[1:]), sampled
    )


def _no_tokens(num_microbatches: int, num_rows: int) -> Sampled:
    shape = (num_microbatches, num_rows)
    return Sampled(
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, TOP_LOGPROBS), jnp.int32),
        jnp.zeros((*shape, TOP_LOGPROBS), jnp.float32),
    )
