"""The search for block sizes: what is refused, what is tried, what is written."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from pallas_kernels import KERNELS, tuning
from pallas_kernels.aot import Launch, Resources
from pallas_kernels.kernel import tuned_entries
from pallas_kernels.toolchain import ToolchainMissing, environment, run_python
from pallas_kernels.tuning import Trial, neighbours, refusal, search, write_tuned


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int = 64
    slots: int = 2

    def __post_init__(self) -> None:
        if self.rows * self.slots > 1024:
            raise ValueError("too many rows in flight")


SPACE = {"rows": (32, 64, 128, 256, 512), "slots": (2, 3, 4)}


def resources(**changes: int) -> Resources:
    launch = Launch("k", 168, 0, 1024, 384, (132, 1, 1))
    return Resources((dataclasses.replace(launch, **changes),), 0, 0, 0, 0, ("k",))


def fails() -> Resources:
    raise ValueError("Mosaic GPU kernel exceeds available shared memory\nand more")


def test_refusals() -> None:
    assert refusal(resources) is None
    assert refusal(lambda: resources(spill_bytes=8)) == "k spills 8 bytes"
    assert "228000 bytes" not in str(refusal(lambda: resources(shared_bytes=227 * 1024)))
    assert "233472 bytes of shared" in str(refusal(lambda: resources(shared_bytes=228 * 1024)))
    assert refusal(fails) == "ValueError: Mosaic GPU kernel exceeds available shared memory"


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
    reasons = ("shared memory", "spills")
    assert all(any(t in r["refused"] for t in reasons) for r in rows if r["refused"])
