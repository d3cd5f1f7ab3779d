"""Parity with Hugging Face transformers on tiny checkpoints: forward passes and engine runs.

The bounds are those of the reference's own float64 error, rounded up; no case has its own.
"""

import itertools
import json

import numpy as np
import pytest
from helpers import Oracle

from jinfire import Engine, EngineConfig, Model, Placement, SamplingParams, TokenLogprobs
from jinfire.checkpoints import open_checkpoint

LOGITS_TOLERANCE = 5e-4
HIDDEN_TOLERANCE = 1e-3
LOGPROB_TOLERANCE = 1e-3  # a logit's and a normaliser's error

BFLOAT16 = "llama32_tied_sharded_bf16"
EXPERTS_BFLOAT16 = (
    "llama4_step2_bf16",
    "deepseek_v3_noqlora_bf16",
    "kimi_k2_sharded_bf16",
    "kimi_k2_int4",
    "kimi_k25_int4_sharded",
    "mixtral_bf16",
)

# A placement each: together they split, merge and replicate kv heads, and cut 3 layers unevenly.
PLACEMENTS = {
    "llama31_f32": Placement.disaggregated(prefill=(2, 2), decode=(1, 4)),
    "llama32_tied_sharded_bf16": Placement.disaggregated(prefill=(1, 4), decode=(4, 1)),
    "llama3_v5config_f32": Placement.disaggregated(prefill=(3, 1), decode=(2, 2)),
    "qwen3_tied_f32": Placement.disaggregated(prefill=(1, 1), decode=(2, 2)),
}
DENSE_CASES = tuple(PLACEMENTS)
# (pipeline, tensor, expert). Stages of unlike layers, latents copied to all devices of a stage,
# whole experts and parts of them; 4-bit experts of width 32 are one group, which stays whole.
PLACEMENTS |= {
    name: Placement.disaggregated(prefill=prefill, decode=decode)
    for name, prefill, decode in (
        ("llama4_text_f32", (2, 1, 2), (1, 4, 1)),
        ("llama4_step2_bf16", (2, 1, 2), (1, 2, 2)),
        ("llama4_nested_scout_f32", (4, 1, 1), (1, 2, 2)),
        ("deepseek_v3_f32", (2, 2, 1), (1, 2, 2)),
        ("deepseek_v3_noqlora_bf16", (1, 2, 2), (3, 1, 1)),
        ("deepseek_v3_mtp_mscale_f32", (1, 1, 1), (3, 1, 1)),
        ("deepseek_v3_rope_half_f32", (1, 2, 1), (1, 1, 2)),
        ("kimi_k2_sharded_bf16", (2, 2, 1), (1, 1, 4)),
        ("kimi_k2_int4", (1, 1, 2), (2, 1, 2)),
        ("kimi_k25_f32", (1, 1, 4), (2, 2, 1)),
        ("kimi_k25_int4_sharded", (2, 1, 2), (1, 1, 4)),
        ("qwen3_moe_f32", (3, 1, 1), (1, 2, 2)),
        ("mixtral_bf16", (1, 1, 4), (2, 2, 1)),
    )
}
CASES = tuple(PLACEMENTS)

# Further cases of a family, whose forward passes are compared in every run.
LONG = (
    "llama4_text_f32",
    "deepseek_v3_noqlora_bf16",
    "deepseek_v3_mtp_mscale_f32",
    "deepseek_v3_rope_half_f32",
    "kimi_k2_sharded_bf16",
    "kimi_k2_int4",
    "kimi_k25_f32",
)
SOME_CASES = [
    pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in CASES
]


@pytest.fixture(scope="module")
def case(golden):
    """`case(name)`: the reference arrays."""

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(golden(name) / "golden.npz") as arrays:
            return dict(arrays)

    return load


@pytest.mark.parametrize("name", CASES)
def test_logits_and_hidden_states(golden, case, name):
    expected = case(name)
    model = Model.from_pretrained(golden(name), dtype="float32")
    logits = model.logits(expected["input_ids"])
    assert logits.dtype == np.float32
    assert np.abs(logits - expected["logits"]).max() <= LOGITS_TOLERANCE

    hidden = model.hidden_states(expected["input_ids"])
    *streams, normed = (state[0] for state in hidden)
    assert np.abs(np.stack(streams) - expected["hidden"]).max() <= HIDDEN_TOLERANCE
    assert np.abs(normed - expected["final_norm"]).max() <= HIDDEN_TOLERANCE

    if "logits64" in expected:
        assert np.abs(logits[0] - expected["logits64"]).max() <= LOGITS_TOLERANCE


@pytest.mark.parametrize("name", SOME_CASES)
def test_ragged_rows(golden, case, name):
    expected = case(name)
    model = Model.from_pretrained(golden(name), dtype="float32")
    lengths = expected["pad_lengths"]
    assert lengths.min() < lengths.max()
    logits = model.logits(expected["pad_input_ids"], lengths)
    padding = np.arange(logits.shape[1])[None] >= lengths[:, None]
    assert not logits[padding].any()
    assert np.abs(logits - expected["pad_logits"])[~padding].max() <= LOGITS_TOLERANCE


