"""Flags that several commands share, and what they become: placement, parameters, engine."""

import argparse
import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path

import jax

from jinfire.checkpoints import load_tokenizer, open_checkpoint
from jinfire.cli.console import FlagError, UsageError, print_note
from jinfire.config import KV_CODECS, LATENTS, EngineConfig, Placement
from jinfire.engine import Engine
from jinfire.fetch import MODELS_ON_PYPI, cached, default_cache_dir
from jinfire.request import SamplingParams
from jinfire.tokenizer import Tokenizer
from jinfire.unweight.policy import VARIANTS, PhasePolicies, as_policies, read_policies

Layout = tuple[int, ...]
ENGINE_FIELDS = ("page_size", "max_rows", "max_context", "decode_steps")


def layout(text: str) -> Layout:
    """PIPELINExTENSOR, e.g. `2x3`, or with the expert axis `2x3x4`."""
    sizes = text.lower().split("x")
    if not 2 <= len(sizes) <= 3 or not all(n.isdecimal() and int(n) >= 1 for n in sizes):
        raise argparse.ArgumentTypeError(
            "expected PIPELINExTENSOR or PIPELINExTENSORxEXPERT with sizes >= 1, e.g. 2x3, "
            f"got {text!r}"
        )
    return tuple(map(int, sizes))


def latents(text: str) -> tuple[str, str]:
    """One of `LATENTS` for both phases, or two with a comma between."""
    kinds = text.lower().split(",")
    if len(kinds) > 2 or not set(kinds) <= set(LATENTS):
        raise argparse.ArgumentTypeError(
            f"expected {' or '.join(LATENTS)}, or two with a comma between, got {text!r}"
        )
    return kinds[0], kinds[-1]


