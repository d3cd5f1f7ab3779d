"""Every kernel over every argument set, compiled for GPUs that are not there."""

import json
import sys
from pathlib import Path

import pytest

from pallas_kernels import KERNELS, aot
from pallas_kernels.compiler import TARGET_NAMES, Target
from pallas_kernels.kernel import is_hopper
from pallas_kernels.latent_attention_mosaic import REGISTERS as LATENT_REGISTERS
from pallas_kernels.prefill_attention_mosaic import REGISTERS as PREFILL_REGISTERS
from pallas_kernels.toolchain import ToolchainMissing, assembler_version, environment, run_python

# Built of the same parts as others, which are compiled every time.
ALIKE = (
    *("unweight_exponents", "unweight_transcode", "unweight_exponent_matmul"),
    *(f"grouped_unweight_{form}_matmul" for form in ("palette", "exponent", "compact")),
)
MOSAIC = [name for name, kernel in KERNELS.items() if "mosaic" in kernel.implementations]


@pytest.fixture(scope="module", autouse=True)
def toolchain() -> None:
    """The CUDA plugin exists for Linux alone."""
    try:
        environment()
    except ToolchainMissing as missing:
        if sys.platform == "linux":
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def small() -> dict:
    return json.loads(run_python(str(Path(__file__).parent / "gpu_compiles.py")))


@pytest.mark.parametrize(
    "target",
    # Both are sm_90a, and get the same code but for the number of multiprocessors.
    [pytest.param(t, marks=[pytest.mark.long] if t != "h200" else []) for t in TARGET_NAMES],
)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] if n in ALIKE else []) for n in MOSAIC]
)
def test_takes_what_is_recorded(name: str, target: str) -> None:
    rows = aot.measure([name], [target])
    record = [r for r in aot.recorded() if r["kernel"] == name and r["target"] == target]
    found = aot.problems(rows, record)
    assert not found, "\n".join([*found, "if that is meant: make resources"])


@pytest.mark.long
def test_gpu_check_compiles() -> None:
    """So that time on a GPU is not lost to what could have been seen here."""
    found = json.loads(run_python(str(Path(__file__).parent / "gpu_compiles.py"), "workloads"))
    assert not found, "\n".join(found)


def test_launches_bring_the_registers_that_their_warpgroups_ask_for() -> None:
    """A warpgroup that asks for more than the others gave back waits for ever."""
    asked = {
        ("latent_attention", 3): 2 * LATENT_REGISTERS[0] + LATENT_REGISTERS[1],
        **{
            ("prefill_attention", computing + 1): computing * own + loading
            for computing, (own, loading) in PREFILL_REGISTERS.items()
        },
    }
    seen = set()
    for row in aot.recorded():
        for launch in row["launches"]:
            kind = (launch["name"], launch["threads"] // 128)
            if kind in asked:
                assert launch["registers"] * kind[1] >= asked[kind], (row["spec"], launch)
                seen.add(kind)
    assert ("latent_attention", 3) in seen
    assert ("prefill_attention", 3) in seen


def test_figures_of_a_small_kernel(small: dict) -> None:
    (launch,) = small["fits"]["launches"]
    assert launch["name"] == "copy_through_shared"
    assert launch["grid"] == [3, 1, 1]
    assert launch["threads"] == 128
    assert launch["spill_bytes"] == 0
    assert 0 < launch["registers"] < 64
    # 13 buffers of 16 KB and a barrier.
    assert launch["shared_bytes"] == 13 * 64 * 64 * 4 + 8
    assert launch["blocks_per_sm"] == 1


def test_too_much_shared_memory_is_refused(small: dict) -> None:
    assert "shared memory" in small["overflows"]["error"]


def test_spills_are_seen(small: dict) -> None:
    (launch,) = small["spills"]["launches"]
    assert launch["spill_bytes"] > 0
    row = {"kernel": "k", "spec": "s", "dtype": "float32", "target": "h200"}
    row["launches"] = small["spills"]["launches"]
    (found,) = aot.problems([row], [row])
    assert "centre_rows spills" in found


def test_dispatch_compiles_the_gpu_form(small: dict) -> None:
    assert small["dispatched"]["calls"] == ["copy_through_shared"]


def test_dispatch_compiles_the_xla_form_of_what_mosaic_does_not_take(small: dict) -> None:
    assert small["unsupported"] == {"calls": [], "launches": []}


def test_any_difference_to_the_record_is_a_problem() -> None:
    launch = {
        "name": "k",
        "registers": 168,
        "spill_bytes": 0,
        "shared_bytes": 1024,
        "threads": 384,
        "grid": [132, 1, 1],
        "blocks_per_sm": 1,
    }
    row = {"kernel": "k", "spec": "s", "dtype": "bfloat16", "target": "h100", "launches": [launch]}
    assert aot.problems([row], [row]) == []
    more = {**row, "launches": [{**launch, "registers": 170}]}
    (found,) = aot.problems([more], [row])
    assert "168 registers" in found
    assert "170 registers" in found
    assert "not recorded" in aot.problems([row], [])[0]
    assert "no longer compiled" in aot.problems([], [row])[0]
    big = {**row, "launches": [{**launch, "shared_bytes": 228 * 1024}]}
    assert any("shared bytes" in problem for problem in aot.problems([big], [big]))
    failed = {"kernel": "k", "spec": "s", "dtype": "bfloat16", "target": "h100", "error": "no"}
    assert aot.problems([failed], [row]) == ["k / s / bfloat16 / h100: does not compile: no"]


def test_record_names_kernels_that_exist() -> None:
    assert {row["kernel"] for row in aot.recorded()} == set(MOSAIC)


def test_record_and_its_table_agree() -> None:
    text = aot.RECORD.with_suffix(".md").read_text(encoding="utf-8")
    assert text == aot.markdown(aot.recorded())


@pytest.mark.parametrize("name", TARGET_NAMES)
def test_targets_are_the_chips_that_dispatch_knows(name: str) -> None:
    assert is_hopper(Target.load(name).kind)


def test_unknown_target_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected one of .*h200.*received 'b200'"):
        Target.load("b200")


def test_assembler_is_the_one_that_the_record_was_made_with() -> None:
    lock = Path(__file__).parent.parent / "requirements" / "aot.lock"
    assert f"nvidia-cuda-nvcc=={assembler_version()} " in lock.read_text(encoding="utf-8")
