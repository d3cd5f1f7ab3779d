"""`jinfire decompress`: the checkpoint that was compressed, byte for byte."""

import argparse
from pathlib import Path
from typing import Any

from jinfire.cli import console, options
from jinfire.unweight.decompress import decompress

EXAMPLES = """\
examples:
  jinfire decompress ~/models/Llama-3.1-8B-unweight ~/models/Llama-3.1-8B

Every file is as it was before `jinfire compress`, byte for byte; hashes of tensors and of whole
files are checked. An interrupted run goes on where it was.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "decompress",
        help="get back what was compressed",
        description="Write the checkpoint that was compressed, byte for byte. Print the path.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument("source", type=Path, metavar="SRC", help="a compressed folder or file")
    parser.add_argument("target", type=Path, metavar="DST", help="a new folder, or one begun")
    options.add_jobs(parser)
    options.add_force(parser)
    options.add_output(parser)


def run(args: argparse.Namespace) -> int:
    written = decompress(args.source, args.target, args.jobs, args.force)
    if written.left_out:
        console.print_note(f"jinfire: not copied: {', '.join(written.left_out)}")
    if args.json:
        document = {"command": "decompress", "path": args.target, "kept": written.kept}
        console.print_json({**document, "left_out": written.left_out})
    else:
        print(args.target)
    return console.OK
