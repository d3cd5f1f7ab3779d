"""The experiments' own arithmetic: configs, rows, resumption, checks, tables, workloads."""

import dataclasses
import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from experiments import harness, tables, workloads
from experiments.__main__ import EXPERIMENTS, main
from experiments.harness import Estimate, Experiment, Measured, Options

ROOT = Path(__file__).parent.parent

# Child processes share the tests' compilation cache (conftest.py).
COMPILE_CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    size: int
    name: str = "a"
    shape: tuple[int, int] | None = None
    seed: int = 0


def toy_configs(smoke: bool) -> list[ToyConfig]:
    return [ToyConfig(1)] if smoke else harness.product(ToyConfig, size=[1, 2], name=["a", "b"])


def toy_run(todo: Sequence[ToyConfig], options: Options) -> Iterator[Measured]:
    for config in todo:
        yield Measured(
            config=config,
            values={"speed": Estimate(2.0 * config.size, 1.0, 3.0, 5), "gone": math.nan},
            n=5,
            definitions={"speed": "things per second", "gone": "never there"},
        )


def toy_table(rows: Sequence[harness.Row]) -> tables.Table:
    return tables.Table(
        caption="A toy.",
        columns=("size", "speed"),
        rows=tuple(
            (
                tables.Cell(str(row["config"]["size"])),
                tables.Cell(tables.estimate(row["values"]["speed"]), row["kind"]),
            )
            for row in rows
        ),
        numeric=frozenset({1}),
    )


TOY = Experiment(
    name="toy",
    summary="a toy",
    configs=toy_configs,
    run=toy_run,
    devices=lambda config: 1,
    sources=("experiments/workloads.py",),
    tables={"toy": toy_table},
)


@pytest.fixture
def clean_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "git_state", lambda: ("0" * 40, False))


@pytest.fixture
def results(tmp_path: Path, clean_tree: None) -> Path:
    """Rows and tables of a whole run of the toy."""
    run_toy(tmp_path)
    tables.write({"toy": TOY}, tmp_path, tmp_path)
    return tmp_path


def run_toy(folder: Path, configs: Sequence[ToyConfig] | None = None) -> int:
    """Runs what is unfinished, as the command line does; how many rows it wrote."""
    path = harness.results_path(folder, "toy")
    configs = toy_configs(False) if configs is None else configs
    todo = harness.unfinished(TOY, configs, harness.read_rows(path))
    for measured in toy_run(todo, Options()):
        harness.write_row(path, harness.make_row(TOY, measured, 0.5, smoke=False))
    return len(todo)


def edit(folder: Path, index: int, **fields: object) -> None:
    path = harness.results_path(folder, "toy")
    rows = harness.read_rows(path)
    rows[index] |= fields
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def problems(folder: Path) -> list[str]:
    return tables.check({"toy": TOY}, folder, folder)


# -- configs


def test_product_and_select() -> None:
    configs = toy_configs(False)
    assert [(c.size, c.name) for c in configs] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert harness.select(configs, ["size=2", "name=b"]) == [ToyConfig(2, "b")]
    assert len(harness.select(configs, ["size=1", "size=2"])) == 4
    shaped = [ToyConfig(1, shape=(2, 2)), ToyConfig(1)]
    assert harness.select(shaped, ["shape=[2, 2]"]) == shaped[:1]
    assert harness.select(shaped, ["shape=null"]) == shaped[1:]


@pytest.mark.parametrize("only", ["size", "colour=red", "size=3"])
def test_select_refuses(only: str) -> None:
    with pytest.raises(ValueError, match="--only"):
        harness.select(toy_configs(False), [only])


