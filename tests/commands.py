"""Command lines run in this process, for the tests of the commands."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_tokenizer import gguf_metadata

from jinfire.cli import main
from jinfire.programs.batch import DecodeTokens
from jinfire.runner import Runner
from jinfire.sequence import DecodePlan
from jinfire.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "llama31_f32"
SMALL = ("--max-context", "96", "--no-compile-cache")
GREEDY = ("--temperature", "0", "--ignore-eos")
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


def errors(err: str) -> list[str]:
    """The program's own lines on stderr; progress bars draw around them."""
    assert "Traceback" not in err
    lines = err.replace("\r", "\n").splitlines()
    return [line for line in lines if line.startswith("jinfire:")]


def lose_tokens(
    monkeypatch: pytest.MonkeyPatch, when: Callable[[Runner], bool] = lambda runner: True
) -> None:
    """Decode without a result from now on: the engine ends every request as an error."""
    decode = Runner.decode

    def silent(self: Runner, plan: DecodePlan) -> DecodeTokens:
        tokens = decode(self, plan)
        if not when(self):
            return tokens
        return dataclasses.replace(tokens, token=np.full(tokens.token.shape, -1, np.int32))

    monkeypatch.setattr(Runner, "decode", silent)


def make_chat_model(folder: Path) -> Path:
    """The golden model with a tokenizer of bytes and a chat template."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save(folder)
    return folder
