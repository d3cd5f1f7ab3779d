"""The whole sharded steps with the kernels inside, compiled for GPUs that are not there."""

import json
import sys

import gpu_steps
import pytest

from pallas_kernels.toolchain import ToolchainMissing, environment

RECORD = json.loads(gpu_steps.RECORD.read_text(encoding="utf-8"))
LAYERS_OF_A_STAGE = gpu_steps.LAYERS // gpu_steps.MESH.pipeline

# What another XLA pass may add or save without anybody having to look.
SLACK = 0.05


@pytest.fixture(scope="module", autouse=True)
def toolchain() -> None:
    """The CUDA plugin exists for Linux alone."""
    try:
        environment()
    except ToolchainMissing as missing:
        if sys.platform == "linux":
            raise
        pytest.skip(str(missing))


def compare(found: dict, recorded: dict) -> None:
    for step in ("prefill", "decode"):
        assert found[step]["spill_bytes"] == 0
        assert found[step]["kernels"] == recorded[step]["kernels"]
        assert found[step]["alias_bytes"] == recorded[step]["alias_bytes"]
        assert found[step]["temp_bytes"] <= (1 + SLACK) * recorded[step]["temp_bytes"]


def test_steps_with_the_kernels_take_what_is_recorded() -> None:
    compare(gpu_steps.measure("mosaic"), RECORD["mosaic"])


@pytest.mark.long
def test_steps_without_the_kernels_take_what_is_recorded() -> None:
    compare(gpu_steps.measure("xla"), RECORD["xla"])


def test_no_product_of_a_float32_model_is_rounded_to_tf32() -> None:
    """JAX's default precision on a GPU is three decimal digits."""
    found = gpu_steps.measure("float32")
    assert found.keys() == {"HIGHEST"}
    assert found["HIGHEST"] > 2 * 7  # the matrices of a layer, in both steps; slots share them


def test_every_layer_calls_its_kernel() -> None:
    """One attention call a layer, and with splits one to combine them."""
    assert RECORD["xla"]["prefill"]["kernels"] == RECORD["xla"]["decode"]["kernels"] == {}
    assert RECORD["mosaic"]["prefill"]["kernels"] == {"prefill_attention": LAYERS_OF_A_STAGE}
    assert RECORD["mosaic"]["decode"]["kernels"] == {
        "paged_attention": LAYERS_OF_A_STAGE,
        "paged_attention_combine": LAYERS_OF_A_STAGE,
    }


def test_kernels_need_no_more_memory_than_xla() -> None:
    for step in ("prefill", "decode"):
        assert RECORD["mosaic"][step]["temp_bytes"] <= RECORD["xla"][step]["temp_bytes"]
        # The pools are updated in place by either.
        assert RECORD["mosaic"][step]["alias_bytes"] == RECORD["xla"][step]["alias_bytes"]
