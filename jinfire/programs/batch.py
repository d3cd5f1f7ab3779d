"""What programs take and return, as documented pytrees."""

import dataclasses

import jax
import numpy as np

from jinfire.programs.sampler import Array, SamplingRows
from jinfire.request import Request

Tables = dict[str, Array]
"""Page tables by KV group, int32 [..., W]; column w holds positions w*Z to w*Z + Z - 1."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """One dispatch of the prefill program: M microbatches of R rows of C tokens.

    Shapes: token_ids [M, R, C]; starts, lengths, wants_token and sampling [M, R]; page_tables
    [M, R, W]. Row (m, r) computes positions starts to starts + lengths - 1; length 0 is padding.
    """

    token_ids: Array
    starts: Array
    lengths: Array
    wants_token: Array
    page_tables: Tables
    sampling: SamplingRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeRows:
    """State of all decode rows; lives on the decode mesh between dispatches.

    Shapes: [B] each, page_tables [B, W], stop_ids [B, X] (-1 pads). `token` is the newest token,
    whose keys and values go to `position`; `remaining` is how many more may be sampled.
    """

    token: Array
    position: Array
    remaining: Array
    active: Array
    page_tables: Tables
    stop_ids: Array
    sampling: SamplingRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeControl:
    """What the host tells a decode dispatch: rows to halt, and pages granted.

    Shapes: halt [B] bool; grants int32 [G, 3] of (row, column, page) by KV group, where a row
    past the last one is padding.
    """

    halt: Array
    grants: Tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeTokens:
    """Tokens of one decode dispatch.

    Shapes: token, logprob [J, B]; top_ids, top_logprobs [J, B, 20]. `token` is -1 where the row
    was not active.
    """

    token: Array
    logprob: Array
    top_ids: Array
    top_logprobs: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewRow:
    """One row to install: scalars, page_tables [W], stop_ids [X], sampling scalars.

    `source` is the (microbatch, row) of the prefill dispatch that sampled the first token.
    """

    row: Array
    source: Array
    position: Array
    remaining: Array
    page_tables: Tables
    stop_ids: Array
    sampling: SamplingRows


def sampling_arrays(shape: tuple[int, ...]) -> SamplingRows:
    """Host arrays of parameters that sample greedily and report nothing."""
    return SamplingRows(
        temperature_B=np.zeros(shape, np.float32),
        top_k_B=np.zeros(shape, np.int32),
        top_p_B=np.ones(shape, np.float32),
        min_p_B=np.zeros(shape, np.float32),
        seed_B=np.zeros(shape, np.uint32),
        logprobs_B=np.full(shape, -1, np.int32),
        logprob_temperature_B=np.ones(shape, np.float32),
    )


def set_sampling(rows: SamplingRows, index: tuple[int, ...], request: Request) -> None:
    """Write one request's parameters into host arrays made by `sampling_arrays`."""
    params = request.params
    rows.temperature_B[index] = params.temperature
    rows.top_k_B[index] = min(params.top_k, np.iinfo(np.int32).max)
    rows.top_p_B[index] = params.top_p
    rows.min_p_B[index] = params.min_p
    rows.seed_B[index] = request.seed
    rows.logprobs_B[index] = -1 if params.logprobs is None else params.logprobs
    scaled = params.logprobs_after_temperature and params.temperature > 0
    rows.logprob_temperature_B[index] = params.temperature if scaled else 1.0
