"""Compressed weights on devices: each holds the coding of its own part, to the bit."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import ChangedSource, tiny_config

import jinfire as jf
from jinfire.config import ExpertsConfig, LatentConfig, LayerSpec
from jinfire.layout import StageLayout, projection_of
from jinfire.loading import RandomSource, load_params
from jinfire.models.spec import abstract_tree
from jinfire.programs.abstract import AbstractPrograms, Sizes
from jinfire.unweight.tensor import MESH_AXES, RAGGED, UnweightTensor, common_length
from pallas_kernels import KERNELS, UnweightMatrix
from sharding import MeshSpec, make_mesh

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

DENSE = tiny_config(layers=3, width=128, mlp_width=256, num_heads=4, head_dim=32, vocab_size=97)
TIED = dataclasses.replace(DENSE, tie_embeddings=True)
EXPERTS = dataclasses.replace(
    DENSE,
    layers=(LayerSpec(), *(LayerSpec(mlp="experts"),) * 2),
    experts=ExpertsConfig(count=4, per_token=2, width=128, normalise=True, shared_width=64),
)
LATENT = dataclasses.replace(
    DENSE,
    family="kimi_k2",
    num_kv_heads=4,
    layers=(LayerSpec("latent"), *(LayerSpec("latent", "experts"),) * 2),
    latent=LatentConfig(query_rank=64, rank=64, nope_dim=16, rope_dim=16, value_dim=32),
    experts=ExpertsConfig(
        count=4, per_token=2, width=64, router="sigmoid", shared_width=64, int4=True
    ),
)
MODELS = {"dense": DENSE, "tied": TIED, "experts": EXPERTS, "latent": LATENT}
MESHES = [
    ("dense", MeshSpec()),
    ("dense", MeshSpec(pipeline=2, tensor=2)),
    ("dense", MeshSpec(tensor=4)),
    ("tied", MeshSpec(pipeline=3)),
    ("experts", MeshSpec(pipeline=2, expert=2, tensor=2)),
    ("latent", MeshSpec(pipeline=2, expert=2)),
]
FORMS = {"huffman": "exponent", "palette": "direct", "compact": "compact"}


def far_exponents(name: str, values: np.ndarray) -> np.ndarray:
    """Random weights of which some are far smaller than the others."""
    if values.dtype == np.float32 and values.ndim > 1:
        values[..., ::5, ::31] *= np.float32(1e-30)
    return values


def source(config: jf.ModelConfig) -> ChangedSource:
    return ChangedSource(RandomSource(config), far_exponents)


def loaded(config: jf.ModelConfig, spec: MeshSpec, variant: str):
    layout = StageLayout(config, spec, jf.UnweightPolicy.uniform(variant))
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    return layout, load_params(source(config), layout, mesh, BFLOAT16)


def decoded(matrix: UnweightMatrix) -> np.ndarray:
    """Words of a matrix, or a stack of them, by the reference in NumPy."""
    kernel = KERNELS[f"unweight_{matrix.form}"]
    return np.asarray(kernel.reference(*matrix.arrays().values(), shape=matrix.shape)).view(
        np.uint16
    )


def parts(weight: jax.Array | UnweightTensor, stacked: bool) -> dict[jax.Device, np.ndarray]:
    """What each device holds, as words."""
    if not isinstance(weight, UnweightTensor):
        held = {shard.device: np.asarray(shard.data) for shard in weight.addressable_shards}
        return {
            device: (part[0] if stacked else part).view(np.uint16) for device, part in held.items()
        }
    leaves, tree = jax.tree.flatten(weight.matrix)
    by_device: dict[jax.Device, list] = {}
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            assert shard.data.shape[:MESH_AXES] == (1, 1, 1)
            by_device.setdefault(shard.device, []).append(np.asarray(shard.data)[0, 0, 0])
    return {device: decoded(jax.tree.unflatten(tree, own)) for device, own in by_device.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("model", "spec"), MESHES, ids=str)
def test_every_device_holds_its_own_part(model, spec, form):
    """Whichever axis is split; padded vocabulary and stages without a layer are zeros."""
    config = MODELS[model]
    layout, plain = loaded(config, spec, "dense")
    _, coded = loaded(config, spec, FORMS[form])
    assert coded.keys() == plain.keys()
    tensors = StageLayout(config, spec, jf.UnweightPolicy.uniform(FORMS[form])).tensors
    for name, weight in coded.items():
        assert isinstance(weight, UnweightTensor) == (tensors[name].coded is not None)
        if not isinstance(weight, UnweightTensor):
            continue
        assert weight.matrix.form == form
        found, expected = parts(weight, layout.tensors[name].stacked), plain[name]
        for device, words in parts(expected, layout.tensors[name].stacked).items():
            np.testing.assert_array_equal(found[device], words, err_msg=f"{name} on {device}")


def test_layers_of_a_kind_have_one_shape():
    """They are traced once for all; a layer that is far from the others keeps its own shape."""

    def one_far_layer(name: str, values: np.ndarray) -> np.ndarray:
        if name == "layers.4.mlp.gate.weight":
            values[:, ::3] *= np.float32(1e-30)
        return values

    model = dataclasses.replace(DENSE, layers=DENSE.layers[:1] * 8)
    changed = ChangedSource(RandomSource(model), one_far_layer)
    for form in FORMS.values():
        layout = StageLayout(model, MeshSpec(), jf.UnweightPolicy.uniform(form))
        mesh = make_mesh(MeshSpec(), jax.devices()[:1])
        params = load_params(changed, layout, mesh, BFLOAT16)
        shapes: dict[str, set] = {}
        for name, weight in params.items():
            if isinstance(weight, UnweightTensor):
                own = tuple(array.shape for array in weight.matrix.arrays().values())
                shapes.setdefault(projection_of(name), set()).add(own)
        counts = {projection: len(found) for projection, found in shapes.items()}
        assert counts.pop("mlp.gate") == 2
        assert set(counts.values()) == {1}
        held = parts(params["layers.3.mlp.gate.weight"], True)
        expected = changed.read("layers.3.mlp.gate.weight", (slice(None),) * 2)
        np.testing.assert_array_equal(
            held[jax.devices()[0]], expected.astype(BFLOAT16).view(np.uint16)
        )


@pytest.mark.parametrize(
    ("lengths", "spare", "common"),
    [([7], 0, 7), ([10, 12, 11], 1, 12), ([10, 12, 11], 0, 11), ([10, 10, 10, 90], 20, 10)],
)
def test_common_lengths(lengths, spare, common):
    assert common_length(lengths, spare) == common


def test_what_stays_dense_and_why():
    policy = jf.UnweightPolicy.uniform("direct")
    tensors = StageLayout(LATENT, MeshSpec(expert=2, tensor=2), policy).tensors
    why = {projection_of(name): tensor.why_dense for name, tensor in tensors.items()}
    assert tensors["layers.1.mlp.router.weight"].why_dense == "multiplied in float32"
    assert tensors["layers.1.mlp.experts.up.packed"].why_dense == "stored as int32"
    assert tensors["layers.1.mlp.experts.up.scale"].why_dense == "stored as bfloat16"
    # 4 heads of 32 values, over 4 devices.
    assert why["attention.output"] == "32 columns on a device, not a multiple of 64"
    assert why["attention.query_up"] is None
    for norm in ("attention_norm", "final_norm"):
        assert why[norm] is None
    coded = StageLayout(LATENT, MeshSpec(expert=2, tensor=2), policy).coded_projections
    assert str(coded["attention.latent_up"]) == "full_palette"
    assert str(coded["attention.query_down"]) == str(coded["head"]) == "direct"
    assert StageLayout(LATENT, MeshSpec()).coded_projections == {}


def test_a_policy_may_leave_projections_dense():
    policy = jf.UnweightPolicy.uniform("direct", ("mlp.gate", "mlp.up"))
    layout = StageLayout(DENSE, MeshSpec(), policy)
    assert set(layout.coded_projections) == {"mlp.gate", "mlp.up"}
    assert layout.tensors["layers.0.mlp.down.weight"].why_dense == "by the policy"


def test_other_data_types_are_refused():
    with pytest.raises(ValueError, match=r"unweight: expected dtype .bfloat16.,.*got .float32."):
        jf.Engine(source(DENSE), unweight="direct")
    with pytest.raises(ValueError, match="unweight: expected dtype 'bfloat16'"):
        jf.Model(source(DENSE), unweight="direct")


def test_one_mesh_has_one_policy():
    policies = jf.PhasePolicies(None, jf.UnweightPolicy.uniform("direct"))
    with pytest.raises(ValueError, match="one policy where prefill and decode share a mesh"):
        jf.Engine(source(DENSE), dtype="bfloat16", unweight=policies)


def test_a_model_gives_and_stores_its_weights_decompressed(tmp_path):
    plain = jf.Model(source(TIED), dtype="bfloat16").params()
    model = jf.Model(source(TIED), dtype="bfloat16", unweight="compact")
    model.save(tmp_path / "stored")
    stored = jf.Model.from_pretrained(tmp_path / "stored", dtype="bfloat16").params()
    assert model.params().keys() == plain.keys() == abstract_tree(TIED).keys()
    for name, weight in model.params().items():
        for other in (plain[name], stored[name]):
            assert weight.dtype == other.dtype == jnp.bfloat16
            np.testing.assert_array_equal(
                np.asarray(weight).view(np.uint16), np.asarray(other).view(np.uint16), err_msg=name
            )


@pytest.mark.parametrize("form", FORMS)
def test_programs_from_shapes_have_the_arrays_of_real_weights(form):
    policy = jf.UnweightPolicy.uniform(FORMS[form])
    spec = MeshSpec(pipeline=2, expert=2, tensor=2)
    sizes = Sizes({"full": 9}, 4, 8, 4, 2, 2, 16)
    devices = jax.devices()[: spec.size]
    shapes = AbstractPrograms(EXPERTS, spec, devices, BFLOAT16, sizes, policy).params()
    _, params = loaded(EXPERTS, spec, FORMS[form])
    assert shapes.keys() == params.keys()
    for name, weight in params.items():
        shape = shapes[name]
        if not isinstance(weight, UnweightTensor):
            assert (shape.shape, shape.dtype) == (weight.shape, weight.dtype)
            continue
        assert shape.choice == weight.choice
        for field, array in weight.matrix.arrays().items():
            usual = getattr(shape.matrix, field)
            assert usual.dtype == array.dtype
            assert usual.sharding == array.sharding
            assert usual.ndim == array.ndim
            axis = RAGGED.get(field)
            same = [n for i, n in enumerate(array.shape) if axis is None or i != array.ndim + axis]
            assert same == [
                n for i, n in enumerate(usual.shape) if axis is None or i != array.ndim + axis
            ]
