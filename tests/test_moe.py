"""The mixture of experts on meshes, against a float64 oracle that goes token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_config
from jax.sharding import PartitionSpec

from jinfire.config import ExpertsConfig, ModelConfig
from jinfire.layers.moe import MoE, exchanges_tokens
from jinfire.layers.routing import expert_load
from jinfire.layout import RULES
from pallas_kernels import pack_for_device
from sharding import MeshSpec, make_mesh, partition_spec

BFLOAT16 = ml_dtypes.bfloat16
WIDTH = 32
EXPERTS = {
    "softmax": ExpertsConfig(8, 3, 32, normalise=True),
    "sigmoid": ExpertsConfig(
        8,
        3,
        32,
        "sigmoid",
        normalise=True,
        scaling=2.5,
        groups=4,
        groups_per_token=2,
        shared_width=16,
    ),
    "scaled_input": ExpertsConfig(8, 1, 32, "scaled_input", shared_width=32),
}
# (expert, tensor)
MESHES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]
FORMS = {"whole": False, "exchanged": True}


def config_of(experts: ExpertsConfig) -> ModelConfig:
    return tiny_config(width=WIDTH, experts=experts)


class Layer:
    """A `MoE` without values: how to bind weights, and their shapes and layout."""

    def __init__(self, experts: ExpertsConfig, dtype=np.float32) -> None:
        build = functools.partial(MoE, config_of(experts), jnp.dtype(dtype))
        self.graphdef, state = nnx.split(nnx.eval_shape(build))
        leaves, self.treedef = jax.tree_util.tree_flatten_with_path(state)
        self.names = [".".join(str(key.key) for key in path[:-1]) for path, _ in leaves]
        self.shapes = {name: leaf for name, (_, leaf) in zip(self.names, leaves, strict=True)}
        self.axes = {
            ".".join(map(str, path)): variable.get_metadata()["axes"]
            for path, variable in nnx.to_flat_state(state)
        }

    def run(self, params, hidden, mesh=(1, 1), exchanged=False, method=None, live=None):
        """The mixture of `hidden` on a mesh of (expert, tensor), or what another method gives."""
        return np.asarray(program(self, mesh, exchanged, method)(params, hidden, live))

    def lowered(self, params, hidden, mesh, exchanged) -> str:
        return program(self, mesh, exchanged, None).lower(params, hidden, None).as_text()

    def random(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {name: self._values(name, rng) for name in self.names}

    def _values(self, name: str, rng: np.random.Generator) -> np.ndarray:
        shape, dtype = self.shapes[name].shape, self.shapes[name].dtype
        if dtype == jnp.int32:
            return rng.integers(0, 2**32, shape, np.uint32).view(np.int32)
        if name.endswith("scale"):
            return rng.uniform(0.01, 0.1, shape).astype(dtype)
        if name == "router.bias":
            return rng.uniform(-1, 1, shape).astype(dtype)
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype)


@functools.cache
def program(layer: Layer, mesh: tuple[int, int], exchanged: bool | None, method: str | None):
    """The jitted layer on a mesh of (expert, tensor)."""

    def body(local, hidden_BTD, live_BT):
        leaves = [local[name] for name in layer.names]
        module = nnx.merge(layer.graphdef, jax.tree.unflatten(layer.treedef, leaves))
        if method is not None:
            return getattr(module, method)(hidden_BTD)
        return module(hidden_BTD, live_BT, exchanged)

    spec = MeshSpec(expert=mesh[0], tensor=mesh[1])
    mapped = jax.shard_map(
        body,
        mesh=make_mesh(spec, jax.devices()[: spec.size]),
        in_specs=(
            {name: partition_spec(layer.axes[name], RULES) for name in layer.names},
            PartitionSpec(),
            PartitionSpec(),
        ),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped)


@functools.cache
def layer_of(router: str) -> Layer:
    return Layer(EXPERTS[router])


def hidden_of(tokens: int, seed: int = 7, dtype=np.float32) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((1, tokens, WIDTH)).astype(dtype)


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    inner = gate @ x
    return down @ (inner / (1 + np.exp(-inner)) * (up @ x))


def oracle(params: dict, hidden: np.ndarray, config: ExpertsConfig) -> np.ndarray:
    """One token and one expert at a time, in float64."""
    wide = {name: np.asarray(value, np.float64) for name, value in params.items()}
    out = np.zeros(hidden.shape, np.float64)
    for place in np.ndindex(hidden.shape[:-1]):
        x = hidden[place].astype(np.float64)
        logits = wide["router.weight"] @ x
        sigmoids = 1 / (1 + np.exp(-logits))
        scores = sigmoids
        selection = logits
        if config.router == "softmax":
            scores = np.exp(logits) / np.exp(logits).sum()
        if config.router == "sigmoid":
            selection = sigmoids + wide["router.bias"]
            groups = selection.reshape(config.groups, -1)
            worth = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
            dropped = np.argsort(worth)[: config.groups - config.groups_per_token]
            groups[dropped] = -np.inf
        chosen = np.argsort(-selection)[: config.per_token]
        weights = scores[chosen]
        if config.normalise:
            weights = weights / weights.sum()
        for e, weight in zip(chosen, weights * config.scaling, strict=True):
            own = [wide[f"experts.{part}.weight"][e] for part in ("gate", "up", "down")]
            if config.router == "scaled_input":
                out[place] += swiglu(x * weight, *own)
            else:
                out[place] += weight * swiglu(x, *own)
        if config.shared_width:
            own = [wide[f"shared.{part}.weight"] for part in ("gate", "up", "down")]
            out[place] += swiglu(x, *own)
    return out


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float = 2e-6) -> None:
    """Equal but for rounding, relative to the largest value."""
    error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
    assert error <= tolerance, error


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, id=str(mesh), marks=() if mesh in ((1, 1), (2, 2)) else pytest.mark.long)
        for mesh in MESHES
    ],
)
@pytest.mark.parametrize("router", EXPERTS)
def test_every_layout_and_form_is_the_mixture(router, mesh, form):
    layer = layer_of(router)
    params, hidden = layer.random(), hidden_of(21)  # not a multiple of the devices
    got = layer.run(params, hidden, mesh, FORMS[form])
    assert got.dtype == np.float32
    assert_close(got, oracle(params, hidden, EXPERTS[router]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2)], ids=str)
def test_a_token_alone_is_the_token_in_a_batch(mesh, form):
    """To the last bit: other batch mates, another place, and an uneven load that takes rounds."""
    layer = layer_of("sigmoid")
    params, batch = layer.random(), hidden_of(24)
    together = layer.run(params, batch, mesh, FORMS[form])
    for token, place in ((0, 23), (11, 0), (23, 12)):
        alone = np.zeros_like(batch)
        alone[0, place] = batch[0, token]
        got = layer.run(params, alone, mesh, FORMS[form])
        assert got[0, place].tobytes() == together[0, token].tobytes()
    crowd = np.repeat(batch[:, 5:6], 24, axis=1)  # all to the same experts
    got = layer.run(params, crowd, mesh, FORMS[form])
    assert {row.tobytes() for row in got[0]} == {together[0, 5].tobytes()}


@pytest.mark.parametrize("form", FORMS)
def test_nan_of_a_token_stays_with_it(form):
    layer = layer_of("sigmoid")
    params, hidden = layer.random(), hidden_of(12)
    clean = layer.run(params, hidden, (2, 2), FORMS[form])
    hidden[0, 3] = np.nan
    dirty = layer.run(params, hidden, (2, 2), FORMS[form])
    assert np.isnan(dirty[0, 3]).all()
    others = np.arange(12) != 3
    assert dirty[0, others].tobytes() == clean[0, others].tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2)], ids=str)
def test_experts_that_nobody_takes_are_not_read(mesh, form):
    """All tokens take one expert; the others, some devices' all, are NaN."""
    layer, config = layer_of("scaled_input"), EXPERTS["scaled_input"]
    params, hidden = layer.random(), np.abs(hidden_of(16))
    params["router.weight"][:] = -1
    params["router.weight"][5] = 1
    want = oracle(params, hidden, config)
    for part in ("gate", "up", "down"):
        params[f"experts.{part}.weight"][np.arange(8) != 5] = np.nan
    assert_close(layer.run(params, hidden, mesh, FORMS[form]), want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2)], ids=str)
