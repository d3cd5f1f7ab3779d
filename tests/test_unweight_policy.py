"""Policies of compressed weights: what is chosen, what is refused, what a file says."""

import json

import pytest

import jinfire as jf
from jinfire.unweight.policy import DECOMPRESSED, as_policies

BY_ROWS = jf.Choice(((8, "transcode"), (32, "exponent"), (None, "full")))


@pytest.mark.parametrize(
    ("rows", "variant"),
    [(1, "transcode"), (8, "transcode"), (9, "exponent"), (32, "exponent"), (33, "full")],
)
def test_the_first_bucket_that_holds_the_rows(rows, variant):
    assert BY_ROWS.variant(rows) == variant
    assert BY_ROWS.form == "huffman"
    assert jf.Choice.always("compact").variant(rows) == "compact"


@pytest.mark.parametrize(
    ("buckets", "problem"),
    [
        ([], "ascending"),
        ([(8, "full")], "the last of None"),
        ([(8, "full"), (8, "full"), (None, "full")], "ascending"),
        ([(8, "full"), (4, "full"), (None, "full")], "ascending"),
        ([(None, "full"), (None, "full")], "ascending"),
        ([(0, "full"), (None, "full")], "ascending"),
        ([(True, "full"), (None, "full")], "ascending"),
        ([(8, "direct"), (None, "full")], "huffman, palette"),
        ([(8, "dense"), (None, "full")], "dense, huffman"),
        ([(None, "zip")], "got 'zip'"),
    ],
)
def test_refused_choices(buckets, problem):
    with pytest.raises(ValueError, match=problem):
        jf.Choice(tuple(buckets))


def test_every_form_has_a_variant_that_decompresses():
    assert {jf.VARIANTS[variant].form for variant in DECOMPRESSED.values()} == set(DECOMPRESSED)
    assert all(jf.VARIANTS[variant].decompressed for variant in DECOMPRESSED.values())


def test_the_first_pattern_decides():
    direct, full = jf.Choice.always("direct"), jf.Choice.always("full")
    policy = jf.UnweightPolicy(full, (("mlp.gate", BY_ROWS), ("mlp.*", direct)))
    assert policy.choice("mlp.gate") == BY_ROWS
    assert policy.choice("mlp.up") == policy.choice("mlp.experts.down") == direct
    assert policy.choice("attention.query") == full
    two = jf.UnweightPolicy.uniform("direct", ("mlp.gate", "mlp.up"))
    assert two.choice("mlp.up") == direct
    assert two.choice("mlp.down").is_dense


def test_what_callers_may_give():
    policy = jf.UnweightPolicy.uniform("direct")
    assert as_policies("direct") == as_policies(policy) == jf.PhasePolicies(policy, policy)
    assert as_policies(None).are_dense
    one = jf.PhasePolicies(decode=policy)
    assert as_policies(one) is one
    assert not one.are_dense
    with pytest.raises(ValueError, match="expected 'dense' or one of 'full'"):
        as_policies("zip")


@pytest.mark.parametrize(
    "policies",
    [
        as_policies("compact"),
        as_policies(jf.UnweightPolicy(BY_ROWS, (("embed", jf.Choice.always("dense")),))),
        jf.PhasePolicies(None, jf.UnweightPolicy.uniform("direct", ("mlp.*",))),
        jf.PhasePolicies(),
    ],
)
def test_files_hold_policies(tmp_path, policies):
    path = tmp_path / "policy.json"
    jf.write_policies(path, policies)
    assert jf.read_policies(path) == policies


def test_a_variant_alone_in_a_file_stands_for_all_rows(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text('{"projections": {"mlp.*": "direct"}}')
    assert jf.read_policies(path) == as_policies(jf.UnweightPolicy.uniform("direct", ("mlp.*",)))


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("{", "not JSON"),
        ([], "expected {"),
        ({"defaults": "direct"}, "expected {"),
        ({"default": 3}, "policy.json.default: expected a variant"),
        ({"default": [[8, "full"]]}, "policy.json.default: buckets"),
        ({"projections": []}, "policy.json.projections"),
        ({"projections": {"embed": "zip"}}, r"projections\['embed'\]: variant"),
        ({"decode": {"default": "zip"}}, "policy.json: decode.default: variant"),
        ({"decode": None, "prefil": None}, "expected {"),
    ],
)
def test_refused_files(tmp_path, document, problem):
    path = tmp_path / "policy.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(ValueError, match=problem):
        jf.read_policies(path)
