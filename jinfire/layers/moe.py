"""Mixture of experts: a router, the experts that it chooses from, and one for every token."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jinfire.config import ExpertsConfig, ModelConfig
from jinfire.layers.linear import MODEL_AXES, param
from jinfire.layers.mlp import GatedMLP
from jinfire.layers.routing import check_router, route
from jinfire.weights import grouped_contract
from pallas_kernels import grouped_int4_matmul
from sharding import EXPERT, TENSOR, exchange, gather_tokens, own_tokens

INT4_PER_WORD = 8
INT4_PER_SCALE = 32

# Where tokens are exchanged: see `exchanges_tokens`.
EXCHANGE_DEVICES = 8
EXCHANGE_TOKENS = 1024
# Room in the buffers of the exchange, over what an even load fills.
EXCHANGE_ROOM = 1.25


def exchanges_tokens(num_tokens: int, devices: int) -> bool:
    """Whether rows go to the experts' devices, instead of every device working on all tokens.

    Every device has all tokens either way, so this is about bytes, in units of T·D values:

    - *whole*: each device sorts buffers for the worst case, all T·X rows, though it has the
      experts of 1/devices of them: about 4·X through memory, then 2 over the links to sum.
    - *exchanged*: buffers have ROOM·X/devices rows: 4·X·ROOM/devices through memory, and over the
      links 2·X·ROOM/devices for the rows and 2 to scatter the shared expert's sum and gather.

    The links' 2·X·ROOM/devices are worth the memory's 4·X·(1 - ROOM/devices) from
    devices = ROOM·(1 + memory/(2·links)) on: 8, for 4.8 TB/s and 450 GB/s (H200, NVLink 4).
    X cancels. An exchange also waits for about five more collectives, some 50 us: what a thousand
    tokens gain on 16 devices (X 8, D 7168, bfloat16), and more tokens than a decode batch has.

    Compiled for 8 H200s, a layer of Kimi K2.5 needs 741 MB beside its weights for 4,096 tokens,
    exchanged 236 MB.
    """
    return devices >= EXCHANGE_DEVICES and num_tokens >= EXCHANGE_TOKENS


class Router(nnx.Module):
    """Scores of the experts and the choice among them, in float32 whatever the model's dtype.

    The reference rounds the scores of other families than DeepSeek's to the model's dtype; a
    choice in float32 is the one that the model makes in float32.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.config = _experts(config)
        check_router(self.config)
        self.weight = param((self.config.count, config.width), (None, "embed"), "normal", dtype)
        biased = self.config.router == "sigmoid"
        self.bias = (
            param((self.config.count,), (None,), "normal", dtype, "float32") if biased else None
        )

    def __call__(self, hidden_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Expert ids int32 [T, X] and their weights float32 [T, X]."""
        logits_TE = jnp.einsum(
            "TD,ED->TE",
            hidden_TD.astype(jnp.float32),
            self.weight.get_value().astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        bias_E = None if self.bias is None else self.bias.get_value()
        return route(logits_TE, bias_E, self.config)


class ExpertLinear(nnx.Module):
    """Products of rows with the (out, in) weight of their own expert."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        axes: tuple[str, str, str],
        dtype: jnp.dtype,
    ):
        self.weight = param(shape, axes, "normal", dtype)

    def __call__(self, x_MD: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """Rows [M, out] of rows sorted by expert, `sizes_E` of each; the others give zeros."""
        return grouped_contract(x_MD, self.weight.get_value(), sizes_E)


class Int4ExpertLinear(nnx.Module):
    """`ExpertLinear` with 4-bit weights in the device form of `pallas_kernels`."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        axes: tuple[str, str, str],
        dtype: jnp.dtype,
    ):
        (count, out, into), (experts, out_axis, in_axis) = shape, axes
        if into % INT4_PER_SCALE:
            raise ValueError(
                f"int4 experts: expected inputs in groups of {INT4_PER_SCALE}, got {into}"
            )
        self.packed = param((count, out, into // INT4_PER_WORD), axes, "words", dtype, "int32")
        self.scale = param(
            (count, into // INT4_PER_SCALE, out),
            (experts, in_axis, out_axis),
            "scales",
            dtype,
            "bfloat16",
        )

    def __call__(self, x_MD: jax.Array, sizes_E: jax.Array) -> jax.Array:
        return grouped_int4_matmul(x_MD, self.packed.get_value(), self.scale.get_value(), sizes_E)


class Experts(nnx.Module):
    """The routed experts that a device holds, each a SwiGLU.

    Layout: whole experts are split over the expert axis, their inner width over tensor.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        experts = _experts(config)
        linear = Int4ExpertLinear if experts.int4 else ExpertLinear
        inner = (experts.count, experts.width, config.width)
        outer = (experts.count, config.width, experts.width)
        inner_axes = ("experts", "expert_mlp", "embed")
        self.gate = linear(inner, inner_axes, dtype)
        self.up = linear(inner, inner_axes, dtype)
        self.down = linear(outer, ("experts", "embed", "expert_mlp"), dtype)

    def __call__(self, rows_TD: jax.Array, ids_TX: jax.Array, count: int) -> jax.Array:
        """What the chosen ones of `count` local experts make of each row: [T, X, D].

        This device's term of the sum over tensor. Ids outside 0 to count - 1 are of experts that
        are not here, and give zeros.
        """
        num_chosen = ids_TX.shape[1]
        experts = jnp.arange(count, dtype=ids_TX.dtype)
        taken_TE = jnp.any(ids_TX[:, :, None] == experts[None, None], axis=1).astype(jnp.int32)
        sizes_E = jnp.sum(taken_TE, axis=0)
        # A token takes an expert once, so no more than this many rows have one here, and rows are
        # sorted by counting: a GPU's compiler makes kernels of its own for every sort it meets.
        most = rows_TD.shape[0] * min(num_chosen, count)
        before_TE = jnp.cumsum(taken_TE, axis=0) - taken_TE
        start_E = jnp.cumsum(sizes_E) - sizes_E
        is_here_TX = (ids_TX >= 0) & (ids_TX < count)
        place_TX = jnp.take_along_axis(
            before_TE + start_E[None], jnp.where(is_here_TX, ids_TX, 0), axis=1
        )
        place_M = jnp.where(is_here_TX, place_TX, most).reshape(-1)
        row_M = jnp.arange(place_M.shape[0], dtype=jnp.int32) // num_chosen
        row_M = jnp.zeros(most, jnp.int32).at[place_M].set(row_M, mode="drop")
        x_MD = rows_TD[row_M]
        inner_MF = jax.nn.silu(self.gate(x_MD, sizes_E)) * self.up(x_MD, sizes_E)
        out_MD = self.down(inner_MF, sizes_E)
        # Gathered, never added up where they lie: the order of a sum would be another token's
        # business. Places past the end are of rows without an expert here.
        chosen_MD = jnp.take(out_MD, place_M, axis=0, mode="fill", fill_value=0)
        return chosen_MD.reshape(*ids_TX.shape, -1)


class MoE(nnx.Module):
    """Routed experts and a shared one, in the place of a gated MLP.

    The choice of experts is this device's own computation, equal on all devices of a stage.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.config = _experts(config)
        self.router = Router(config, dtype)
        self.experts = Experts(config, dtype)
        shared_width = self.config.shared_width
        self.shared = GatedMLP(config.width, shared_width, dtype) if shared_width else None

    def __call__(
        self,
        hidden_BTD: jax.Array,
        live_BT: jax.Array | None = None,
        exchanged: bool | None = None,
    ) -> jax.Array:
        """The mixture [B, T, D]. `exchanged` None is what `exchanges_tokens` says.

        Tokens that are not live go to no routed expert; None: all of them are.

        A token's result depends on its own values, the weights and the shapes. Weights are
        float32 until they are multiplied; the weighted sum over the chosen experts and the shared
        one is float32 in a fixed order, and rounded once, before the sum over devices.
        """
        hidden_TD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
        if exchanged is None:
            exchanged = exchanges_tokens(hidden_TD.shape[0], jax.lax.axis_size(EXPERT))
        live_T = None if live_BT is None else live_BT.reshape(-1)
        mixed_TD = (self._exchanged if exchanged else self._whole)(hidden_TD, live_T)
        return mixed_TD.reshape(hidden_BTD.shape)

    def route(self, hidden_BTD: jax.Array) -> jax.Array:
        """Ids of the chosen experts, best first: int32 [B, T, X]."""
        ids_TX, _ = self.router(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]))
        return ids_TX.reshape(*hidden_BTD.shape[:2], -1)

    @property
    def _local_experts(self) -> int:
        return self.config.count // jax.lax.axis_size(EXPERT)

    def _choose(
        self, hidden_TD: jax.Array, live_T: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The router's choice; the id past the last expert for tokens that are not live."""
        ids_TX, weights_TX = self.router(hidden_TD)
        if live_T is not None:
            ids_TX = jnp.where(live_T[:, None], ids_TX, self.config.count)
        return ids_TX, weights_TX

    def _whole(self, hidden_TD: jax.Array, live_T: jax.Array | None) -> jax.Array:
        """All tokens through this device's experts, summed over all devices."""
        ids_TX, weights_TX = self._choose(hidden_TD, live_T)
        count = self._local_experts
        local_TX = ids_TX - jax.lax.axis_index(EXPERT) * count
        rows_TD, local_TX = self._inputs(hidden_TD, local_TX, weights_TX)
        out = self.experts(rows_TD, local_TX, count)
        total_TD = self._combined(out.reshape(*ids_TX.shape, -1), weights_TX)
        if self.shared is not None:
            total_TD = total_TD + self.shared.partial(hidden_TD).astype(jnp.float32)
        return jax.lax.psum(total_TD.astype(hidden_TD.dtype), MODEL_AXES)

    def _exchanged(self, hidden_TD: jax.Array, live_T: jax.Array | None) -> jax.Array:
        """This device's part of the tokens through all experts, then all tokens gathered."""
        own_TD, own_live_T = own_tokens(hidden_TD, EXPERT)
        if live_T is not None:
            own_live_T = own_tokens(live_T[:, None], EXPERT)[0][:, 0]
        ids_TX, weights_TX = self._choose(own_TD, own_live_T)
        rows_TD, row_ids = self._inputs(own_TD, ids_TX, weights_TX)
        count = self._local_experts
        out = exchange(
            rows_TD,
            row_ids,
            count,
            lambda rows_MD, ids_M: self.experts(rows_MD, ids_M[:, None], count)[:, 0],
            self._capacity(own_TD.shape[0]),
            EXPERT,
        )
        total_TD = self._combined(out.reshape(*ids_TX.shape, -1), weights_TX)
        if self.shared is not None:
            # Its width is split over both axes, so every device has a term for every token.
            terms_TD = self.shared.partial(hidden_TD)
            missing = own_TD.shape[0] * jax.lax.axis_size(EXPERT) - terms_TD.shape[0]
            terms_TD = jnp.pad(terms_TD, ((0, missing), (0, 0)))
            own_terms_TD = jax.lax.psum_scatter(terms_TD, EXPERT, tiled=True)
            total_TD = total_TD + own_terms_TD.astype(jnp.float32)
        total_TD = jax.lax.psum(total_TD.astype(hidden_TD.dtype), TENSOR)
        return gather_tokens(total_TD, hidden_TD.shape[0], EXPERT)

    def _capacity(self, own_tokens: int) -> int:
        """Rows that a device sends to another in a round, a multiple of 8."""
        devices = jax.lax.axis_size(EXPERT)
        most = own_tokens * min(self.config.per_token, self._local_experts)
        even = own_tokens * self.config.per_token / devices
        return min(-(-int(even * EXCHANGE_ROOM + 1) // 8) * 8, most)

    def _inputs(
        self, hidden_TD: jax.Array, ids_TX: jax.Array, weights_TX: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rows and the ids of their experts; a row for each choice where weights scale the input.

        The scaled input is rounded to the data's dtype.
        """
        if self.config.router != "scaled_input":
            return hidden_TD, ids_TX
        scaled = hidden_TD[:, None].astype(jnp.float32) * weights_TX[..., None]
        rows = scaled.astype(hidden_TD.dtype).reshape(-1, hidden_TD.shape[-1])
        return rows, ids_TX.reshape(-1, 1)

    def _combined(self, out_TXD: jax.Array, weights_TX: jax.Array) -> jax.Array:
        """Weighted float32 sum over the chosen experts, from the best on: [T, D]."""
        out_TXD = out_TXD.astype(jnp.float32)
        if self.config.router != "scaled_input":
            out_TXD = out_TXD * weights_TX[..., None]
        return functools.reduce(jnp.add, [out_TXD[:, x] for x in range(out_TXD.shape[1])])


def _experts(config: ModelConfig) -> ExpertsConfig:
    if config.experts is None:
        raise ValueError("mixture of experts: expected a model config with experts, got None")
    return config.experts
