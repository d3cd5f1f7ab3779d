"""The command line. Each command is a module with `add_parser` and `run`."""

import argparse
import contextlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence

from jinfire.cli import (
    chat,
    compress,
    console,
    decompress,
    demo,
    fetch,
    generate,
    init,
    inspect,
    plan,
    verify,
)

COMMANDS = (generate, chat, inspect, plan, init, compress, decompress, verify, fetch, demo)

EPILOG = """\
examples:
  jinfire fetch smollm2
  jinfire generate "The capital of France is" --temperature 0
  jinfire chat --temperature 0
  jinfire plan --model kimi-k2.5 --gpus 8xH100
  jinfire generate --prompts-file prompts.jsonl --temperature 0 --prefill 2x3 --decode 1x1 --json

Results go to stdout, progress and errors to stderr.
exit codes: 0 done, 1 a request, check or download failed, 2 bad flags or input, 130 Ctrl-C,
141 nobody reads stdout any more
"""


def parser() -> console.Parser:
    """The parser of all commands."""
    top = console.Parser(
        prog="jinfire",
        description="LLM inference with prefill and decode on separate JAX device meshes.",
        epilog=EPILOG,
    )
    top.add_argument("--version", action="version", version=f"jinfire {_version()}")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return top


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    top = parser()
    args, unknown = top.parse_known_args(argv)
    if unknown:  # argparse would point to the help of the program, which does not list its flags
        console.print_flag_error(f"unrecognized arguments: {' '.join(unknown)}", _prog(args))
        raise SystemExit(console.USAGE)
    return args


def _prog(args: argparse.Namespace) -> str:
    return f"jinfire {args.command}"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command line."""
    for stream in (sys.stdout, sys.stderr):
        # Text of a model may hold characters that a terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        args = _parsed(argv)
    except SystemExit as exit_:  # argparse ends the program for --help and errors
        return exit_.code if isinstance(exit_.code, int) else console.USAGE
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        console.print_note("jinfire: interrupted")
        return console.INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; there must be someone to take it.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return console.NO_READER
    except Exception as error:
        if args.debug:
            raise
        if isinstance(error, console.FlagError):
            console.print_flag_error(error, _prog(args))
            return console.USAGE
        if isinstance(error, ValueError | OSError):
            console.print_error(error)
            return console.USAGE
        console.print_error(f"{type(error).__name__}: {error} (--debug shows where)")
        return console.FAILED


def _version() -> str:
    try:
        return importlib.metadata.version("jinfire")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