def positive(text: str) -> int:
    """An integer >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


# Flags.


def add_model(parser: argparse.ArgumentParser, *, dtype: bool = True) -> None:
    names = ", ".join(_runnable())
    parser.add_argument(
        "--model",
        default="smollm2",
        metavar="PATH",
        help="Hugging Face folder, GGUF file or stored folder, or the name of a model that "
        f"`jinfire fetch` has got ({names})",
    )
    if dtype:
        parser.add_argument(
            "--dtype",
            choices=("float32", "bfloat16"),
            default="float32",
            help="data type of weights and KV cache",
        )


def add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "placement (PIPELINExTENSOR, e.g. 2x3; with an expert axis PIPELINExTENSORxEXPERT)"
    )
    group.add_argument(
        "--colocated",
        type=layout,
        metavar="PxT",
        help="one mesh for both phases",
    )
    group.add_argument(
        "--prefill", type=layout, metavar="PxT", help="mesh of the prefill, with --decode"
    )
    group.add_argument("--decode", type=layout, metavar="PxT", help="mesh of the decode")
    group.add_argument(
        "--kv-codec",
        choices=KV_CODECS,
        default="none",
        help="how keys and values cross from --prefill to --decode: unweight sends fewer bytes and "
        "changes none of them",
    )
    group.add_argument(
        "--latents",
        type=latents,
        default=(LATENTS[0], LATENTS[0]),
        metavar="KIND",
        help="what devices of a stage keep of MLA latents: replicated (each all of them) or split "
        "(each a part); PREFILL,DECODE where the meshes differ (default: replicated)",
    )


def add_unweight(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unweight",
        metavar="VARIANT|FILE",
        help="hold bfloat16 weights compressed, without loss: a variant for all of them "
        f"({', '.join(VARIANTS)}), or a policy file",
    )


def add_engine(parser: argparse.ArgumentParser, *, max_rows: str, dtype: bool = True) -> None:
    """Model, placement, devices and engine sizes; `max_rows` says what its default is."""
    add_model(parser, dtype=dtype)
    add_layout(parser)
    if dtype:
        add_unweight(parser)
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--devices",
        type=positive,
        metavar="N",
        help="run on N virtual CPU devices (default: the devices JAX has; on a CPU as many "
        "virtual ones as the placement needs)",
    )
    defaults = EngineConfig()
    meanings = {
        "page_size": "tokens in a page of the KV cache",
        "max_rows": f"requests that decode at once (default: {max_rows})",
        "max_context": "most tokens of prompt and answer; less where the model allows less",
        "decode_steps": "decode steps per dispatch; tokens arrive in groups of that many",
    }
    for name in ENGINE_FIELDS:
        flag = f"--{name.replace('_', '-')}"
        value = None if name == "max_rows" else getattr(defaults, name)
        group.add_argument(flag, type=positive, default=value, metavar="N", help=meanings[name])
    add_compile_cache(group)


def add_compile_cache(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--no-compile-cache",
        action="store_true",
        help="do not keep compiled programs in the user's cache directory",
    )


def add_sampling(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """One flag for each field of `SamplingParams`; `defaults` replace its defaults."""
    group = parser.add_argument_group("sampling")
    own = {field.name: field.default for field in dataclasses.fields(SamplingParams)} | defaults

    def add(name: str, kind: type, metavar: str, text: str) -> None:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, default=own[name], metavar=metavar, help=text)

    add("max_tokens", int, "N", "most new tokens")
    add("temperature", float, "X", "0 is greedy")
    add("top_k", int, "N", "draw from the N best tokens; 0 is off")
    add("top_p", float, "X", "draw from the best tokens that make up probability X; 1 is off")
    add("min_p", float, "X", "drop tokens less likely than X times the best; 0 is off")
    add("seed", int, "N", "the same seed and prompt give the same tokens (default: random)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable"
    )
    group.add_argument(
        "--stop-token-ids",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        help="end at this token; repeatable",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the model's end tokens"
    )
    add("logprobs", int, "N", "log-probabilities of the token and the N best (shown with --json)")
    group.add_argument(
        "--logprobs-after-temperature",
        action="store_true",
        help="log-probabilities after the temperature, not before",
    )


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="threads, which work on one tensor at a time (default: one for each CPU)",
    )


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace files of DST that are not of an earlier run of the same command",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="machine output: one JSON document as the last line of stdout; streamed tokens come "
        "before it as JSON lines",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


# What they become.


def placement(args: argparse.Namespace) -> Placement:
    """The placement that the flags name."""
    if args.prefill is None and args.decode is None:
        if args.kv_codec != "none":
            raise FlagError(f"--kv-codec {args.kv_codec}: expected with --prefill and --decode")
        if args.latents[0] != args.latents[1]:
            raise FlagError(f"--latents: expected one for one mesh, got {','.join(args.latents)}")
        return Placement.colocated(args.colocated or (1, 1), latents=args.latents[0])
    if args.colocated is not None:
        raise FlagError("--colocated: expected alone, got --prefill or --decode too")
    if args.prefill is None or args.decode is None:
        missing = "--prefill" if args.prefill is None else "--decode"
        raise FlagError(f"{missing} is missing: --prefill and --decode go together")
    return Placement.disaggregated(args.prefill, args.decode, args.kv_codec, latents=args.latents)


def unweight(args: argparse.Namespace) -> PhasePolicies:
    """The policies that `--unweight` names."""
    if args.unweight is None or args.unweight in VARIANTS:
        return as_policies(args.unweight)
    path = Path(args.unweight)
    if not path.is_file():
        raise FlagError(
            f"--unweight: expected one of {', '.join(VARIANTS)} or a policy file, "
            f"got {args.unweight!r}"
        )
    return read_policies(path)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    try:
        return SamplingParams(**{name: getattr(args, name) for name in names})
    except ValueError as error:
        field, _, problem = str(error).removeprefix("SamplingParams.").partition(": ")
        raise FlagError(f"--{field.replace('_', '-')}: {problem}") from error


def engine_config(args: argparse.Namespace, max_rows: int, **fixed: object) -> EngineConfig:
    """Engine sizes from the flags; `max_rows` where its flag is not given.

    Requests without `--seed` get theirs from the engine's, which is a fresh one.
    """
    sizes = {name: getattr(args, name) for name in ENGINE_FIELDS}
    sizes["max_rows"] = sizes["max_rows"] or max_rows
    return EngineConfig(**{**sizes, "seed": secrets.randbelow(2**32), **fixed})


def _runnable() -> list[str]:
    """Models that `jinfire fetch` gets and the engine runs."""
    return sorted(name for name, model in MODELS_ON_PYPI.items() if model.runs)


def model_path(args: argparse.Namespace) -> Path:
    """The checkpoint that `--model` names."""
    if args.model in _runnable():
        path = cached(args.model)
        if path is None:
            raise UsageError(
                f"{args.model} is not on this machine; run `jinfire fetch {args.model}` first"
            )
        return path
    path = Path(args.model)
    if not path.exists():
        names = ", ".join(_runnable())
        raise FlagError(f"--model: expected a checkpoint or one of {names}, got {args.model!r}")
    return path


def prepare_jax(args: argparse.Namespace, where: Placement) -> None:
    """Devices and compilation cache, before JAX is first used."""
    _keep_compiled(args)
    _make_devices(args, where.num_devices)
    present = jax.device_count()
    if present < where.num_devices:
        raise FlagError(
            f"--devices: {where} needs {where.num_devices} devices, {present} present; "
            f"--devices {where.num_devices} makes virtual CPU devices"
        )


def _keep_compiled(args: argparse.Namespace) -> None:
    if not args.no_compile_cache and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _make_devices(args: argparse.Namespace, num_devices: int) -> None:
    if args.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        num_devices = args.devices
    elif jax.config.jax_num_cpu_devices >= num_devices:
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        # JAX runs in this process already; a placement that does not fit is refused later.
        if args.devices is not None:
            raise FlagError(
                f"--devices {args.devices}: JAX is in use already, with {jax.device_count()}"
            ) from error


def note_start(what: str) -> None:
    """What goes on until the first token. Off a terminal there are no progress bars to tell."""
    kept = "" if jax.config.jax_compilation_cache_dir is None else ", kept for the next run"
    print_note(f"{what}: loading, then compiling{kept} ...")


def load_engine(
    args: argparse.Namespace,
    config: EngineConfig,
    check: Callable[[Tokenizer | None], object] = lambda tokenizer: None,
) -> Engine:
    """The engine that the flags describe, programs not compiled.

    `check` may refuse the tokenizer before the weights are loaded.
    """
    path, where, policies = model_path(args), placement(args), unweight(args)
    if args.unweight is not None and args.dtype != "bfloat16":
        raise FlagError(f"--unweight: expected --dtype bfloat16, got {args.dtype}")
    prepare_jax(args, where)
    tokenizer = load_tokenizer(path)
    check(tokenizer)
    note_start(path.name)
    source = open_checkpoint(path)
    try:
        return Engine(
            source,
            tokenizer,
            placement=where,
            config=config,
            dtype=args.dtype,
            unweight=policies,
        )
    finally:
        source.close()