def test_config_hash_sees_every_field() -> None:
    hashes = {
        harness.config_hash("toy", config)
        for config in (ToyConfig(1), ToyConfig(2), ToyConfig(1, seed=1), ToyConfig(1, shape=(1, 2)))
    } | {harness.config_hash("other", ToyConfig(1))}
    assert len(hashes) == 5
    round_trip = json.loads(json.dumps(harness.as_dict(ToyConfig(1, shape=(1, 2)))))
    assert harness.config_hash("toy", round_trip) == harness.config_hash(
        "toy", ToyConfig(1, shape=(1, 2))
    )


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
@pytest.mark.parametrize("smoke", [False, True])
def test_experiments_are_well_formed(name: str, smoke: bool) -> None:
    experiment = EXPERIMENTS[name]
    configs = experiment.configs(smoke)
    assert configs
    hashes = [harness.config_hash(name, config) for config in configs]
    assert len(set(hashes)) == len(hashes)
    assert all(experiment.devices(config) >= 1 for config in configs)
    assert len(harness.source_hash(experiment.sources)) == 64
    for file, text in tables.render(experiment, []).items():
        assert file.endswith((".md", ".tex"))
        assert text


# -- statistics


def test_median_and_interval() -> None:
    estimate = harness.median([3.0, 1.0, math.nan, 2.0])
    assert (estimate.value, estimate.n) == (2.0, 3)
    assert 1.0 <= estimate.low <= 2.0 <= estimate.high <= 3.0
    assert harness.median([4.0]) == Estimate(4.0, 4.0, 4.0, 1)
    assert harness.median([1.0, 5.0]) == harness.median([1.0, 5.0])
    nothing = harness.median([math.nan])
    assert nothing.n == 0
    assert math.isnan(nothing.value)


def test_interval_covers_the_median() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        estimate = harness.median(rng.normal(size=25).tolist())
        hits += estimate.low <= 0 <= estimate.high
    assert 180 <= hits <= 200


def test_ratios_are_paired() -> None:
    # The machine halves its speed for two rounds; the ratio does not move.
    ours, theirs = [30.0, 15.0, 15.0, 30.0, 33.0], [20.0, 10.0, 10.0, 20.0, 22.0]
    ratio = harness.paired_ratio(ours, theirs)
    assert (ratio.value, ratio.low, ratio.high) == (1.5, 1.5, 1.5)
    with pytest.raises(ValueError, match="5 and 4"):
        harness.paired_ratio(ours, theirs[:4])


# -- provenance and rows


def test_row_holds_its_provenance(clean_tree: None) -> None:
    measured = next(iter(toy_run([ToyConfig(2, shape=(1, 2))], Options())))
    row = harness.make_row(TOY, measured, 0.5, smoke=False)
    assert row == json.loads(json.dumps(row, allow_nan=False))
    assert row["config"] == {"size": 2, "name": "a", "shape": [1, 2], "seed": 0}
    assert row["config_hash"] == harness.config_hash("toy", row["config"])
    assert row["values"]["speed"]["value"] == 4.0
    assert row["values"]["gone"] is None
    assert {"jax", "jaxlib", "numpy", "python"} <= set(row["versions"])
    assert row["device"]["count"] >= 1
    for name in ("commit", "dirty", "seed", "n", "kind", "definitions", "cpu", "time", "wall_s"):
        assert name in row


def test_row_refuses_what_it_cannot_state(clean_tree: None) -> None:
    measured = next(iter(toy_run([ToyConfig(1)], Options())))
    with pytest.raises(ValueError, match="kind"):
        harness.make_row(TOY, dataclasses.replace(measured, kind="guessed"), 0.5, smoke=False)
    with pytest.raises(ValueError, match="no definition"):
        harness.make_row(TOY, dataclasses.replace(measured, definitions={}), 0.5, smoke=False)


def test_resume_runs_what_is_missing(tmp_path: Path, clean_tree: None) -> None:
    assert run_toy(tmp_path, toy_configs(False)[:1]) == 1
    assert run_toy(tmp_path) == 3
    assert run_toy(tmp_path) == 0
    assert len(harness.read_rows(harness.results_path(tmp_path, "toy"))) == 4


def test_resume_replaces_stale_and_dirty_rows(results: Path) -> None:
    edit(results, 0, source_hash="other")
    edit(results, 2, dirty=True)
    assert run_toy(results) == 2
    assert len(harness.read_rows(harness.results_path(results, "toy"))) == 4
    assert problems(results) == []


