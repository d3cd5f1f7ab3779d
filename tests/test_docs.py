"""The documentation is true: what it names exists, and the README's example runs."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from helpers import tiny_config

import jinfire as jf
from experiments.__main__ import EXPERIMENTS
from experiments.__main__ import parser as experiments_parser
from jinfire.checkpoints import save
from jinfire.cli import parser
from jinfire.loading import RandomSource

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CODE = ("jinfire", "sharding", "pallas_kernels", "experiments", "tests")
SUFFIXES = (".py", ".md", ".toml", ".lock")

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(.*)$", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
PATH = re.compile(r"\.?[\w-]+(?:[./][\w-]+)*/?")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def spans(page: Path) -> list[str]:
    return SPAN.findall(FENCED.sub("", page.read_text(encoding="utf-8")))


@cache
def source_words() -> frozenset[str]:
    texts = [
        p.read_text(encoding="utf-8") for folder in CODE for p in (ROOT / folder).rglob("*.py")
    ]
    return frozenset(re.findall(r"\w+", "\n".join([*texts, (ROOT / "pyproject.toml").read_text()])))


@cache
def defined(path: Path) -> frozenset[str]:
    """`name` and `Class.name` of what a module binds at its top level and in its classes."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            targets = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


def problem(span: str) -> str | None:
    """What is wrong with one piece of inline code, None where nothing is or nothing is known."""
    path, _, name = span.partition(":")
    is_path = PATH.fullmatch(path) and ("/" in path.rstrip("/") or path.endswith((*SUFFIXES, "/")))
    if is_path and (not name or NAME.fullmatch(name)):
        if not (ROOT / path).exists():
            return "no such file"
        if name and name not in defined(ROOT / path):
            return f"{path} defines no {name}"
    elif span.startswith("jf.") and NAME.fullmatch(span.partition("(")[0]):
        target = jf
        for part in span.partition("(")[0].split(".")[1:]:
            if not hasattr(target, part):
                return f"no {part} in {target}"
            target = getattr(target, part)
    elif NAME.fullmatch(span) and re.search(r"_|[a-z][A-Z]", span.strip("_")):
        missing = set(span.split(".")) - source_words()
        is_suffix = span.startswith("_") and any(word.endswith(span) for word in source_words())
        if missing and not is_suffix:
            return f"not in the source: {sorted(missing)}"
    return None


@pages
def test_names_exist(page: Path) -> None:
    problems = [f"`{span}`: {found}" for span in spans(page) if (found := problem(span))]
    assert not problems, "\n".join(problems)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pages
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = [*spans(page), *INDENTED.findall(text)]
    named = {m[1] for line in lines if (m := re.match(r"make ([a-z][\w-]*)", line))}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


@pages
def test_command_lines_parse(page: Path) -> None:
    """Indented command lines; NAME stands for any experiment."""
    programs = {"jinfire": parser(), "python -m experiments": experiments_parser()}
    for line in INDENTED.findall(page.read_text(encoding="utf-8")):
        for program, known in programs.items():
            if line.startswith(f"{program} "):
                words = shlex.split(line.removeprefix(program), comments=True)
                known.parse_args([sorted(EXPERIMENTS)[0] if w == "NAME" else w for w in words])


def test_a_renamed_thing_is_found() -> None:
    for span in (
        *("jinfire/nowhere.py", "docs/", "jinfire/engine.py:Engine.nothing", "jf.Nothing"),
        *("no_such_function_" + "anywhere", "jf.Engine.nothing"),
    ):
        assert bool(problem(span)) == (span != "docs/")
    for span in ("jinfire/engine.py:Engine.step", "jf.Engine.step", "experiments/results/", "B, T"):
        assert problem(span) is None


BYTES = [
    chr(b) if 33 <= b <= 126 or b in (*range(161, 173), *range(174, 256)) else ""
    for b in range(256)
]
BYTE_TOKENS = [c or chr(256 + BYTES[:b].count("")) for b, c in enumerate(BYTES)]


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Path:
    """A stored model with SmolLM2's heads (9 and 3) and a tokenizer whose tokens are bytes."""
    config = tiny_config(
        4, vocab_size=257, width=36, num_heads=9, num_kv_heads=3, head_dim=4, mlp_width=48
    )
    tokenizer = jf.Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*BYTE_TOKENS, "<|end|>"],
            "tokenizer.ggml.token_type": [*[1] * 256, 3],
            "tokenizer.ggml.merges": [],
        }
    )
    source = RandomSource(config)
    arrays = {
        name: source.read(name, (slice(None),) * len(source.shape(name))) for name in source.names()
    }
    save(tmp_path / "tiny", config, arrays, tokenizer)
    return tmp_path / "tiny"


def test_readme_example_runs(tiny_checkpoint: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(jf, "fetch", lambda name: tiny_checkpoint)
    [code] = [
        code for language, code in FENCED.findall(PAGES[0].read_text()) if language == "python"
    ]
    assert len(code.splitlines()) <= 20
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)  # noqa: S102
    assert len(scope["out"].token_ids) == 16
    assert scope["out"].text in capsys.readouterr().out
    assert scope["engine"].stats()["kv_bytes_transferred"] > 0
