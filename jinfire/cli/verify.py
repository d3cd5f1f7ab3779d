"""`jinfire verify`: whether a compressed checkpoint still holds its source, to the bit."""

import argparse
from pathlib import Path
from typing import Any

from jinfire.cli import console, options
from jinfire.unweight.verify import verify_compressed

EXAMPLES = """\
examples:
  jinfire verify ~/models/Llama-3.1-8B-unweight
  jinfire verify ~/models/Llama-3.1-8B-unweight --source ~/models/Llama-3.1-8B
  jinfire verify ~/models/Llama-3.1-8B-unweight --json | jq .damage

Every tensor is decompressed and compared with the hash of what was compressed. The exit code is 1
where anything differs.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="check a compressed checkpoint, to the bit",
        description="Check that a compressed folder or file still holds what was compressed, to "
        "the bit. Name every tensor that it does not.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument("path", type=Path, metavar="PATH", help="a compressed folder or file")
    parser.add_argument(
        "--source", type=Path, metavar="SRC", help="compare with what was compressed, too"
    )
    options.add_jobs(parser)
    options.add_output(parser)


def run(args: argparse.Namespace) -> int:
    result = verify_compressed(args.path, args.source, args.jobs)
    if args.json:
        document = {"command": "verify", "path": args.path, "intact": not result.damage}
        console.print_json({**document, **vars(result)})
    else:
        for damage in result.damage:
            where = damage.file if damage.tensor is None else f"{damage.file}: {damage.tensor}"
            print(f"{where}: {damage.problem}")
        if not result.damage:
            against = "the hashes of its source" if args.source is None else str(args.source)
            print(
                f"{args.path}: {result.tensors:,} tensors, "
                f"{console.size_text(result.source_bytes)}, identical to {against}"
            )
    if result.damage:
        bad = len(result.damage)
        console.print_error(f"{args.path}: {bad} damaged tensor{'s' if bad > 1 else ''} or file")
    return console.FAILED if result.damage else console.OK
