"""`jinfire init`: an architecture with random weights, whole or at a smaller size."""

import argparse
import math
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jinfire.checkpoints import write_hugging_face
from jinfire.checkpoints.source import Index, read_json
from jinfire.cli import console, options
from jinfire.config import ModelConfig
from jinfire.loading import RandomSource
from jinfire.models import parse_architecture, parse_config
from jinfire.models.presets import PRESETS, preset
from jinfire.models.reduction import SIZES, fitted_tokens, reduced
from jinfire.models.spec import abstract_tree

EXAMPLES = """\
examples:
  jinfire init --like llama-3.1-8b small --layers 2 --hidden 256 --heads 8 --mlp 512 --vocab 1000
  jinfire init --like ~/models/Mixtral-8x7B/config.json two-experts --layers 2 --experts 2
  jinfire inspect --model small

A size that is not given is that of the architecture. Latent attention has sizes of its own:
--query-rank, --latent-rank, --nope-dim, --rope-dim, --value-dim.
"""
MEANINGS = {
    "layers": "decoder layers; the first ones of the pattern",
    "experts": "routed experts of a layer",
    "hidden": "width of the residual stream",
    "heads": "query heads; KV heads in the same proportion",
    "head_dim": "size of a head",
    "mlp": "width of a dense MLP",
    "expert_mlp": "width of an expert",
    "vocab": "vocabulary; token ids of the config are taken modulo it",
    "query_rank": "latents of queries",
    "latent_rank": "latents of keys and values",
    "nope_dim": "plain part of a query head",
    "rope_dim": "rotary part of a query head",
    "value_dim": "size of a value head",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "init",
        help="make a checkpoint with random weights",
        description="Make a Hugging Face folder with random weights of an architecture, whole or "
        "at a smaller size. Print the path.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument(
        "--like",
        required=True,
        metavar="CONFIG",
        help=f"a config.json, a folder with one, or an architecture ({', '.join(PRESETS)})",
    )
    group = parser.add_argument_group("sizes")
    for size in SIZES:
        flag = f"--{size.replace('_', '-')}"
        group.add_argument(flag, type=options.positive, metavar="N", help=MEANINGS[size])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random weights")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="data type of the weights that have none of their own",
    )
    options.add_output(parser)


def run(args: argparse.Namespace) -> int:
    if args.seed < 0:
        raise console.FlagError(f"--seed: expected an integer >= 0, got {args.seed}")
    sizes = {size: getattr(args, size) for size in SIZES if getattr(args, size) is not None}
    config_json, generation = _architecture(args.like)
    # A config that is none would be cut into anything.
    parse_architecture(config_json, generation)
    config_json = _with_dtype(reduced(config_json, sizes), args.dtype)
    if generation is not None and "vocab" in sizes:
        generation |= fitted_tokens(generation, sizes["vocab"])
    source = _Drawn(parse_config(config_json, generation), args.seed, args.dtype)
    _check_room(args.out, source.num_bytes)
    write_hugging_face(args.out, config_json, source, generation)
    if args.json:
        document = {"command": "init", "path": args.out, "config": source.config}
        console.print_json({**document, "bytes": source.num_bytes})
    else:
        print(args.out)
    return console.OK


class _Drawn(RandomSource):
    """Random weights in the data types in which they are stored."""

    def __init__(self, config: ModelConfig, seed: int, dtype: str) -> None:
        super().__init__(config, seed)
        self._dtypes = {
            name: jnp.dtype(spec.dtype or dtype) for name, spec in abstract_tree(config).items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(
            math.prod(self.shape(name)) * dtype.itemsize for name, dtype in self._dtypes.items()
        )

    def read(self, name: str, index: Index) -> np.ndarray:
        return super().read(name, index).astype(self._dtypes[name], copy=False)


def _architecture(like: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The contents of `config.json`, and of `generation_config.json` where there is one."""
    path = Path(like).expanduser()
    if like in PRESETS:
        return preset(like), None
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise console.FlagError(
            f"--like: expected a config.json, a folder with one or one of {sorted(PRESETS)}, "
            f"got {like!r}"
        )
    generation = path.with_name("generation_config.json")
    return read_json(path), read_json(generation) if generation.is_file() else None


def _with_dtype(config_json: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A config that says, wherever it says so, what the weights are."""
    for level in (config_json, config_json.get("text_config")):
        if isinstance(level, dict):
            level |= {key: dtype for key in ("dtype", "torch_dtype") if key in level}
    return config_json


def _check_room(out: Path, num_bytes: int) -> None:
    """Refusal of what the disk does not hold."""
    folder = next(parent for parent in out.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise console.FlagError(
            f"{console.size_text(num_bytes)} of weights, but {folder} has "
            f"{console.size_text(free)} free: expected smaller sizes, e.g. --layers 2"
        )
