"""A trained model, SmolLM2-135M-Instruct: real weights and tokenizer, on two unequal meshes."""

import itertools
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import ChangedSource, margins

from jinfire import (
    Engine,
    EngineConfig,
    Model,
    Placement,
    SamplingParams,
    load_tokenizer,
    open_checkpoint,
)
from jinfire.fetch import cached

REFERENCE = Path(__file__).parent / "golden" / "greedy_reference.json"
LICENCE = Path("/usr/share/common-licenses/GPL-3")

# 9 query and 3 kv heads split over 1 or 3 devices; 30 layers as 15 + 15 and as 30.
PLACEMENT = Placement.disaggregated(prefill=(2, 1), decode=(1, 3))
CONFIG = EngineConfig(
    max_rows=2,
    max_context=128,
    prefill_shapes=((1, 64),),
    row_buckets=(),
    context_buckets=(),
    decode_steps=4,
)
SAFE_MARGIN = 0.01


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    path = cached("smollm2")
    if path is None:
        message = "SmolLM2 is not in the cache: run `jinfire fetch smollm2` (make test does)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def test_capital_of_france(checkpoint):
    engine = Engine.from_pretrained(checkpoint, dtype="float32", placement=PLACEMENT, config=CONFIG)
    assert engine.stats()["parameters"] == 134_515_008
    (output,) = engine.generate(
        "The capital of France is", SamplingParams(max_tokens=2, temperature=0)
    )
    assert output.text == " Paris."
    pages = -(-len(output.prompt_ids) // CONFIG.page_size)
    assert output.metrics.kv_bytes == pages * CONFIG.page_size * 46_080


def rounded(name: str, values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_greedy_answers(checkpoint):
    """The reference's arithmetic is float32 on weights rounded to bfloat16; so is this."""
    cases = [
        case
        for name, case in json.loads(REFERENCE.read_text()).items()
        if name.startswith("smollm2/bf16w")
    ]
    assert len(cases) == 2
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    source = ChangedSource(open_checkpoint(checkpoint), rounded)
    engine = Engine(source, tokenizer, placement=PLACEMENT, config=CONFIG)
    source.close()
    for case in cases:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
    params = [
        SamplingParams(max_tokens=len(case["greedy_ids"]), temperature=0, logprobs=2)
        for case in cases
    ]
    outputs = engine.generate([case["prompt"] for case in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        safe = itertools.takewhile(lambda margin: margin >= SAFE_MARGIN, margins(output))
        count = len(list(safe))
        assert count > 10
        assert output.token_ids[:count] == case["greedy_ids"][:count]
        if case["min_margin"] >= SAFE_MARGIN:
            assert output.token_ids == case["greedy_ids"]
            assert output.text == case["text"]


def test_perplexity(checkpoint):
    if not LICENCE.exists():
        pytest.skip(f"the text with a known perplexity is {LICENCE}, which Debian systems have")
    model = Model.from_pretrained(checkpoint, dtype="float32")
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(LICENCE.read_text()[:6000])[:512]
    assert ids[0] != model.config.bos_id
    assert model.perplexity(ids) == pytest.approx(18.83, rel=0.005)


@pytest.mark.long
@pytest.mark.parametrize("placement", [Placement.colocated((1, 1)), PLACEMENT], ids=str)
def test_compressed_weights_give_the_same_tokens(checkpoint, placement):
    """Tokens and log-probabilities to the bit, on one device and on two unequal meshes."""
    prompts = ["The capital of France is", "Once upon a time, in a village by the sea,"]
    params = [
        SamplingParams(max_tokens=12, temperature=0, logprobs=5),
        SamplingParams(max_tokens=12, seed=7, logprobs=5),
    ]
    bits = {"full": 10.9, "direct": 12.1, "compact": 11.5}
    expected, plain_bytes = None, 0
    for variant in (None, *bits):
        engine = Engine.from_pretrained(
            checkpoint, dtype="bfloat16", placement=placement, config=CONFIG, unweight=variant
        )
        found = [(output.token_ids, output.logprobs) for output in engine.generate(prompts, params)]
        held = engine.stats()["weight_bytes"]
        if variant is None:
            expected, plain_bytes = found, held
        else:
            assert found == expected, variant
            assert 16 * held / plain_bytes < bits[variant]
