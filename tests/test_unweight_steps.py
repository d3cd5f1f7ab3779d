"""Weights that a product reconstructs are decompressed nowhere in the memory of a GPU."""

import json
import sys
from pathlib import Path

import gpu_unweight_steps
import pytest

from pallas_kernels import run_python
from pallas_kernels.toolchain import ToolchainMissing, environment

SCRIPT = Path(gpu_unweight_steps.__file__)
PRODUCTS = gpu_unweight_steps.LAYERS * gpu_unweight_steps.PROJECTIONS + 1  # and the head


@pytest.fixture(scope="module", autouse=True)
def toolchain() -> None:
    """The CUDA plugin exists for Linux alone."""
    try:
        environment()
    except ToolchainMissing as missing:
        if sys.platform == "linux":
            raise
        pytest.skip(str(missing))


def compiled(*variants: str) -> dict[str, dict]:
    return json.loads(run_python(str(SCRIPT), *variants))


@pytest.mark.long
def test_direct_and_compact_weights_are_never_whole() -> None:
    steps = compiled("dense", "direct", "compact")
    dense = steps["dense"]
    for variant, form, most in (("direct", "palette", 0.79), ("compact", "compact", 0.75)):
        step = steps[variant]
        assert step["kernels"][f"unweight_{form}_matmul"] == PRODUCTS
        assert step["spill_bytes"] == 0
        assert step["temp_bytes"] < dense["temp_bytes"] + min(step["weights"].values())
        # What is argument and no weight is the same in both.
        saved = dense["argument_bytes"] - step["argument_bytes"]
        assert saved > (1 - most) * sum(step["weights"].values())


@pytest.mark.long
def test_other_variants_write_what_they_say() -> None:
    """Of one weight after the other: all of it, half, or a quarter."""
    steps = compiled("dense", "full", "exponent", "transcode")
    dense = steps["dense"]
    for variant, kernels, written in (
        ("full", ("unweight_huffman_words",), 1),
        ("exponent", ("unweight_huffman_exponents", "unweight_exponent_matmul"), 1 / 2),
        ("transcode", ("unweight_huffman_codes", "unweight_palette_matmul"), 1 / 4),
    ):
        step = steps[variant]
        assert all(step["kernels"][kernel] == PRODUCTS for kernel in kernels)
        assert step["spill_bytes"] == 0
        largest = max(step["weights"].values())
        assert largest * written < step["temp_bytes"]
        assert step["temp_bytes"] < dense["temp_bytes"] + 2.2 * largest * written