def test_broken_line_is_named(results: Path) -> None:
    path = harness.results_path(results, "toy")
    path.write_text(path.read_text() + '{"half": \n')
    with pytest.raises(ValueError, match=r"toy\.jsonl:5"):
        harness.read_rows(path)


# -- check


def test_check_passes(results: Path) -> None:
    assert problems(results) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dirty": True}, "dirty"),
        ({"source_hash": "0" * 64}, "stale"),
        ({"smoke": True}, "smoke run"),
        ({"config_hash": "0" * 64}, "no such config"),
        ({"config": {"size": 7, "name": "a", "shape": None, "seed": 0}}, "edited"),
    ],
)
def test_check_fails_on_a_bad_row(results: Path, fields: dict[str, object], expected: str) -> None:
    edit(results, 1, **fields)
    assert any(expected in problem for problem in problems(results))


def test_check_fails_on_a_missing_row(results: Path) -> None:
    path = harness.results_path(results, "toy")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    tables.write({"toy": TOY}, results, results)
    assert [p.split(":")[0] for p in problems(results)] == ["missing"]
    path.unlink()
    assert [p.split(":")[0] for p in problems(results)][:4] == ["missing"] * 4


def test_check_fails_on_a_doubled_row(results: Path) -> None:
    path = harness.results_path(results, "toy")
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[0])
    assert any("doubled" in problem for problem in problems(results))


def test_check_fails_on_a_table_that_differs(results: Path) -> None:
    (results / "toy.md").write_text((results / "toy.md").read_text().replace("2.00", "3.00"))
    assert problems(results) == ["table differs from its rows: toy.md"]
    (results / "toy.md").unlink()
    (results / "old.tex").write_text("")
    assert problems(results) == ["missing table: toy.md", "table of no experiment: old.tex"]


# -- tables


def test_numbers() -> None:
    assert tables.number(None) == tables.number(math.nan) == "–"
    assert tables.number(1234.5) == "1,230"
    assert tables.number(0.012345) == "0.0123"
    assert tables.number(99.96) == "100.0"
    assert tables.number(123456) == "123,456"
    assert tables.number(True) == "yes"
    assert tables.estimate({"value": 0.0123, "low": 0.01, "high": 0.02}, scale=1e3) == (
        "12.3 [10.0, 20.0]"
    )
    assert tables.estimate({"value": None, "low": None, "high": None}) == "–"
    assert tables.estimate(None) == "–"


def test_formats() -> None:
    cell = tables.Cell
    table = tables.Table("50 % & more_x", ("a_b", "n"), ((cell("x|y"), cell("≥ 1")),))
    assert "| x\\|y | ≥ 1 |" in tables.markdown(table)
    text = tables.latex(table, "t")
    assert r"50 \% \& more\_x" in text
    assert r"$\geq$ 1" in text
    assert r"\label{tab:t}" in text
    with pytest.raises(ValueError, match="expected 2 cells, got 1"):
        tables.Table("c", ("a", "b"), ((cell("x"),),))


def test_mixed_kinds_are_marked() -> None:
    cell = tables.Cell
    mixed = tables.Table("c", ("n",), ((cell("1"),), (cell("2", "simulated"),)))
    assert "| 2 (s) |" in tables.markdown(mixed)
    assert "simulated, not measured" in tables.markdown(mixed)
    assert "(s)" not in tables.markdown(tables.Table("c", ("n",), ((cell("1"),),)))
    pure = tables.Table("c", ("n",), ((cell("2", "cited"),),))
    assert "All cells as published by others." in tables.markdown(pure)


def test_tables_follow_the_order_of_the_configs(results: Path) -> None:
    path = harness.results_path(results, "toy")
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert problems(results) == []


# -- workloads


def test_mooncake_mix_is_deterministic_and_fits() -> None:
    lengths = workloads.mooncake_mix(64, 1024, seed=0)
    assert lengths == workloads.mooncake_mix(64, 1024, seed=0)
    assert lengths != workloads.mooncake_mix(64, 1024, seed=1)
    assert sorted(i for i, _ in lengths) == sorted(
        i for i, _ in workloads.mooncake_mix(64, 1024, seed=1)
    )
    assert all(i >= 1 and o >= 1 and i + o <= 1024 for i, o in lengths)


