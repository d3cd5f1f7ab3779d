"""Smoke runs of the Unweight experiments: their rows hold together."""

import dataclasses
import math
from pathlib import Path

import pytest
from test_experiments import run_smoke

from experiments import unweight_ratio
from experiments.unweight_ablation import UnweightAblationConfig


def test_ratio_smoke(tmp_path: Path) -> None:
    rows = run_smoke("unweight_ratio", tmp_path)["rows"]
    parts = {row["config"]["part"] for row in rows}
    assert {"mlp", "attention", "embedding", "all", "file", "cited"} == parts
    for row in rows:
        values = row["values"]
        if row["config"]["part"] == "cited":
            assert 10 < values["bits_low"] <= values["bits_high"] < 16
        elif row["config"]["part"] == "file":
            assert values["source_bytes"] > 100_000
            assert all(0.6 < values[f"{form}_ratio"] < 1 for form in unweight_ratio.FORMS)
        else:
            assert values["bound_bits"] == values["exponent_entropy_bits"] + 8
            assert values["bound_bits"] < values["huffman_bits"] < values["compact_bits"] < 16
            assert 0 <= values["verbatim_share"] < 0.1
    by_part = {row["config"]["part"]: row["values"] for row in rows}
    assert by_part["all"]["weights"] > sum(
        by_part[part]["weights"] for part in ("mlp", "attention", "embedding")
    )


def test_speed_smoke(tmp_path: Path) -> None:
    rows = run_smoke("unweight_speed", tmp_path)["rows"]
    assert {(row["config"]["files"], row["config"]["jobs"]) for row in rows} == {
        *((False, 1), (False, 2), (True, 1), (True, 2))
    }
    for row in rows:
        values = row["values"]
        assert 0.6 < values["ratio"] < 0.85
        for way in ("compress", "decompress"):
            speed = values[f"jinfire_{way}_mb_s"]
            assert speed["n"] == row["config"]["rounds"]
            assert speed["value"] > 0


@pytest.mark.long
def test_exactness_smoke(tmp_path: Path) -> None:
    rows = run_smoke("unweight_exactness", tmp_path)["rows"]
    for row in rows:
        config, values = row["config"], row["values"]
        if config["measure"] == "tokens":
            assert values["compared_tokens"] == values["prompts"] * config["max_tokens"]
            assert values["identical"] == (values["identical_prompts"] == values["prompts"])
        else:
            assert values["positions"] == config["windows"] * config["window"]
        if config["variant"] == "full":
            assert values.get("identical", True)
            assert values.get("argmax_differs", 0) == 0
            assert values.get("logits_identical_share", 1) == 1
        if config["variant"] in ("reordered", "float32"):
            assert values["logits_identical_share"] < 1
            assert values["largest_difference"] > 0


def test_ablation_smoke(tmp_path: Path) -> None:
    rows = run_smoke("unweight_ablation", tmp_path)["rows"]
    for row in rows:
        config, values = row["config"], row["values"]
        assert 10 < values["bits_per_weight"] < 16
        own = dataclasses.asdict(UnweightAblationConfig(config["weights"], config["form"]))
        assert (values["over_default_bits"] == 0) == (config == own)
        if config["chunk_rows"] < 16:
            # More chunks: more of an index, more bits of padding.
            assert values["over_default_bits"] > 0


def test_published_figures_are_of_bits_per_weight() -> None:
    for name, said in unweight_ratio.PUBLISHED.items():
        assert said.source, name
        assert 10.5 < said.low <= said.high < 13, name


@pytest.mark.parametrize(("ratio", "name"), [(0.663, "ZipNN"), (1 / 1.324, "SplitZip")])
def test_ratios_of_others_in_bits(ratio: float, name: str) -> None:
    assert math.isclose(16 * ratio, unweight_ratio.PUBLISHED[name].low, abs_tol=0.006)
