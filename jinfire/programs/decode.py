"""The decode program: J steps of all rows in one dispatch, sampling and stopping inside."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jinfire.kvcache.pages import LatentPages, PagePair, Pages, Pools, pool_specs
from jinfire.programs.batch import DecodeControl, DecodeRows, DecodeTokens
from jinfire.programs.runtime import (
    REPLICATED,
    MeshModel,
    Params,
    Program,
    global_pools,
    local_pools,
    shift_stages,
)
from jinfire.programs.sampler import TOP_LOGPROBS, sample
from jinfire.programs.split_latents import split_latent_attention, write_split
from pallas_kernels import latent_attention, paged_attention, write_pages
from sharding import PIPELINE, Schedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeKV:
    """One layer's pages during a decode step: one new token per row.

    `split`: a device holds a part of the slots of every page.
    """

    pages: Pages
    table_BW: jax.Array
    positions_B: jax.Array
    lengths_B: jax.Array
    filled: jax.Array | bool = True
    split: bool = dataclasses.field(default=False, metadata={"static": True})

    def live_tokens(self) -> jax.Array:
        return (self.lengths_B > 0)[:, None] & self.filled

    def attend(
        self,
        query_BTNH: jax.Array,
        key_BTKH: jax.Array,
        value_BTKH: jax.Array,
        scale: float,
        attention_chunk: int | None = None,
    ) -> tuple[jax.Array, "DecodeKV"]:
        assert isinstance(self.pages, PagePair)
        where = self._where()
        pages = PagePair(
            write_pages(self.pages.key, key_BTKH, *where),
            write_pages(self.pages.value, value_BTKH, *where),
        )
        mixed_BNH = paged_attention(
            query_BTNH[:, 0],
            *pages,
            self.table_BW,
            self.lengths_B,
            scale=scale,
            attention_chunk=attention_chunk,
        )
        return mixed_BNH[:, None], dataclasses.replace(self, pages=pages)

    def attend_latent(
        self, query_BTNH: jax.Array, latent_BTC: jax.Array, up_NUC: jax.Array, scale: float
    ) -> tuple[jax.Array, "DecodeKV"]:
        """The absorbed form: one token's queries go to the latents, not all latents to the heads.

        Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.3.
        """
        assert isinstance(self.pages, LatentPages)
        write, attend = write_pages, latent_attention
        if self.split:
            write, attend = write_split, split_latent_attention
        pages = LatentPages(write(self.pages.latent, latent_BTC[:, :, None], *self._where()))
        rank, dtype = up_NUC.shape[-1], query_BTNH.dtype
        plain_dim = query_BTNH.shape[-1] - (latent_BTC.shape[-1] - rank)
        plain, rotary = jnp.split(query_BTNH[:, 0], [plain_dim], axis=-1)
        absorbed = jnp.einsum(
            "BNU,NUC->BNC", plain, up_NUC[:, :plain_dim], preferred_element_type=dtype
        )
        mixed_BNC = attend(
            jnp.concatenate([absorbed, rotary], axis=-1),
            pages.latent,
            self.table_BW,
            self.lengths_B,
            scale=scale,
            rank=rank,
        )
        mixed_BNV = jnp.einsum(
            "BNC,NVC->BNV", mixed_BNC, up_NUC[:, plain_dim:], preferred_element_type=dtype
        )
        return mixed_BNV[:, None], dataclasses.replace(self, pages=pages)

    def _where(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Page table, positions and validity of the new tokens."""
        return self.table_BW, self.positions_B[:, None], (self.lengths_B > 0)[:, None]


def decode_microbatches(stages: int, rows: int, limit: int | None = None) -> int:
    """Microbatches that a row bucket is cut into: the most that divide it, up to one a stage."""
    return max(m for m in range(1, (limit or stages) + 1) if rows % m == 0)


def decode_program(
    model: MeshModel, steps: int, rows: int, width: int, microbatches: int | None = None
) -> Program:
    """The jitted decode of one mesh for a row bucket and a context bucket.

    (params, pools, rows, control) -> (pools, rows, DecodeTokens [J, rows]).
    Donates: pools and rows. `width` is the page-table columns that attention reads.
    """
    pools = pool_specs(model.layout)
    body = functools.partial(
        _decode,
        model,
        Schedule(model.stages, decode_microbatches(model.stages, rows, microbatches), steps),
        rows,
        width,
    )
    return model.program(
        f"decode rows={rows} width={width}",
        body,
        in_specs=(model.param_specs(), pools, REPLICATED, REPLICATED),
        out_specs=(pools, REPLICATED, REPLICATED),
        donate=(1, 2),
    )


def apply_control(rows: DecodeRows, control: DecodeControl) -> DecodeRows:
    """Rows after the host's halts and page grants; padding grants fall outside and are dropped."""
    tables = {
        group: table.at[grants[:, 0], grants[:, 1]].set(grants[:, 2], mode="drop")
        for group, table, grants in (
            (group, table, control.grants[group]) for group, table in rows.page_tables.items()
        )
    }
    return dataclasses.replace(rows, active=rows.active & ~control.halt, page_tables=tables)


