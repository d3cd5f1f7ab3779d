"""Command lines run in this process, for the tests of the commands."""

import json
import shutil
from pathlib import Path

from test_tokenizer import gguf_metadata

from jinfire.cli import main
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


def make_chat_model(folder: Path) -> Path:
    """The golden model with a tokenizer of bytes and a chat template."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save(folder)
    return folder