def test_mooncake_quantiles_come_back() -> None:
    mix = workloads.MOONCAKE_CONVERSATION
    pairs = mix.draw(4000, seed=0)
    for column, stated in zip(zip(*pairs, strict=True), (mix.inputs, mix.outputs), strict=True):
        drawn = np.percentile(column, [10, 50, 90])
        wanted = [stated[mix.percentiles.index(p)] for p in (10, 50, 90)]
        np.testing.assert_allclose(drawn, wanted, rtol=0.03)
    assert abs(np.corrcoef(np.log(pairs).T)[0, 1]) < 0.05


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_mooncake_trace_from_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace.{suffix}"
    text = "".join(
        json.dumps({"timestamp": i, "input_length": 100 * i, "output_length": i, "hash_ids": []})
        + "\n"
        for i in range(1, 101)
    )
    with gzip.open(path, "wt") if suffix.endswith("gz") else path.open("w") as file:
        file.write(text)
    assert workloads.read_mooncake(path)[2] == (300, 3)
    lengths = workloads.mooncake_mix(10, 1024, 0, path)
    assert len(lengths) == 10
    assert lengths == sorted(lengths)
    assert max(i for i, _ in lengths) <= 768
    with pytest.raises(ValueError, match="at least 101"):
        workloads.mooncake_mix(101, 1024, 0, path)


def test_random_prompts_are_unique() -> None:
    prompts = workloads.random_prompts([16] * 100, seed=0, vocab_size=49_152)
    assert len({tuple(p) for p in prompts}) == 100
    assert prompts == workloads.random_prompts([16] * 100, seed=0, vocab_size=49_152)
    assert all(100 <= token < 49_152 for prompt in prompts for token in prompt)
    with pytest.raises(ValueError, match="vocab_size"):
        workloads.random_prompts([1], 0, vocab_size=100)


# -- the command line


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert set(last_json(capsys.readouterr().out)["experiments"]) == set(EXPERIMENTS)


def test_wrong_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "disaggregation", "--only", "colour=red"]) == 2
    assert "expected one of" in last_json(capsys.readouterr().out)["error"]
    assert main(["run", "engine_speed", "--trace", "x.jsonl"]) == 2
    assert "--results" in last_json(capsys.readouterr().out)["error"]


def test_check_of_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tables", "--check", "--results", str(tmp_path), "--out", str(tmp_path)]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert not last_json(captured.out)["check"]
    assert "missing" in captured.err


def run_smoke(name: str, folder: Path) -> dict:
    """A smoke run in a process of its own, then a second that finds nothing to do."""
    documents = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "experiments", "run", name, "--smoke", "--results", str(folder)],
            cwd=ROOT,
            env=os.environ | COMPILE_CACHE,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        documents.append(last_json(done.stdout))
    first, second = documents
    assert first["written"] == len(EXPERIMENTS[name].configs(True))
    assert (second["written"], second["skipped"]) == (0, first["written"])
    arguments = ["tables", "--smoke", "--results", str(folder), "--out", str(folder)]
    assert main(arguments) == 0
    for table in EXPERIMENTS[name].tables:
        assert (folder / f"{table}.md").stat().st_size
    return first


def test_disaggregation_smoke(tmp_path: Path) -> None:
    rows = run_smoke("disaggregation", tmp_path)["rows"]
    assert all(row["values"]["identical"] for row in rows)
    assert all(row["values"]["compiled_after_warm_up"] == 0 for row in rows)
    for row in rows:
        apart = row["config"]["decode"] is not None
        assert (row["values"]["kv_bytes"] > 0) == apart
        assert (row["values"]["transfer_s"]["value"] is not None) == apart
        assert row["values"]["tpot_s"]["value"] > 0


@pytest.mark.long
def test_engine_speed_smoke(tmp_path: Path) -> None:
    rows = run_smoke("engine_speed", tmp_path)["rows"]
    assert {row["config"]["measure"] for row in rows} == {
        *("decode", "prefill", "ragged", "host", "memory")
    }
    for row in rows:
        assert row["values"].get("compiled_after_warm_up", 0) == 0
