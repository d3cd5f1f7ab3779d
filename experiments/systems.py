"""The systems that are compared, each a child process that answers JSON commands."""

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from experiments.harness import ROOT, Options

PEERS = ROOT / "experiments" / "peers"


class SystemFailed(RuntimeError):
    """A system under test that ended or answered no JSON."""


class System:
    """One child process: a command in, its answer out, strictly in turn.

    Its stderr is ours, so that its own messages and progress are seen.
    """

    def __init__(self, name: str, command: Sequence[str | pathlib.Path]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one command.

        Raises: SystemFailed with the exit status where the child ended.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except (OSError, json.JSONDecodeError) as error:
            self.close()
            raise SystemFailed(
                f"{self.name}: no answer to {op!r}, exit status {process.returncode}"
            ) from error

    def close(self) -> None:
        """Ends the child: first by the end of its input, then by force."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def engine_process() -> System:
    return System("jinfire", [sys.executable, "-m", "experiments.engine_worker"])


def hf_process(options: Options) -> System:
    _require("Hugging Face transformers", options.hf_python)
    return System("hf", [options.hf_python, PEERS / "hf_bench.py"])


def llama_process(options: Options) -> System:
    _require("llama-cpp-python", options.llama_python)
    return System("llama", [options.llama_python, PEERS / "llama_cpp_bench.py"])


def codec_process() -> System:
    return System("jinfire", [sys.executable, "-m", "experiments.unweight_worker"])


def zipnn_process(options: Options) -> System:
    _require("ZipNN", options.zipnn_python)
    # Its torch warns of what ZipNN does at import.
    quiet = ("-W", "ignore::FutureWarning")
    return System("zipnn", [options.zipnn_python, *quiet, PEERS / "zipnn_bench.py"])


STARTERS: dict[str, Callable[[Options], System]] = {"hf": hf_process, "llama": llama_process}


def _require(what: str, python: pathlib.Path) -> None:
    if not python.exists():
        raise ValueError(f"{what}: expected an interpreter at {python}; `make peers` makes it")


@contextlib.contextmanager
def running(peers: Sequence[str], options: Options) -> Iterator[dict[str, System]]:
    """The engine and the named peers, alive until the block ends."""
    with contextlib.ExitStack() as stack:
        systems = {"jinfire": stack.enter_context(engine_process())}
        for name in peers:
            systems[name] = stack.enter_context(STARTERS[name](options))
        yield systems


def bf16_gguf(source: pathlib.Path, options: Options) -> pathlib.Path:
    """The bfloat16 copy of a quantised GGUF, made once and kept in the cache."""
    stat = source.stat()
    target = options.cache / f"{source.stem}-{stat.st_size}-bf16.gguf"
    script = PEERS / "gguf_bf16.py"
    subprocess.run([sys.executable, script, source, target], check=True, stdout=subprocess.DEVNULL)
    return target
