"""Tokens and log-probabilities of compressed weights are those of plain ones, to the bit.

On a CPU every variant is a decompression and the product that plain weights have. What a GPU's
reconstructive product gives is close, and not compared here (docs/unweight.md).
"""

import dataclasses

import jax
import numpy as np
import pytest
from engines import check_idle, greedy, seeded
from helpers import random_prompts, small_engine_config
from test_unweight_loading import DENSE, EXPERTS, LATENT, TIED, source

import jinfire as jf
from jinfire.config import EngineConfig
from jinfire.layout import StageLayout
from jinfire.programs.abstract import AbstractPrograms, Sizes
from sharding import MeshSpec

BY_ROWS = jf.UnweightPolicy(
    jf.Choice(((8, "transcode"), (None, "full"))),
    (
        ("attention.*", jf.Choice(((8, "direct"), (None, "full_palette")))),
        ("mlp.down", jf.Choice(((8, "compact"), (None, "full_compact")))),
    ),
)
EACH_PHASE = jf.PhasePolicies(BY_ROWS, jf.UnweightPolicy.uniform("compact"))


def config(**changes) -> EngineConfig:
    return small_engine_config(**({"max_rows": 4, "max_context": 40} | changes))


def run(engine: jf.Engine, vocabulary: int) -> list[jf.RequestOutput]:
    """Greedy and drawn tokens after prompts shorter and longer than a page and a chunk."""
    prompts = random_prompts((1, 5, 17, 24), vocabulary)
    params = [greedy(6, logprobs=20), seeded(3, 6, logprobs=20)] * 2
    outputs = engine.generate(prompts, params)
    check_idle(engine)
    return outputs


def same_bits(found: list[jf.RequestOutput], expected: list[jf.RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


CASES = {
    "dense, one device": (DENSE, jf.Placement.colocated((1, 1)), BY_ROWS),
    "dense, two policies": (DENSE, jf.Placement.disaggregated((2, 1), (1, 2)), EACH_PHASE),
    "tied, 2x2": (TIED, jf.Placement.colocated((2, 2)), "full"),
    "experts": (EXPERTS, jf.Placement.disaggregated((1, 1, 2), (2, 2, 1)), "direct"),
    "latent, int4": (LATENT, jf.Placement.colocated((1, 1, 2)), "exponent"),
}
SHORT = ("dense, two policies", "experts")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in SHORT else pytest.mark.long) for c in CASES]
)
def test_engines_continue_as_with_plain_weights(case):
    model, placement, unweight = CASES[case]
    plain, coded = (
        jf.Engine(
            source(model),
            dtype="bfloat16",
            placement=placement,
            config=config(),
            unweight=each,
        )
        for each in (None, unweight)
    )
    same_bits(run(coded, model.vocab_size), run(plain, model.vocab_size))
    assert coded.stats()["weight_bytes"] < plain.stats()["weight_bytes"]


GOLDEN = {
    "llama32_tied_sharded_bf16": jf.Placement.disaggregated((2, 1), (1, 2)),
    "llama4_step2_bf16": jf.Placement.colocated((2, 1, 2)),
    "deepseek_v3_noqlora_bf16": jf.Placement.disaggregated((1, 1, 2), (2, 1, 1)),
    "kimi_k2_int4": jf.Placement.colocated((1, 1, 2)),
    "mixtral_bf16": jf.Placement.disaggregated((1, 1, 4), (2, 1, 1)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_engines_in_every_variant(golden, name):
    engines = [
        jf.Engine.from_pretrained(
            golden(name),
            dtype="bfloat16",
            placement=GOLDEN[name],
            config=config(),
            unweight=unweight,
        )
        for unweight in (None, *jf.VARIANTS)
    ]
    vocabulary = engines[0].model_config.vocab_size
    plain, *coded = (run(engine, vocabulary) for engine in engines)
    for outputs in coded:
        same_bits(outputs, plain)


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("llama32_tied_sharded_bf16", tuple(jf.VARIANTS)),
        pytest.param("mixtral_bf16", ("exponent", "direct", "compact"), marks=pytest.mark.long),
        ("kimi_k2_int4", ("transcode", "full_compact")),
    ],
)
def test_logits_to_the_bit(golden, name, variants):
    ids = np.array(random_prompts((9, 9), 250))
    logits = {
        unweight: jf.Model.from_pretrained(
            golden(name), dtype="bfloat16", unweight=unweight
        ).logits(ids)
        for unweight in (None, *variants)
    }
    for variant in variants:
        np.testing.assert_array_equal(logits[variant], logits[None], err_msg=variant)


@pytest.mark.parametrize("variant", ["full", "direct"])
def test_weights_are_decompressed_one_after_the_other(variant):
    """In the loop over tokens, whose compiler could do it once ahead for all layers."""
    width = 256
    sizes = Sizes({"full": 9}, 4, 8, 4, 4, 2, 16)
    policy = jf.UnweightPolicy.uniform(variant, ("mlp.*",))

    def temp_bytes(layers: int, unweight: jf.UnweightPolicy) -> int:
        model = dataclasses.replace(
            DENSE, layers=DENSE.layers[:1] * layers, width=width, mlp_width=4 * width
        )
        steps = AbstractPrograms(
            model, MeshSpec(), jax.devices()[:1], np.dtype("bfloat16"), sizes, unweight
        )
        memory = steps.lower_decode().compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    six_layers = 6 * 3 * width * 4 * width * 2
    # The XLA form of Huffman decoding keeps a buffer of a quarter of each weight.
    assert temp_bytes(8, policy) - temp_bytes(2, policy) < six_layers / 2


def test_the_engine_says_what_it_holds():
    engine = jf.Engine(
        source(DENSE),
        dtype="bfloat16",
        placement=jf.Placement.disaggregated((1, 1), (1, 2)),
        config=config(),
        unweight=jf.PhasePolicies(None, BY_ROWS),
    )
    prefill, decode = engine.stats()["unweight"]
    assert prefill == {}
    layout = StageLayout(DENSE, MeshSpec(tensor=2), BY_ROWS)
    assert decode == {name: str(choice) for name, choice in layout.coded_projections.items()}
    assert decode["mlp.down"] == "compact to 8 rows, full_compact"
    assert decode["embed"] == decode["head"] == "transcode to 8 rows, full"