@pytest.mark.parametrize("name", DENSE_CASES)
def test_oracle_of_the_other_tests(golden, case, name):
    """The float64 forward in NumPy, which tests of random models compare with."""
    expected = case(name)
    source = open_checkpoint(golden(name))
    logits = Oracle(source).logits(expected["input_ids"][0])
    assert np.abs(logits - expected["logits"][0]).max() <= LOGITS_TOLERANCE
    source.close()


def engine_config(**changes) -> EngineConfig:
    defaults = {
        "page_size": 8,
        "max_rows": 6,
        "max_context": 144,
        "row_buckets": (),
        "context_buckets": (),
        "prefill_shapes": ((2, 32),),
        "decode_steps": 3,
    }
    return EngineConfig(**(defaults | changes))


@pytest.mark.parametrize("name", SOME_CASES)
def test_engine_continues_like_the_reference(golden, case, name):
    """All prompts of a case at once, prefilled in chunks, on two meshes of unequal layout."""
    expected = case(name)
    engine = Engine.from_pretrained(
        golden(name), dtype="float32", placement=PLACEMENTS[name], config=engine_config()
    )
    ragged = zip(expected["pad_input_ids"], expected["pad_lengths"], strict=True)
    prompts = [row.tolist() for row in expected["input_ids"]]
    prompts += [row[:length].tolist() for row, length in ragged]
    continuations = [*expected["gen_ids"].tolist(), *expected["pad_gen_ids"].tolist()]
    params = [
        SamplingParams(max_tokens=len(ids), temperature=0, logprobs=20) for ids in continuations
    ]
    outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs] == continuations
    assert {str(output.finish_reason) for output in outputs} == {"length"}

    for output, logits in zip(outputs, expected["gen_logits"], strict=False):
        wanted = log_softmax(logits)
        assert output.logprobs is not None
        assert len(output.logprobs) == len(wanted)
        for step, values in zip(output.logprobs, wanted, strict=True):
            assert abs(step.logprob - values[step.token_id]) <= LOGPROB_TOLERANCE
            assert len(step.top) == 20
            for token, logprob in step.top:
                assert abs(logprob - values[token]) <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("name", [BFLOAT16, *EXPERTS_BFLOAT16])
def test_bfloat16_model(golden, case, name):
    """No bound on the largest difference: the mean and the choice of token, as its README says."""
    expected, meta = case(name), json.loads((golden(name) / "meta.json").read_text())
    model = Model.from_pretrained(golden(name), dtype="bfloat16")
    logits = model.logits(expected["input_ids"])[0]
    reference = meta["hf_bf16_vs_f32"]
    assert np.abs(logits - expected["logits"][0]).mean() <= 2 * reference["mean"]
    agreement = (logits.argmax(-1) == expected["logits"][0].argmax(-1)).mean()
    assert agreement >= reference["argmax_agree"] - 0.1


def test_bfloat16_engine(golden, case):
    """The same rule through the paged programs: every prefix of the prompt as a request."""
    expected, meta = case(BFLOAT16), json.loads((golden(BFLOAT16) / "meta.json").read_text())
    engine = Engine.from_pretrained(
        golden(BFLOAT16),
        dtype="bfloat16",
        placement=Placement.disaggregated(prefill=(1, 1), decode=(1, 2)),
        config=engine_config(),
    )
    ids = expected["input_ids"][0].tolist()
    wanted = log_softmax(expected["logits"][0])
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    outputs = engine.generate([ids[: n + 1] for n in range(len(ids))], params)
    steps = [output.logprobs[0] for output in outputs]
    reference = meta["hf_bf16_vs_f32"]
    assert np.mean(differences(steps, wanted)) <= 2 * reference["mean"]
    agree = [step.token_id == values.argmax() for step, values in zip(steps, wanted, strict=True)]
    assert np.mean(agree) >= reference["argmax_agree"] - 0.1

    # Decode steps, for as long as both have continued with the same tokens.
    continuation = expected["gen_ids"][0].tolist()
    params = SamplingParams(max_tokens=len(continuation), temperature=0, logprobs=20)
    (output,) = engine.generate(ids, params)
    same = itertools.takewhile(
        lambda n: output.token_ids[:n] == continuation[:n], range(len(continuation))
    )
    count = len(list(same))
    assert count > 1
    wanted = log_softmax(expected["gen_logits"][0])[:count]
    assert np.mean(differences(output.logprobs[:count], wanted)) <= 2 * reference["mean"]


def differences(steps: list[TokenLogprobs], wanted: np.ndarray) -> list[float]:
    return [
        abs(logprob - values[token])
        for step, values in zip(steps, wanted, strict=True)
        for token, logprob in step.top
    ]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
