"""`jinfire compress`: a checkpoint with losslessly compressed weights."""

import argparse
import time
from pathlib import Path
from typing import Any

from jinfire.cli import compressed, console, options
from jinfire.unweight.compress import FORMS, TENSORS, compress
from jinfire.unweight.describe import describe_compressed

EXAMPLES = """\
examples:
  jinfire compress ~/models/Llama-3.1-8B ~/models/Llama-3.1-8B-unweight
  jinfire compress --tensors mlp --jobs 2 ~/models/Llama-3.1-8B small
  jinfire compress --form palette model.safetensors compressed
  jinfire verify ~/models/Llama-3.1-8B-unweight --source ~/models/Llama-3.1-8B

The result is a checkpoint like any other: `generate`, `chat` and `inspect` read it. Files that were
complete when a run was interrupted are kept by the next one.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compress",
        help="compress a checkpoint's weights without loss",
        description="Compress the weights of a Hugging Face folder, or of a safetensors file, "
        "without loss. Large bfloat16 and float32 tensors and packed 4-bit ones are coded; "
        "float16 tensors stay as they are. Print what it saves.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument("source", type=Path, metavar="SRC", help="a folder or a safetensors file")
    parser.add_argument("target", type=Path, metavar="DST", help="a new folder, or one begun")
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="huffman",
        help="of coded exponents: smallest, 4 bits each, or 3 bits each with exceptions",
    )
    parser.add_argument(
        "--tensors",
        choices=TENSORS,
        default="all",
        help="all where it saves bytes, or the matrices of MLPs and experts alone",
    )
    options.add_jobs(parser)
    options.add_force(parser)
    options.add_output(parser)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    written = compress(args.source, args.target, args.form, args.tensors, args.jobs, args.force)
    elapsed_s = time.perf_counter() - started
    description = describe_compressed(_written(args.source, args.target))
    if written.left_out:
        console.print_note(f"jinfire: not copied: {', '.join(written.left_out)}")
    if args.json:
        totals = compressed.document(description)
        document = {"command": "compress", "path": args.target, **totals}
        kept = {"kept": written.kept, "left_out": written.left_out}
        console.print_json({**document, **kept, "elapsed_s": elapsed_s})
    else:
        console.print_table(str(args.target), compressed.total_rows(description))
        if written.kept:
            kept = f"{len(written.kept)} of {description.files} files were complete already"
            console.print_table("", [("kept", kept)])
    return console.OK


def _written(source: Path, target: Path) -> Path:
    """The new folder; of a file alone, the new file."""
    return target / source.name if source.is_file() else target
