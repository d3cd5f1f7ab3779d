"""What the planner says of latents that are split over the devices of a stage."""

import pytest
from commands import errors, last_json
from commands import run as run_command
from helpers import tiny_config
from test_plan import SMALL_LOAD, TINY_MOE

from jinfire.layout import StageLayout
from jinfire.models import parse_config
from jinfire.models.presets import preset
from jinfire.planner.footprint import Footprint, Workload
from jinfire.planner.gpus import GPUS
from jinfire.planner.layouts import Refused, plan_model
from jinfire.planner.roofline import decode_time, prefill_time
from sharding import MeshSpec


def test_split_latents_by_hand() -> None:
    spec = MeshSpec(tensor=2, expert=4)
    whole, split = (
        Footprint(StageLayout(TINY_MOE, spec, latents=latents))
        for latents in ("replicated", "split")
    )
    assert whole.kv_bytes_per_token == {"full": 3 * (24 + 4) * 2}
    assert split.kv_bytes_per_token == {"full": 3 * (24 + 4) * 2 / 8}
    assert split.weights == whole.weights
    pages = 8 * 6 + 1  # of 8 tokens: one a device
    assert split.kv_bytes(SMALL_LOAD) == pages * 3 * 28 * 2 == whole.kv_bytes(SMALL_LOAD) // 8
    assert split.kv_tokens(pages * 3 * 28 * 2, SMALL_LOAD) == 8 * 48
    assert split.kv_tokens(pages * 3 * 28 * 2 - 1, SMALL_LOAD) == 8 * 48 - 8
    exchanged = 28 * 2 + 24 * 2 + 4  # a query, what is made of it, and its float32 sum
    for phase in (prefill_time, decode_time):
        one, other = (phase(found, GPUS["H100"], SMALL_LOAD).tick for found in (whole, split))
        assert other.weight_bytes == one.weight_bytes
        assert other.flops == one.flops
        sent = other.link_bytes - one.link_bytes
        if phase is decode_time:
            assert other.kv_bytes == one.kv_bytes / 8
            moved = 8 * 8 * exchanged
        else:
            assert other.kv_bytes == one.kv_bytes
            moved = (48 + 16) // 2 * 28 * 2  # a chunk in the middle of the prompt
        assert sent == pytest.approx(3 * moved * 7 / 8)
    assert split.decode_temp(SMALL_LOAD) - whole.decode_temp(SMALL_LOAD) == 8 * 8 * exchanged
    assert split.prefill_temp(SMALL_LOAD) - whole.prefill_temp(SMALL_LOAD) == 48 * 28 * 2


def test_latents_auto_compares_both() -> None:
    config = parse_config(preset("kimi-k2.5"))
    found = plan_model(config, "8xH100", latents="auto")
    kinds = [(each.shape, each.latents) for each in found.candidates]
    assert len(set(kinds)) == len(kinds)
    assert ((1, 8, 1), "split") in kinds
    assert ((8, 1, 1), "split") not in kinds  # one device a stage
    assert found.chosen is not None
    whole, split = (
        plan_model(config, "8xH100", layout=(1, 8), latents=latents).chosen
        for latents in ("replicated", "split")
    )
    assert whole is not None
    assert split is not None
    # All that is left is pages, of which a device has an eighth.
    assert split.kv_tokens_left > 7.5 * whole.kv_tokens_left
    assert found.chosen.decode.total_s <= min(whole.decode.total_s, split.decode.total_s)
    dense = plan_model(tiny_config(5), "2xH100", latents="auto")
    assert {each.latents for each in dense.candidates} == {"replicated"}
    odd = Workload.of(config, page_size=12)
    (refused,) = plan_model(config, "8xH100", layout=(1, 8), latents="split", load=odd).candidates
    assert isinstance(refused, Refused)
    assert "valid sizes: 8, 16" in refused.refusal


def test_latents_that_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="expected a model with latent attention"):
        plan_model(tiny_config(5), "2xH100", latents="split")
    with pytest.raises(ValueError, match="expected one of replicated, split, auto, got 'halved'"):
        plan_model(tiny_config(5), "2xH100", latents="halved")


def test_plan_of_split_latents(capsys) -> None:
    model = ("plan", "--model", "kimi-k2.5", "--gpus", "8xH100", "--layout", "1x8")
    tokens = {}
    for latents in ("replicated", "split"):
        assert run_command(*model, "--latents", latents, "--json") == 0
        document = last_json(capsys.readouterr().out)
        assert document["latents"] == document["layouts"][0]["latents"] == latents
        tokens[latents] = document["kv_tokens_left"]
    assert 7.9 < tokens["split"] / tokens["replicated"] < 8
    assert run_command(*model[:-2], "--latents", "auto") == 0
    assert "1x8x1 split" in capsys.readouterr().out
    assert (
        run_command("plan", "--model", "llama-3.1-8b", "--gpus", "H100", "--latents", "split") == 2
    )
    (line,) = errors(capsys.readouterr().err)
    assert "expected a model with latent attention" in line
