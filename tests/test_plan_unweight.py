"""The planner with weights in the forms of Unweight: bytes and times by hand, and real models."""

import dataclasses

import pytest
from commands import errors, last_json, run
from helpers import tiny_config
from test_plan import SMALL_LOAD, TINY_MOE, footprint

import jinfire as jf
from jinfire.planner.gpus import GIB, GPUS
from jinfire.planner.roofline import decode_time
from jinfire.planner.unweight import CODES, DENSE, FORMS, NAMES, SCALES, WEIGHTS, Unweight

# Every matrix has rows of 64 weights.
SMALL = tiny_config(5, width=64, mlp_width=128, head_dim=16)
MATRICES = 5 * (128 * 64 + 2 * 32 * 64 + 64 * 128 + 3 * 128 * 64) + 2 * 61 * 64
NORMS = 5 * 2 * 64 + 64


def coded(config, form: str, *layout: int, dtype: str = "bfloat16"):
    return dataclasses.replace(footprint(config, *layout, dtype=dtype), unweight=Unweight.of(form))


def test_bytes_by_hand() -> None:
    config, matrices, norms = SMALL, MATRICES, NORMS
    for form, bits in (("huffman", 10.75), ("palette", 12.1), ("compact", 11.45)):
        found = coded(config, form, 1, 1)
        sizes = found.weights_by_coding
        assert sizes["dense"] == {"plain": 2 * norms, "coded": 2 * norms}
        assert sizes[WEIGHTS]["plain"] == 2 * matrices
        assert sizes[WEIGHTS]["coded"] == pytest.approx(matrices * bits / 8, abs=20)
        assert sum(found.weights.values()) == sum(size["coded"] for size in sizes.values())
        # The lower halves of float32 stay as they are.
        wide = coded(config, form, 1, 1, dtype="float32").weights_by_coding[WEIGHTS]
        assert wide["coded"] == pytest.approx(matrices * (bits + 16) / 8, abs=20)
    assert "int4_codes" not in sizes
    # Over two devices the rows of the output projection are still whole, over four they are not.
    for tensor, cut in ((2, 0), (4, 5 * (64 * 128 + 64 * 128))):
        sizes = coded(SMALL, "compact", 1, tensor).weights_by_coding
        assert sizes["dense"]["plain"] == 2 * (norms + cut // tensor)


def test_four_bit_experts_are_coded_by_huffman_alone() -> None:
    values = 2 * 8 * 3 * 64 * 64
    for form in FORMS:
        sizes = coded(TINY_MOE, form, 1, 1).weights_by_coding
        assert sizes[CODES]["plain"] == values // 2
        assert sizes[SCALES]["plain"] == values // 32 * 2
        shares = [sizes[kind]["coded"] / sizes[kind]["plain"] for kind in (CODES, SCALES)]
        expected = (3.6 / 4, 7.7 / 16) if form == "huffman" else (1, 1)
        assert shares == pytest.approx(expected, rel=1e-3)
        # The router's matrix and its float32 bias.
        assert coded(TINY_MOE, form, 1, 1).weights["router"] == 2 * (8 * 64 * 2 + 8 * 4)


def test_what_decoding_moves_and_writes() -> None:
    """In bits of a weight: read, written, read again."""
    expected = {
        ("huffman", "full"): (10.75 + 16 + 16, 16),
        ("huffman", "exponent"): (10.75 + 8 + 8, 8),
        ("huffman", "transcode"): (10.75 + 4 + 4, 4),
        ("palette", "full_palette"): (12.1 + 16 + 16, 16),
        ("palette", "direct"): (12.1, 0),
        ("compact", "full_compact"): (11.45 + 16 + 16, 16),
        ("compact", "compact"): (11.45, 0),
    }
    variants = [each for form in FORMS for each in Unweight.of(form).variants()]
    assert {(each.form, each.variant) for each in variants} == expected.keys()
    largest = 2 * 128 * 64  # bytes of the queries' matrix
    for each in variants:
        found = dataclasses.replace(footprint(SMALL, 1, 1), unweight=each)
        moved, temp = expected[each.form, each.variant]
        assert each.moved_share(WEIGHTS, "head", 2) * 16 == pytest.approx(moved)
        assert found.decoding_temp == largest * temp / 16
        dense = footprint(SMALL, 1, 1)
        grown = found.decode_temp(SMALL_LOAD) - dense.decode_temp(SMALL_LOAD)
        assert grown == found.decoding_temp
        tick = decode_time(found, GPUS["H100"], SMALL_LOAD).tick
        plain = decode_time(dense, GPUS["H100"], SMALL_LOAD).tick
        norms = 2 * NORMS
        assert tick.weight_bytes == pytest.approx((plain.weight_bytes - norms) * moved / 16 + norms)
        assert tick.flops == plain.flops
    # The products up from latents are operands of attention itself.
    latent = dataclasses.replace(TINY_MOE.latent, rank=64)
    found = coded(dataclasses.replace(TINY_MOE, latent=latent), "compact", 1, 1)
    assert found.decoding_temp == 2 * 8 * 16 * 64
    assert [Unweight.of(form).variant for form in FORMS] == ["transcode", "direct", "compact"]
    assert DENSE.variants() == ()
    assert DENSE.moved_share(WEIGHTS, "head", 2) == 1
    with pytest.raises(ValueError, match="unweight: expected one of none, huffman, palette, comp"):
        jf.plan(tiny_config(5), "H100", unweight="zip")


# Models, from shapes.


def test_fewer_gpus_or_more_tokens() -> None:
    least = {
        model: [jf.plan(model, gpus, unweight=form).min_gpus for form in NAMES]
        for model, gpus in (("llama-4-scout", "H100"), ("deepseek-v3", "H200"))
    }
    for dense, huffman, palette, compact in least.values():
        assert huffman <= compact <= palette <= dense
        assert compact < dense
    assert least["deepseek-v3"][NAMES.index("compact")] <= 8 < least["deepseek-v3"][0]

    plans = {form: jf.plan("llama-4-scout", "2xH200", unweight=form) for form in NAMES}
    tokens = [plans[form].chosen.kv_tokens_left for form in ("none", "palette", "compact")]
    assert tokens == sorted(tokens)
    assert tokens[1] > 1.5 * tokens[0]
    # Reading fewer bytes is what a decode step that waits for weights gains by.
    steps = [plans[form].chosen.decode.total_s for form in ("none", "palette", "compact")]
    assert steps == sorted(steps, reverse=True)
    assert plans["huffman"].chosen.decode.total_s > steps[0]


def test_kimi_gains_by_its_bfloat16_part() -> None:
    layout = (2, 4)
    plans = {form: jf.plan("kimi-k2.5", "8xH100", layout=layout, unweight=form) for form in NAMES}
    sizes = plans["huffman"].chosen.footprint.weights_by_coding
    assert sizes[CODES]["plain"] * 8 / GIB == pytest.approx(507e9 / GIB, rel=0.05)
    left = {form: plan.chosen.kv_tokens_left for form, plan in plans.items()}
    assert left["none"] < left["palette"] < left["compact"] < left["huffman"]
    assert plans["compact"].chosen.dense.kv_tokens_left == left["none"]


# The command.


def test_json_and_text(capsys) -> None:
    argv = ("plan", "--model", "deepseek-v3", "--gpus", "8xH200", "--unweight", "compact")
    assert run(*argv, "--json") == 0
    document = last_json(capsys.readouterr().out)
    own = document["unweight"]
    assert (own["form"], own["variant"]) == ("compact", "compact")
    assert own["bits_per_value"] == {"weights": 11.45}
    assert own["min_gpus_dense"] > document["min_gpus"]
    assert own["kv_tokens_more"] == document["kv_tokens_left"] - own["dense"]["kv_tokens_left"]
    assert own["variants"]["compact"]["decode_s"] == document["decode"]["total_s"]
    assert own["variants"]["full_compact"]["temp_bytes"] > own["variants"]["compact"]["temp_bytes"]
    assert not own["dense"]["fits"]
    assert document["fits"]
    assert run(*argv) == 0
    out = capsys.readouterr().out
    for text in (
        "Unweight compact, decoded by compact",
        "71.6%",
        "variant full_compact",
        "dense weights",
    ):
        assert text in out

    assert run("plan", "--model", "llama-3.1-8b", "--gpus", "H100", "--json") == 0
    assert last_json(capsys.readouterr().out)["unweight"] is None
    assert run(*argv, "--verify") == 2
    (line,) = errors(capsys.readouterr().err)
    assert "verify: expected dense weights" in line
