"""The search for block sizes: what is refused, what is tried, what is written."""

import dataclasses
import json
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KERNELS, Kernel, Workload, tuning
from pallas_kernels.compiler import Compiler, Launch, Resources
from pallas_kernels.kernel import tuned_entries
from pallas_kernels.toolchain import ToolchainMissing, environment, run_python
from pallas_kernels.tuning import Heard, Trial, neighbours, refusal, search, tune, write_tuned


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int = 64
    slots: int = 2

    def __post_init__(self) -> None:
        if self.rows * self.slots > 1024:
            raise ValueError("too many rows in flight")


SPACE = {"rows": (32, 64, 128, 256, 512), "slots": (2, 3, 4)}


def resources(said: str = "", **changes: int) -> tuple[Resources, str]:
    launch = Launch("k", 168, 0, 1024, 384, (132, 1, 1))
    return Resources((dataclasses.replace(launch, **changes),), 0, 0, 0, 0, ("k",), ""), said


def fails() -> tuple[Resources, str]:
    raise ValueError("Mosaic GPU kernel exceeds available shared memory\nand more")


def silent() -> tuple[Resources, str]:
    raise KeyError("0123456789abcdef")


def refused(compile_it) -> str:
    return str(refusal("k of 64 rows", compile_it))


def test_refusals() -> None:
    assert refusal("k of 64 rows", resources) is None
    assert refused(lambda: resources(spill_bytes=8)) == "k spills 8 bytes"
    assert "228000 bytes" not in refused(lambda: resources(shared_bytes=227 * 1024))
    assert "233472 bytes of shared" in refused(lambda: resources(shared_bytes=228 * 1024))
    assert refused(fails) == "ValueError: Mosaic GPU kernel exceeds available shared memory"
    line = "ptxas info : (C7511) Potential Performance Loss: wgmma.mma_async instructions are"
    assert refused(lambda: resources(line)) == "the assembler serialises products (C7511)"


def test_a_silent_assembler_names_the_candidate() -> None:
    with pytest.raises(RuntimeError, match="k of 64 rows: no report of the assembler"):
        refusal("k of 64 rows", silent)


def test_what_the_assembler_says_is_kept_and_passed_on(capfd: pytest.CaptureFixture) -> None:
    class Lowered:
        compiler_ir = None

        def compile(self) -> str:
            os.write(1, b"ptxas info")
            return "compiled"

    heard = Heard(Lowered())  # type: ignore[arg-type]
    assert heard.compile() == "compiled"
    assert heard.said == "ptxas info"
    assert capfd.readouterr().out == "ptxas info"


def test_neighbours_differ_in_one_field() -> None:
    found = list(neighbours(Blocks(), SPACE))
    assert Blocks() not in found
    assert len(found) == 4 + 2
    # 512 rows allow 2 slots and no more.
    assert Blocks(512, 2) in found
    assert list(neighbours(Blocks(512), {"slots": (2, 3, 4)})) == []


def test_search_finds_the_fastest_and_tries_nothing_twice() -> None:
    tried = []

    def trial(blocks: Blocks) -> Trial:
        tried.append(blocks)
        return Trial(blocks, None, abs(math.log2(blocks.rows / 128)) + abs(blocks.slots - 3) + 1)

    trials = search(Blocks(), SPACE, trial)
    assert trials[-1].blocks == Blocks(128, 3)
    assert len(tried) == len(set(tried)) == len(trials)
    # Far from all that there are.
    assert len(tried) <= 10


def test_search_leaves_refused_defaults() -> None:
    def trial(blocks: Blocks) -> Trial:
        return Trial(blocks, "spills" if blocks.rows >= 64 else None, 1.0)

    best = search(Blocks(), SPACE, trial)[-1]
    assert best.refused is None
    assert best.blocks.rows == 32


def test_search_keeps_the_defaults_for_less_than_noise() -> None:
    trials = search(Blocks(), SPACE, lambda b: Trial(b, None, 1.0 if b == Blocks() else 0.99))
    assert trials[-1].blocks == Blocks()