def _decode(
    mesh_model: MeshModel,
    schedule: Schedule,
    num_rows: int,
    width: int,
    params: Params,
    pools: Pools,
    rows: DecodeRows,
    control: DecodeControl,
) -> tuple[Pools, DecodeRows, DecodeTokens]:
    model = mesh_model.bind(params)
    stages = mesh_model.stages
    stage = jax.lax.axis_index(PIPELINE)
    size = num_rows // schedule.microbatches
    rows = apply_control(rows, control)
    bucket = jax.tree.map(lambda leaf: leaf[:num_rows], rows)
    fixed = (
        {group: table[:, :width] for group, table in bucket.page_tables.items()},
        bucket.stop_ids,
        bucket.sampling,
    )

    def tick(carry: tuple, now: jax.Array) -> tuple[tuple, None]:
        pools, received, state, tokens = carry
        entering, _, _ = schedule.index(now, 0)
        microbatch, _, valid = schedule.index(now, stage)
        leaving, step, leaves = schedule.index(now, stages - 1)

        new_token_B = _microbatch(state["token"], entering, size)
        hidden_BTD = jnp.where(stage == 0, model.embed(new_token_B[:, None]), received)
        tables, _, _ = _microbatch(fixed, microbatch, size)
        here = _microbatch(state, microbatch, size)
        lengths_B = jnp.where(here["active"] & valid, here["position"] + 1, 0)

        def view(group: str, pages: Pages, filled: jax.Array | bool) -> DecodeKV:
            where = (tables[group], here["position"], lengths_B)
            return DecodeKV(pages, *where, filled, mesh_model.layout.splits_latents)

        hidden_BTD, pools = mesh_model.run_layers(
            model, hidden_BTD, here["position"][:, None], pools, view
        )
        # Every device takes part in the head: it holds a slice of the vocabulary.
        out_BD = hidden_BTD[:, 0]
        if stages > 1:
            zero = jnp.zeros((), out_BD.dtype)
            out_BD = jax.lax.psum(jnp.where(stage == stages - 1, out_BD, zero), PIPELINE)
        logits_BV = model.logits(model.final_norm(out_BD))
        _, stop_ids_BX, sampling = _microbatch(fixed, leaving, size)
        before = _microbatch(state, leaving, size)
        sampled = sample(logits_BV, before["position"] + 1, sampling)
        live_B = before["active"] & leaves
        after = _advance(before, sampled.token_B, stop_ids_BX, live_B)
        state = _put_microbatch(state, after, leaving, size)
        emitted = DecodeTokens(
            jnp.where(live_B, sampled.token_B, -1),
            sampled.logprob_B,
            sampled.top_ids_BX,
            sampled.top_logprobs_BX,
        )
        tokens = jax.tree.map(
            lambda whole, new: _emit(whole, new, step, leaving * size, leaves), tokens, emitted
        )
        return (pools, shift_stages(hidden_BTD, stages), state, tokens), None

    dtype = params["final_norm.scale"].dtype
    shape = (schedule.steps, num_rows)
    carry = (
        local_pools(pools),
        jnp.zeros((size, 1, mesh_model.config.width), dtype),
        {
            "token": bucket.token,
            "position": bucket.position,
            "remaining": bucket.remaining,
            "active": bucket.active,
        },
        DecodeTokens(
            jnp.full(shape, -1, jnp.int32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, TOP_LOGPROBS), jnp.int32),
            jnp.zeros((*shape, TOP_LOGPROBS), jnp.float32),
        ),
    )
    carry, _ = jax.lax.scan(tick, carry, jnp.arange(schedule.ticks, dtype=jnp.int32))
    pools, _, state, tokens = carry
    # Not `.at[:num_rows].set`: over the whole array that is a scatter with an empty index constant,
    # on which the CPU compiler of jaxlib 0.11.2 crashes inside `shard_map`.
    updated = {
        name: jax.lax.dynamic_update_slice_in_dim(getattr(rows, name), new, 0, axis=0)
        for name, new in state.items()
    }
    return global_pools(pools), dataclasses.replace(rows, **updated), tokens


def _advance(
    state: dict[str, jax.Array], token_B: jax.Array, stop_ids_BX: jax.Array, live_B: jax.Array
) -> dict[str, jax.Array]:
    """Row state after one sampled token; rows that are not live keep theirs."""
    moved_B = live_B.astype(jnp.int32)
    remaining_B = state["remaining"] - moved_B
    stopped_B = jnp.any(token_B[:, None] == stop_ids_BX, axis=1) | (remaining_B <= 0)
    return {
        "token": jnp.where(live_B, token_B, state["token"]),
        "position": state["position"] + moved_B,
        "remaining": remaining_B,
        "active": state["active"] & ~(live_B & stopped_B),
    }


def _microbatch(tree, index: jax.Array, size: int):
    """Rows of one microbatch of every leaf."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index * size, size, axis=0), tree
    )


def _put_microbatch(tree, rows, index: jax.Array, size: int):
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, index * size, axis=0),
        tree,
        rows,
    )


def _emit(
    whole: jax.Array, new: jax.Array, step: jax.Array, row: jax.Array, leaves: jax.Array
) -> jax.Array:
    """`whole` [J, B, ...] with a microbatch's results at (step, row), unless none left."""
    start = (step, row) + (jnp.int32(0),) * (whole.ndim - 2)
    old = jax.lax.dynamic_slice(whole, start, (1, *new.shape))
    return jax.lax.dynamic_update_slice(whole, jnp.where(leaves, new[None], old), start)
