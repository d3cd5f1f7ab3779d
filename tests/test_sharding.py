"""Meshes and logical-axis rules."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding import (
    AXES,
    MeshSpec,
    check_tensor,
    make_mesh,
    partition_spec,
    replicate,
    split_devices,
)


def test_mesh_has_all_axes_pipeline_major():
    spec = MeshSpec(pipeline=2, data=1, expert=2, tensor=2)
    devices = jax.devices()[:8]
    mesh = make_mesh(spec, devices)
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"pipeline": 2, "data": 1, "expert": 2, "tensor": 2}
    assert list(mesh.devices.flat) == devices
    assert mesh.devices[1, 0, 0, 1] == devices[5]
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert make_mesh(MeshSpec(), devices[:1]).axis_names == AXES


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (MeshSpec(), "pipeline 1 x tensor 1"),
        (MeshSpec(2, tensor=4), "pipeline 2 x tensor 4"),
        (MeshSpec(2, expert=2), "pipeline 2 x expert 2 x tensor 1"),
        (MeshSpec(data=3), "pipeline 1 x data 3 x tensor 1"),
    ],
)
def test_mesh_spec_text(spec, text):
    assert str(spec) == text


@pytest.mark.parametrize("size", [0, -1, 1.0, True])
def test_mesh_spec_refuses(size):
    with pytest.raises(ValueError, match=r"MeshSpec.tensor: expected an integer >= 1"):
        MeshSpec(tensor=size)


def test_make_mesh_refuses_other_device_counts():
    devices = jax.devices()
    with pytest.raises(ValueError, match="expected 2 distinct devices, got 3"):
        make_mesh(MeshSpec(2), devices[:3])
    with pytest.raises(ValueError, match="expected 2 distinct devices"):
        make_mesh(MeshSpec(2), [devices[0], devices[0]])


def test_split_devices_is_disjoint_and_in_order():
    devices = jax.devices()[:8]
    first, second = split_devices([MeshSpec(2, tensor=2), MeshSpec(tensor=3)], devices)
    assert (first, second) == (devices[:4], devices[4:7])


def test_split_devices_says_how_to_get_more():
    with pytest.raises(ValueError, match=r"needs 6 devices, 3 present") as error:
        split_devices([MeshSpec(2), MeshSpec(tensor=4)], jax.devices()[:3])
    assert 'jax.config.update("jax_num_cpu_devices", 6)' in str(error.value)
    assert "--devices 6" in str(error.value)


def test_replicate():
    mesh = make_mesh(MeshSpec(2, tensor=2), jax.devices()[:4])
    tree = replicate({"a": np.arange(3), "b": [np.float32(2)]}, mesh)
    assert tree["a"].sharding == NamedSharding(mesh, PartitionSpec())
    assert tree["b"][0].is_fully_replicated
    again = replicate(tree, make_mesh(MeshSpec(tensor=2), jax.devices()[4:6]))
    np.testing.assert_array_equal(again["a"], np.arange(3))


RULES = {"heads": "tensor", "width": None, "vocab": ("expert", "tensor"), "layers": "pipeline"}


def test_partition_spec():
    assert partition_spec(("layers", "heads", None, "width"), RULES) == PartitionSpec(
        "pipeline", "tensor", None, None
    )
    assert partition_spec(("vocab", "width"), RULES) == PartitionSpec(("expert", "tensor"), None)
    assert partition_spec((), RULES) == PartitionSpec()


def test_partition_spec_refuses():
    with pytest.raises(ValueError, match="'tensor' splits both 'vocab' and 'heads'"):
        partition_spec(("vocab", "heads"), RULES)
    with pytest.raises(ValueError, match="'tensor' splits both 'heads' and 'heads'"):
        partition_spec(("heads", "heads"), RULES)
    with pytest.raises(ValueError, match="'mlp' has no rule; known: "):
        partition_spec(("mlp",), RULES)
    with pytest.raises(ValueError, match="got 'model'"):
        partition_spec(("mlp",), {"mlp": "model"})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor"), [(9, 3, 3), (9, 3, 9), (32, 8, 16), (4, 4, 2), (4, 1, 4)]
)
def test_heads_that_split(heads, kv_heads, tensor):
    check_tensor(heads, kv_heads, tensor)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "valid"),
    [(9, 3, 2, "1, 3, 9"), (32, 8, 5, "1, 2, 4, 8, 16, 32"), (12, 2, 3, "1, 2, 4, 6, 12")],
)
def test_heads_that_do_not_split(heads, kv_heads, tensor, valid):
    with pytest.raises(ValueError, match="cannot be split") as error:
        check_tensor(heads, kv_heads, tensor)
    assert str(error.value) == (
        f"{heads} query heads and {kv_heads} kv heads cannot be split over tensor={tensor}; "
        f"valid sizes: {valid}"
    )


def test_sizes_offered_fit_everything_that_is_divided():
    check_tensor(9, 3, 3, mlp_width=1536)
    with pytest.raises(
        ValueError, match=r"3 kv heads, mlp_width 1536 cannot be split over tensor=9; .*: 1, 3$"
    ):
        check_tensor(9, 3, 9, mlp_width=1536)