def test_search_with_nothing_that_fits() -> None:
    trials = search(Blocks(), SPACE, lambda blocks: Trial(blocks, "no"))
    assert trials[-1].refused == "no"


def fake_form(x: jax.Array, *, blocks: Blocks) -> jax.Array:
    """Doubles; not with 128 rows in a block, and with 256 the device complains."""

    def complain(x: np.ndarray) -> np.ndarray:
        raise RuntimeError("misaligned address")

    if blocks.rows == 256:
        return jax.pure_callback(complain, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return x * 2 + (1 if blocks.rows == 128 else 0)


FAKE = Kernel(
    name="fake",
    reference=lambda x: 2 * x,
    implementations={"xla": lambda x: x * 2, "mosaic": fake_form},
    arg_specs=(),
    tolerance={"float32": 1e-5},
    flops=lambda x: x.size,
    bytes=lambda x: 2 * x.size,
    blocks=Blocks,
    space={"rows": (32, 64, 128, 256)},
)


def test_wrong_and_failing_candidates_are_refused_and_written_down() -> None:
    workload = Workload("fake", "small", lambda key: {"x": jnp.ones((8, 8))}, {})
    entry = tune(FAKE, workload, Compiler())
    reasons = {blocks["rows"]: reason for blocks, reason in entry["refused"]}
    assert set(reasons) == {128, 256}
    assert reasons[128] == "wrong by 5.0e-01 of the largest value"
    assert reasons[256].startswith("JaxRuntimeError")
    assert entry["blocks"]["rows"] in (32, 64)
    assert entry["tried"] == 4
    assert entry["default_seconds"] > 0


def test_one_workload_that_cannot_be_tuned_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def found(kernel: Kernel, workload: Workload, compiler: Compiler) -> dict:
        if workload.name == "bad":
            raise ValueError("every candidate was refused: no memory")
        return {"workload": workload.name}

    monkeypatch.setattr(tuning, "tune", found)
    monkeypatch.setitem(KERNELS, "fake", FAKE)
    todo = {"fake": [Workload("fake", name, lambda key: {}, {}) for name in ("bad", "good")]}
    assert tuning._tune_all(todo, "NVIDIA H200", tmp_path, Compiler()) == 1
    assert tuned_entries("NVIDIA H200", tmp_path) == {"fake": [{"workload": "good"}]}
    assert "fake, bad: every candidate was refused" in capsys.readouterr().err


def test_written_entries_are_those_that_dispatch_reads(tmp_path: Path) -> None:
    entry = {"shapes": [[[8, 64], "bfloat16"]], "blocks": {"rows": 128, "slots": 3}}
    path = write_tuned("NVIDIA H200", {"one": [entry]}, tmp_path)
    assert path.name == "nvidia_h200.json"
    write_tuned("NVIDIA H200", {"two": [entry]}, tmp_path)
    assert tuned_entries("NVIDIA H200", tmp_path) == {"one": [entry], "two": [entry]}
    assert json.loads(path.read_text(encoding="utf-8"))["device"] == "NVIDIA H200"


def test_without_a_gpu_nothing_is_tuned() -> None:
    with pytest.raises(ValueError, match="expected a Hopper GPU, or --target, received cpu"):
        tuning.main(["--in-child"])


def test_survey_refuses_what_does_not_fit() -> None:
    """One kernel for an absent H200: every candidate fits or says why not; the defaults fit."""
    try:
        environment()
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    arguments = ("--in-child", "--target", "h200", "--kernel", "prefill_attention")
    text = run_python("-m", "pallas_kernels.tuning", *arguments, "--workloads", "1")
    rows = [json.loads(line) for line in text.splitlines()]
    defaults = dataclasses.asdict(KERNELS["prefill_attention"].blocks())
    assert [r["refused"] for r in rows if r["blocks"] == defaults] == [None]
    assert any(r["refused"] for r in rows)
    reasons = ("shared memory", "spills", "serialises")
    assert all(any(t in r["refused"] for t in reasons) for r in rows if r["refused"])
