"""The flag `--unweight`: compressed weights from the shell, and what a policy comes to."""

import re

import pytest
from commands import GREEDY, SMALL, errors, last_json, run

import jinfire as jf
from jinfire.cli import console

PROMPT = ("--token-ids", "17 4 99 3")
POLICY = jf.UnweightPolicy(
    jf.Choice(((8, "direct"), (None, "full_palette"))),
    (("mlp.down", jf.Choice.always("dense")), ("mlp.*", jf.Choice.always("compact"))),
)


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "policy.json"
    jf.write_policies(path, jf.PhasePolicies(POLICY, POLICY))
    return path


def test_generate_as_with_plain_weights(golden, policy_file, capsys):
    model = golden("llama32_tied_sharded_bf16")
    documents = []
    for unweight in ((), ("--unweight", policy_file)):
        argv = ("--model", model, "--dtype", "bfloat16", "--max-tokens", 6, *SMALL, *GREEDY)
        assert run("generate", *PROMPT, *argv, *unweight, "--json") == 0
        documents.append(last_json(capsys.readouterr().out))
    plain, coded = documents
    assert coded["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    assert coded["stats"]["weight_bytes"] < plain["stats"]["weight_bytes"]
    (held,) = coded["stats"]["unweight"]
    assert held["mlp.gate"] == "compact"
    assert "mlp.down" not in held


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--unweight", "direct"), "--unweight: expected --dtype bfloat16, got float32"),
        (("--unweight", "zip", "--dtype", "bfloat16"), "--unweight: expected one of full, "),
    ],
)
def test_refused_flags(golden, capsys, flags, problem):
    model = golden("llama32_tied_sharded_bf16")
    assert run("generate", *PROMPT, "--model", model, *SMALL, *flags) == console.USAGE
    assert problem in errors(capsys.readouterr().err)[0]


def test_a_wrong_policy_file_is_named(golden, tmp_path, capsys):
    path = tmp_path / "policy.json"
    path.write_text('{"default": "zip"}')
    model = golden("llama32_tied_sharded_bf16")
    assert run("inspect", "--model", model, "--unweight", path) == console.USAGE
    assert "policy.json.default: variant" in errors(capsys.readouterr().err)[0]


def test_inspect_prints_what_a_policy_comes_to(golden, policy_file, capsys):
    argv = ("inspect", "--model", golden("llama32_tied_sharded_bf16"), "--unweight", policy_file)
    assert run(*argv, "--colocated", "1x4", "--json") == 0
    (layout,) = last_json(capsys.readouterr().out)["layouts"]
    found = {choice["projection"]: choice for choice in layout["unweight"]}
    assert found["embed"]["variant"] == "direct to 8 rows, full_palette"
    assert found["mlp.gate"]["variant"] == "compact"
    assert found["mlp.gate"]["tensors"] == 4
    assert (found["mlp.down"]["variant"], found["mlp.down"]["why_dense"]) == (
        "dense",
        "by the policy",
    )
    assert found["attention.output"]["why_dense"] == "32 columns on a device, not a multiple of 64"

    assert run(*argv) == 0  # on one device, where no layout is given
    out = capsys.readouterr().out
    assert "colocated: unweight" in out
    assert re.search(r"attention.output +direct to 8 rows, full_palette, 4\n", out)
    assert re.search(r"mlp.down +dense \(by the policy\), 4\n", out)
