"""The commands that hold conversations: `jinfire chat` and `jinfire demo`."""

import dataclasses
import io
import json
import re
import signal
import sys
from pathlib import Path

import jax
import pytest
from commands import GREEDY, SMALL, errors, lose_tokens, make_chat_model, run

from jinfire.checkpoints import load_tokenizer
from jinfire.cli import chat, console, demo
from jinfire.config import EngineConfig
from jinfire.engine import Engine
from jinfire.request import FinishReason, SamplingParams, TokenEvent


@pytest.fixture(scope="module", autouse=True)
def jax_in_use() -> None:
    """The commands find the devices of the tests, whichever test comes first."""
    assert jax.device_count() == 8


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("chat_model"))


# --- chat


def test_scripted_chat_keeps_the_history(chat_model, capsys):
    argv = ("chat", "--model", chat_model, *SMALL, *GREEDY, "--max-tokens", 3)
    argv += ("--system", "be brief", "--message", "hi", "--message", "go on")
    assert run(*argv, "--json") == 0
    *events, document = map(json.loads, capsys.readouterr().out.splitlines())
    first, second = document["turns"]
    roles = [message["role"] for message in document["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    tokenizer = load_tokenizer(chat_model)
    assert tokenizer is not None
    start = "[system]be brief\n[user]hi\n[assistant]"
    assert tokenizer.decode(first["prompt_ids"]) == start
    later = f"{start}{first['text']}\n[user]go on\n[assistant]"
    assert second["prompt_ids"] == tokenizer.encode(later, add_special=False)
    # Full pages of 16 tokens of the first prompt are not computed again.
    assert first["metrics"]["cached_tokens"] == 0
    assert second["metrics"]["cached_tokens"] >= len(first["prompt_ids"]) // 16 * 16 > 0
    assert [event["turn"] for event in events] == [0] * 3 + [1] * 3

    assert run(*argv) == 0
    answers = f"> hi\n{first['text']}\n> go on\n{second['text']}\n"
    assert capsys.readouterr().out == answers


def test_chat_that_no_longer_fits(chat_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"hi\n\n{'x' * 90}\nnever asked\n"))
    assert run("chat", "--model", chat_model, *SMALL, "--max-tokens", 2) == console.FAILED
    out, err = capsys.readouterr()
    assert out.startswith("> hi\n")
    assert "never" not in out
    assert "RequestTooLong" in errors(err)[0]


def test_chat_whose_answer_fails(chat_model, monkeypatch, capsys):
    lose_tokens(monkeypatch)
    argv = ("chat", "--model", chat_model, *SMALL, *GREEDY, "--message", "hi", "--message", "no")
    assert run(*argv, "--json") == console.FAILED
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    (turn,) = document["turns"]
    assert (turn["finish_reason"], turn["error"]["type"]) == ("error", "EngineFailed")
    assert document["messages"] == []  # nothing that a next answer could build on
    assert errors(err)[0].startswith("jinfire: error: EngineFailed: no progress")


def test_interactive_chat(chat_model, monkeypatch, capsys):
    said = iter(["hi", KeyboardInterrupt, "", "/help", "x" * 90, "/reset", "hi", EOFError])

    def say(prompt: str) -> str:
        line = next(said)
        if isinstance(line, str):
            return line
        raise line

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", say)
    argv = ("chat", "--model", chat_model, *SMALL, *GREEDY, "--max-tokens", 4)
    assert run(*argv) == 0
    out, err = capsys.readouterr()
    first, second = out.split("\n")[:2]
    assert first == second  # greedy, and the history was forgotten
    assert "/quit or Ctrl-D ends" in err
    assert "RequestTooLong" in errors(err)[0]
    assert "4 tokens, the first after" in err

    lose_tokens(monkeypatch)
    said = iter(["hi", "/quit"])
    assert run(*argv) == console.FAILED
    out, err = capsys.readouterr()
    assert "EngineFailed: no progress" in errors(err)[0]
    assert "the first after" not in err


def test_ctrl_c_ends_the_answer_and_not_the_program(chat_model):
    engine = Engine.from_pretrained(chat_model, config=EngineConfig(max_context=96, max_rows=1))
    free = engine.stats()["free_pages"]
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    conversation = chat.Conversation(engine, params)
    handler = signal.getsignal(signal.SIGINT)
    presses = iter([signal.SIGINT])

    def press(event: TokenEvent) -> None:
        for number in presses:
            signal.raise_signal(number)

    turn = conversation.ask("hi", press)
    assert turn.output.finish_reason is FinishReason.ABORT
    assert 0 < len(turn.output.token_ids) < 60
    assert signal.getsignal(signal.SIGINT) is handler
    assert engine.stats()["free_pages"] == free
    # It goes on as if that had been the whole answer.
    events = []
    turn = conversation.ask("go on", events.append)
    assert turn.output.finish_reason is FinishReason.LENGTH
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2


# --- demo


@pytest.fixture
def demo_argv(chat_model, monkeypatch) -> tuple[object, ...]:
    monkeypatch.setattr(demo, "QUESTIONS", ("hi", "the 12", "go"))
    layout = ("--prefill", "2x2", "--decode", "1x4", "--devices", 8)
    return ("demo", "--model", chat_model, *SMALL, *layout, "--max-tokens", 6)


def test_demo_compares_with_one_device(demo_argv, capsys):
    assert run(*demo_argv, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    document = json.loads(line)
    assert document["tokens_identical"] is True
    assert document["tokens_compared"] == 3 * 6
    assert document["devices"] == {"total": 8, "prefill": 4, "decode": 4}
    assert document["compiled_while_serving"] == 0
    assert document["kv_bytes_transferred"] > 0
    assert document["bubble_fraction"] == {"prefill": pytest.approx(1 / 3), "decode": 0}
    for name in ("ttft_p50_s", "time_per_token_p50_s", "compile_s", "host_share"):
        assert document[name] > 0
        assert document["single_device"][name] > 0


def test_demo_fails_where_a_token_differs(demo_argv, monkeypatch, capsys):
    measure = demo._measure

    def changed(path, where, *rest):
        result = measure(path, where, *rest)
        if where.is_colocated:
            output = result.outputs[1]
            ids = [*output.token_ids[:4], output.token_ids[4] + 1, *output.token_ids[5:]]
            result.outputs[1] = dataclasses.replace(output, token_ids=ids)
        return result

    monkeypatch.setattr(demo, "_measure", changed)
    assert run(*demo_argv) == console.FAILED
    out, err = capsys.readouterr()
    assert out.endswith("tokens identical to the single-device run: no\n")
    assert errors(err) == ["jinfire: error: the 12: tokens differ from number 4 on"]
    # Questions in order, each with its answer, then the table.
    assert re.findall(r"^> (.*)$", out, re.MULTILINE) == ["hi", "the 12", "go"]
    assert out.count(" ...\n") == 3
    for name in ("placement", "time to first token", "KV handed over", "compile", "host work"):
        assert re.search(rf"^  {name}  ", out, re.MULTILINE)


def test_demo_says_how_much_it_compared(demo_argv, capsys):
    assert run(*demo_argv) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\ntokens identical to the single-device run: yes, all 18\n")
    assert re.search(r"^  idle stage time \(bubble\) +prefill 33 %, decode 0 %$", out, re.MULTILINE)
    assert re.search(r"^  host work +\d+\.\d % of serving time$", out, re.MULTILINE)
    assert re.search(r"^  KV handed over +\d+\.\d kB \([\d,]+ bytes\)$", out, re.MULTILINE)
    assert "share the machine's cores" in out
    assert err.count(": loading, then compiling") == 2
    assert "the same on one device: loading" in err


@pytest.mark.parametrize("both", [True, False])
def test_demo_fails_where_a_request_fails(both, demo_argv, monkeypatch, capsys):
    """Also where both runs fail with the same tokens, which proves nothing."""
    lose_tokens(monkeypatch, lambda runner: both or runner.placement.is_colocated)
    assert run(*demo_argv, "--json") == console.FAILED
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["tokens_identical"] is False
    assert bool(document["differing_requests"]) is not both
    assert [failure["error"]["type"] for failure in document["failed_requests"]] == [
        "EngineFailed"
    ] * (6 if both else 3)
    assert "jinfire: error: hi (one device): EngineFailed: no progress" in err


def test_demo_fails_where_nothing_was_compared(demo_argv, monkeypatch, capsys):
    measure = demo._measure

    def emptied(*args):
        result = measure(*args)
        outputs = [dataclasses.replace(output, token_ids=[]) for output in result.outputs]
        return dataclasses.replace(result, outputs=outputs)

    monkeypatch.setattr(demo, "_measure", emptied)
    assert run(*demo_argv) == console.FAILED
    out, err = capsys.readouterr()
    assert out.endswith("tokens identical to the single-device run: no\n")
    assert errors(err) == ["jinfire: error: no tokens to compare"]
