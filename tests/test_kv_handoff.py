"""Handoffs of coded pages: the same tokens on any pair of layouts, in fewer bytes."""

import dataclasses

import numpy as np
import pytest
from engines import MODEL as DENSE
from engines import check_idle, greedy
from helpers import ChangedSource, random_prompts, small_engine_config, tiny_config, tiny_source
from test_golden import PLACEMENTS as GOLDEN_PLACEMENTS
from test_golden import engine_config as golden_config
from test_kv_groups import CHUNKED, LATENT
from test_kv_groups import config as groups_config

from jinfire import Engine, Placement

# Heads split into replicated ones and stages merged; heads merged and stages split unevenly.
UNEQUAL = ((2, 2), (1, 4))
UNEVEN = ((1, 2), (3, 1))
ALIKE = ((2, 1), (2, 1))
GROUPED = {"rings": CHUNKED, "latents": LATENT}


def coded(prefill, decode) -> Placement:
    return Placement.disaggregated(prefill, decode, kv_codec="unweight")


def wide(name: str, values: np.ndarray) -> np.ndarray:
    """Keys of exponents far apart: more than a message has room for."""
    if not name.endswith("attention.key.weight"):
        return values
    scale = np.exp2(np.arange(len(values)) * 5 % 41 - 36)
    return (values * scale[:, None]).astype(np.float32)


def outputs_of(source, placement, config, dtype, lengths, warm=False):
    """Outputs and statistics of an engine; a warm one compiles nothing more."""
    engine = Engine(source, placement=placement, config=config, dtype=dtype)
    if warm:
        engine.warmup()
    compiled = list(engine._runner.log.names)
    prompts = random_prompts(lengths, source.config.vocab_size, seed=3)
    outputs = engine.generate(prompts, greedy(8, logprobs=2))
    check_idle(engine)
    if warm:
        assert engine._runner.log.names == compiled
        assert {"scatter", "scatter overfull"} <= set(compiled)
    return outputs, engine.stats()


def compare(source, layouts, config, dtype, lengths=(1, 7, 16, 33), warm=False) -> dict:
    """Runs with and without the codec; the statistics of the one with."""
    plain, plain_stats = outputs_of(
        source, Placement.disaggregated(*layouts), config, dtype, lengths
    )
    outputs, stats = outputs_of(source, coded(*layouts), config, dtype, lengths, warm)
    for output, expected in zip(outputs, plain, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.logprobs == expected.logprobs  # to the bit
        assert output.metrics.kv_bytes == expected.metrics.kv_bytes
        assert expected.metrics.kv_bytes_sent == expected.metrics.kv_bytes
    assert stats["kv_bytes_transferred"] == plain_stats["kv_bytes_transferred"]
    sent = sum(output.metrics.kv_bytes_sent for output in outputs)
    assert stats["kv_bytes_sent"] == sent
    assert plain_stats["kv_bytes_sent"] == plain_stats["kv_bytes_transferred"]
    return stats


@pytest.mark.parametrize(
    ("layouts", "dtype"),
    [
        (UNEQUAL, "bfloat16"),
        (UNEVEN, "float32"),
        pytest.param(UNEQUAL, "float32", marks=pytest.mark.long),
        pytest.param(UNEVEN, "bfloat16", marks=pytest.mark.long),
        pytest.param(ALIKE, "bfloat16", marks=pytest.mark.long),
    ],
)
def test_same_tokens_in_fewer_bytes(layouts, dtype):
    # Heads of 64: a page of 8 tokens is 512 values a head.
    model = dataclasses.replace(tiny_config(4), head_dim=64)
    stats = compare(tiny_source(model, 1), layouts, small_engine_config(), dtype)
    assert stats["kv_overfull"] == 0
    share = stats["kv_bytes_sent"] / stats["kv_bytes_transferred"]
    expected = {"bfloat16": 11.56 / 16, "float32": 27.56 / 32}[dtype]
    assert share == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("kind", ["rings", pytest.param("latents", marks=pytest.mark.long)])
def test_rings_and_latents(kind):
    compare(tiny_source(GROUPED[kind], 1), ((2, 1), (1, 2)), groups_config(), "bfloat16")


def test_overfull_messages_are_followed_by_their_exponents():
    source = ChangedSource(tiny_source(dataclasses.replace(DENSE, head_dim=16), 1), wide)
    stats = compare(source, UNEVEN, small_engine_config(), "bfloat16", (16, 33, 40), warm=True)
    assert stats["kv_overfull"] == 3
    # Codes, signs and mantissas have crossed already: half of the plain bytes more.
    raw = stats["kv_bytes_transferred"]
    assert 1.2 * raw < stats["kv_bytes_sent"] < 1.3 * raw


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long)
        for name in ("kimi_k2_sharded_bf16", "llama4_step2_bf16")
    ],
)
def test_golden_models(golden, name):
    """Trained shapes: latents on copies, and rings, of bfloat16."""
    plain = GOLDEN_PLACEMENTS[name]
    runs = [
        Engine.from_pretrained(
            golden(name), dtype="bfloat16", placement=placement, config=golden_config()
        ).generate(random_prompts((5, 32, 70), 250, seed=4), greedy(8, ignore_eos=True))
        for placement in (plain, dataclasses.replace(plain, kv_codec="unweight"))
    ]
    for one, other in zip(*runs, strict=True):
        assert one.token_ids == other.token_ids
        assert other.metrics.kv_bytes_sent < one.metrics.kv_bytes_sent


def test_placement_names_its_codec():
    assert str(coded((1, 2), (2, 1))).endswith(", KV by unweight")
    assert Placement.disaggregated((1, 2), (2, 1)) == Placement.disaggregated((1, 2), (2, 1), None)
    with pytest.raises(ValueError, match="kv_codec: expected 'none' or 'unweight' on meshes apart"):
        Placement.disaggregated((1, 1), (1, 1), kv_codec="zip")
    with pytest.raises(ValueError, match="kv_codec: expected 'none' on one mesh"):
        dataclasses.replace(Placement.colocated(), kv_codec="unweight")