def test_padding_goes_to_no_expert(mesh, form):
    """Padding alone would take the experts that hold NaN; live tokens are bit-equal without it."""
    layer = layer_of("scaled_input")
    params, hidden = layer.random(), np.abs(hidden_of(16))
    params["router.weight"][:] = -1
    params["router.weight"][5] = 1
    live = np.arange(16)[None] % 3 != 0
    alone = layer.run(params, hidden, mesh, FORMS[form], live=live)
    hidden[~live] *= -1  # now every expert but one scores higher
    for part in ("gate", "up", "down"):
        params[f"experts.{part}.weight"][np.arange(8) != 5] = np.nan
    assert np.isnan(layer.run(params, hidden, mesh, FORMS[form])).any()
    found = layer.run(params, hidden, mesh, FORMS[form], live=live)
    assert found[live].tobytes() == alone[live].tobytes()
    assert np.isfinite(found).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("router", "int4"),
    [("softmax", False), ("scaled_input", False), ("sigmoid", False), ("sigmoid", True)],
)
def test_zero_weights_give_zeros(router, int4, form):
    """What pads a pipeline stage, also as 4-bit words and scales of zero."""
    layer = Layer(dataclasses.replace(EXPERTS[router], int4=int4, width=64))
    params = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in layer.shapes.items()}
    got = layer.run(params, np.float32(1e3) * hidden_of(9), (2, 2), FORMS[form])
    assert (got == 0).all()


