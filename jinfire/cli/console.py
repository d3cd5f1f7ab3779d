"""What the commands share towards the shell: exit codes, error lines, JSON, tables."""

import argparse
import dataclasses
import enum
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

OK = 0
FAILED = 1  # a request was refused or failed, a check or a download failed
USAGE = 2  # flags, prompts or checkpoints that cannot be used
INTERRUPTED = 130  # 128 + SIGINT
NO_READER = 141  # 128 + SIGPIPE: `jinfire generate ... | head -1`


class UsageError(ValueError):
    """Input that the user has to change; exit code 2."""


class FlagError(UsageError):
    """A flag that is missing, or whose value cannot be used; the line points to `--help`."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults after every option that has one, examples with their own line breaks."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others of the program."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        print_flag_error(message, self.prog)
        raise SystemExit(USAGE)


def print_error(message: object) -> None:
    """One line on stderr."""
    print(f"jinfire: error: {' '.join(str(message).split())}", file=sys.stderr)


def print_flag_error(message: object, prog: str) -> None:
    """One line on stderr, with the program or command whose `--help` tells more."""
    print_error(f"{message} (see {prog} --help)")


def print_note(message: str) -> None:
    """A remark on stderr, where it is in nobody's way."""
    print(message, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON document as one line on stdout; NaN becomes null, which JSON lacks."""
    print(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False), flush=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        # Lone surrogates come from undecodable arguments and have no UTF-8 form.
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, Path):
        return str(value)
    return value


def error_json(error: Exception | None) -> dict[str, str] | None:
    """An exception as its type and message."""
    return None if error is None else {"type": type(error).__name__, "message": str(error)}


def print_table(title: str, rows: Sequence[tuple[str, object]]) -> None:
    """Names and values in two columns of plain text."""
    if title:
        print(title)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def size_text(size_bytes: float) -> str:
    """Bytes in decimal units, as everywhere here (MB = 1e6)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def percent_text(share: float, digits: int = 0) -> str:
    return f"{share * 100:.{digits}f} %"


def time_text(time_s: float) -> str:
    """Seconds at a readable scale; a dash for a time that was not observed."""
    if math.isnan(time_s):
        return "-"
    return f"{time_s * 1e3:.0f} ms" if time_s < 1 else f"{time_s:.2f} s"