def int4_and_its_values(rng: np.random.Generator, count: int, out: int, into: int):
    """Device form of random 4-bit weights, and the weights that they stand for, in float32."""
    stored = rng.integers(0, 16, (count, out, into // 8, 8)).astype(np.uint32)
    words = np.zeros(stored.shape[:-1], np.uint32)
    for place in range(8):
        words |= stored[..., place] << np.uint32(4 * place)
    scales = rng.uniform(0.01, 0.1, (count, out, into // 32)).astype(BFLOAT16)
    packed, scale = pack_for_device(words.view(np.int32), scales)
    values = stored.reshape(count, out, into // 32, 32).astype(np.float32) - 8
    # The product is rounded to bfloat16.
    weights = (values * scales[..., None].astype(np.float32)).astype(BFLOAT16)
    return np.asarray(packed), np.asarray(scale), weights.reshape(count, out, into)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2), (1, 2)], ids=str)
def test_int4_experts_are_their_rounded_values(mesh, form):
    config = dataclasses.replace(EXPERTS["sigmoid"], width=64, int4=True)
    layer = Layer(config)
    rng = np.random.default_rng(0)
    params = layer.random()
    dense = {name: value for name, value in params.items() if not name.startswith("experts.")}
    for part, (out, into) in {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}.items():
        packed, scale, weights = int4_and_its_values(rng, 8, out, into)
        params |= {f"experts.{part}.packed": packed, f"experts.{part}.scale": scale}
        dense[f"experts.{part}.weight"] = weights
    hidden = hidden_of(13)
    got = layer.run(params, hidden, mesh, FORMS[form])
    assert_close(got, oracle(dense, hidden, config))


def test_int4_leaves_keep_their_types_in_a_float32_model():
    layer = Layer(dataclasses.replace(EXPERTS["sigmoid"], width=64, int4=True))
    shapes = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in layer.shapes.items()}
    assert shapes["experts.gate.packed"] == ((8, 64, 4), "int32")
    assert shapes["experts.gate.scale"] == ((8, 1, 64), "bfloat16")
    assert shapes["experts.down.packed"] == ((8, 32, 8), "int32")
    assert shapes["experts.down.scale"] == ((8, 2, 32), "bfloat16")
    assert layer.axes["experts.gate.scale"] == ("experts", "embed", "expert_mlp")
    assert layer.axes["experts.down.scale"] == ("experts", "expert_mlp", "embed")
    with pytest.raises(ValueError, match="expected inputs in groups of 32, got 48"):
        Layer(dataclasses.replace(EXPERTS["sigmoid"], width=48, int4=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("router", EXPERTS)
def test_bfloat16(router, form):
    """The choice is the float32 one of the bfloat16 values; the rest is rounded on the way."""
    layer = Layer(EXPERTS[router], BFLOAT16)
    params = layer.random()
    if "router.bias" in params:
        assert params["router.bias"].dtype == np.float32
    hidden = hidden_of(16, dtype=BFLOAT16)
    got = layer.run(params, hidden, (2, 2), FORMS[form])
    assert got.dtype == BFLOAT16
    assert_close(got, oracle(params, hidden, EXPERTS[router]), 2.0**-6)


@pytest.mark.parametrize(
    ("tokens", "devices", "exchanges"),
    [(1 << 20, 4, False), (256, 64, False), (1024, 8, True), (1023, 8, False), (4096, 16, True)],
)
def test_the_form_follows_tokens_and_devices(tokens, devices, exchanges):
    assert exchanges_tokens(tokens, devices) is exchanges


@pytest.mark.parametrize(("tokens", "form"), [(1016, "whole"), (1024, "exchanged")])
def test_the_layer_takes_the_form_of_its_sizes(tokens, form):
    layer = layer_of("softmax")
    params, hidden = layer.random(), hidden_of(tokens)
    texts = {
        name: layer.lowered(params, hidden, (8, 1), exchanged)
        for name, exchanged in {**FORMS, "chosen": None}.items()
    }
    assert texts["chosen"] == texts[form]
    assert ("all_to_all" in texts[form]) == FORMS[form]


def test_route_gives_the_chosen_experts():
    layer, config = layer_of("softmax"), EXPERTS["softmax"]
    params, hidden = layer.random(), hidden_of(10).reshape(2, 5, WIDTH)
    ids = layer.run(params, hidden, (2, 2), method="route")
    assert ids.shape == (2, 5, 3)
    logits = hidden.astype(np.float64) @ params["router.weight"].T
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1)[..., :3])
    load = expert_load(jnp.asarray(ids.reshape(10, 3)), config.count, jnp.arange(10) < 6)
    np.testing.assert_array_equal(load, np.bincount(ids.reshape(10, 3)[:6].ravel(), minlength=8))


def test_a_dense_config_has_no_mixture():
    with pytest.raises(ValueError, match="expected a model config with experts"):
        MoE(tiny_config(), jnp.dtype(jnp.float32))
