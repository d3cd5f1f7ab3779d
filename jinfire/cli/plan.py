"""`jinfire plan`: how many GPUs a model needs, what they hold, how fast they could be."""

import argparse
import math
from typing import Any

from jinfire.cli import console, options
from jinfire.config import LATENTS, SPLIT
from jinfire.models.presets import PRESETS
from jinfire.planner.footprint import Workload
from jinfire.planner.gpus import GIB, GPUS, WORKSPACE_BYTES, parse_gpus
from jinfire.planner.layouts import AUTO, MAX_GPUS, Candidate, Fitting, Plan
from jinfire.planner.plan import plan, plan_json
from jinfire.planner.roofline import PhaseTime
from jinfire.planner.unweight import NAMES, NONE
from pallas_kernels import ToolchainMissing

EXAMPLES = """\
examples:
  jinfire plan --model kimi-k2.5 --gpus 8xH100
  jinfire plan --model llama-4-scout --gpus 2xH200 --context 131072 --rows 16
  jinfire plan --model ~/models/Llama-3.2-1B/config.json --gpus L40S --json
  jinfire plan --model kimi-k2.5 --gpus 8xH100 --layout 2x4 --verify
  jinfire plan --model deepseek-v3 --gpus 8xH200 --unweight compact
  jinfire plan --model kimi-k2.5 --gpus 8xH100 --latents auto

Times are bounds of the roofline: real steps are longer.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="say how many GPUs a model needs",
        description="Say what a model needs on a number of GPUs, without having them: memory by "
        "kind, room for keys and values, least number of GPUs, predicted times, and why layouts do "
        "not fit. No weights are read.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help=f"a published architecture ({', '.join(sorted(PRESETS))}), a config.json, or a "
        "checkpoint",
    )
    parser.add_argument(
        "--gpus",
        required=True,
        metavar="COUNTxKIND",
        help=f"e.g. 8xH100; kinds: {', '.join(GPUS)}",
    )
    parser.add_argument(
        "--layout",
        type=_layout,
        metavar="PxTxE",
        help="pipeline x tensor or pipeline x tensor x expert (default: auto, the fastest at "
        "decode that fits)",
    )
    parser.add_argument(
        "--context",
        type=options.positive,
        metavar="N",
        help=f"tokens of a row, prompt and answer (default: {Workload.context}, or all that the "
        "model has)",
    )
    defaults = Workload()
    for flag, name, text in (
        ("--rows", "rows", "requests that decode at once"),
        ("--chunk", "chunk", "prompt tokens of a prefill chunk"),
        ("--page-size", "page_size", "tokens in a page of the KV cache"),
        ("--decode-steps", "steps", "decode steps per dispatch"),
    ):
        value = getattr(defaults, name)
        parser.add_argument(
            flag, dest=name, type=options.positive, default=value, metavar="N", help=text
        )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="data type of weights and KV cache, also where weights are published in fp8; 4-bit "
        "experts stay 4-bit",
    )
    parser.add_argument(
        "--unweight",
        choices=NAMES,
        default=NONE,
        help="lossless form that weights lie in on the GPUs, by measured bits per weight",
    )
    parser.add_argument(
        "--latents",
        choices=(*LATENTS, AUTO),
        default=LATENTS[0],
        help="MLA latents: all of them on every device of a stage, a part on each, or the better "
        "of both (default: %(default)s)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compile the steps of the layout at full size, which needs no GPU, and take weights "
        "and activations from the compiler (make install-aot)",
    )
    options.add_output(parser)


def _layout(text: str) -> options.Layout | None:
    return None if text.lower() == "auto" else options.layout(text)


def run(args: argparse.Namespace) -> int:
    try:
        _, count = parse_gpus(args.gpus)
    except ValueError as error:
        raise console.FlagError(f"--{error}") from None
    if args.layout is not None and math.prod(args.layout) != count:
        raise console.FlagError(
            f"--layout: expected sizes whose product is {count}, got {math.prod(args.layout)}"
        )
    load = {name: getattr(args, name) for name in ("rows", "chunk", "page_size", "steps")}
    if args.context is not None:
        load["context"] = args.context
    try:
        found = plan(
            args.model,
            args.gpus,
            layout=args.layout,
            dtype=args.dtype,
            unweight=args.unweight,
            latents=args.latents,
            verify=args.verify,
            show_progress=True,
            **load,
        )
    except ToolchainMissing as missing:
        raise console.UsageError(f"--verify: {missing}") from missing
    if args.json:
        console.print_json({"command": "plan", "model": args.model, **plan_json(found)})
    else:
        _print(args.model, found)
    return console.OK


# Text.


def _print(model: str, found: Plan) -> None:
    chosen, gpu, load = found.chosen, found.gpu, found.load
    least = found.min_gpus or f"none of up to {MAX_GPUS}"
    verdict = "fits" if found.fits else "does not fit"
    console.print_table(
        f"{model} on {found.num_gpus} x {gpu.name}: {verdict}",
        [
            ("least GPUs", f"{least} (analytic)"),
            ("each", f"{_gib(gpu.memory_bytes)}, {_gib(WORKSPACE_BYTES)} of it kept free"),
            ("for", f"{load.rows} rows of {load.context:,} tokens"),
            (
                "data type",
                f"{found.dtype}, also of what is published in fp8; int4 stays int4",
            ),
        ],
    )
    if chosen is not None:
        print()
        _print_memory(chosen)
        if found.unweight.form != NONE:
            print()
            _print_unweight(found, chosen)
        print()
        _print_times(chosen)
    print()
    _print_layouts(found.candidates, chosen)


def _print_memory(found: Fitting) -> None:
    footprint = found.footprint
    parameters = footprint.parameters
    rows = [("parameters", f"{sum(parameters.values()) / 1e9:,.1f} B")]
    rows += [
        (f"  {kind}", f"{_gib(size):>10}  of {parameters[kind] / 1e9:,.2f} B parameters")
        for kind, size in footprint.weights.items()
        if size
    ]
    rows += [
        ("weights", f"{_gib(found.weights_bytes):>10}"),
        ("kv", f"{_gib(found.kv_bytes):>10}"),
        (
            "temp",
            f"{_gib(found.temp_bytes):>10}  prefill {_gib(found.prefill_temp_bytes)}, decode "
            f"{_gib(found.decode_temp_bytes)}",
        ),
        ("total", f"{_gib(found.total_bytes):>10}  of {_gib(found.gpu.usable_bytes)} usable"),
        (
            "left for KV",
            f"{_gib(found.kv_bytes_left):>10}  in all: {found.kv_tokens_left:,} tokens",
        ),
    ]
    console.print_table(f"bytes of one device, {_layout_text(found)} ({found.source})", rows)
    if found.compiled is not None:
        compiled = found.compiled
        print(
            f"  compiled in {compiled.prefill_s:.0f} + {compiled.decode_s:.0f} s with "
            f"{_gib(compiled.host_bytes)} of memory"
        )
        for phase, ran in (
            ("a prefill dispatch", compiled.prefill_collectives),
            ("a decode dispatch", compiled.decode_collectives),
        ):
            text = ", ".join(
                f"{each.count} {each.kind} of {each.devices} "
                f"({console.size_text(each.sent_bytes)} sent)"
                for each in ran
            )
            print(f"  collectives of {phase}: {text or 'none'}")


def _print_unweight(found: Plan, chosen: Fitting) -> None:
    """Coded weights beside dense ones of the same layout."""
    own, dense = found.unweight, chosen.dense
    decode_ms = dense.decode.total_s * 1e3
    rows = [
        (
            kind.replace("_", " "),
            f"{_gib(size['plain']):>10} dense, {_gib(size['coded']):>10} coded "
            f"({size['coded'] / size['plain']:.1%})",
        )
        for kind, size in chosen.footprint.weights_by_coding.items()
    ]
    rows += [
        (
            f"variant {each.footprint.unweight.variant}",
            f"decode step {each.decode.total_s * 1e3:.2f} ms, temp of decoding "
            f"{_gib(each.footprint.decoding_temp)}",
        )
        for each in map(chosen.decoded_by, own.variants())
    ]
    dense_least = found.min_gpus_dense or f"none of up to {MAX_GPUS}"
    rows.append(
        (
            "dense weights",
            f"{dense_least} GPUs at least; here {'they fit' if dense.fits else 'too large'}, "
            f"{dense.kv_tokens_left:,} tokens left, decode step {decode_ms:.2f} ms",
        )
    )
    console.print_table(f"Unweight {own.form}, decoded by {own.variant}", rows)


def _print_times(found: Fitting) -> None:
    load = found.load
    print(f"least times, in ms (peaks of the {found.gpu.source})")
    names = ("weights", "kv", "flops", "links", "bubble", "total")
    print(f"  {'':<26}" + "".join(f"{name:>9}" for name in names) + f"{'tokens/s':>12}  bound by")
    for name, time in (
        (f"prefill of {found.prefill.tokens:,} tokens", found.prefill),
        (f"decode step of {load.rows} rows", found.decode),
    ):
        rate = f"{time.tokens_per_s:12,.0f}"
        bubble = f"bubble {time.bubble_fraction:.0%}"
        print(f"  {name:<26}{_terms(time)}{rate}  {time.bound}, {bubble}")
    for name, time in (("prefill", found.prefill), ("decode", found.decode)):
        tick = time.tick
        print(
            f"  {name}: {time.microbatches} x (weights {console.size_text(tick.weight_bytes)}, "
            f"KV {console.size_text(tick.kv_bytes)}, {tick.flops / 1e9:,.1f} GFLOP, "
            f"{console.size_text(tick.link_bytes)} over {found.gpu.link}) on each device"
        )


def _terms(time: PhaseTime) -> str:
    terms = (time.weights_s, time.kv_s, time.flops_s, time.link_s, time.bubble_s, time.total_s)
    return "".join(f"{term * 1e3:9.3f}" for term in terms)


def _print_layouts(candidates: tuple[Candidate, ...], chosen: Fitting | None) -> None:
    print("layouts (pipeline x tensor x expert)")
    for found in candidates:
        mark = "*" if found is chosen else " "
        head = f"{mark} {_layout_text(found):<8}"
        if not isinstance(found, Fitting) or not found.fits:
            print(f"{head} refused: {found.refusal}")
            continue
        print(
            f"{head} {_gib(found.kv_bytes_left)} left for KV, {found.kv_tokens_left:,} tokens, "
            f"prefill {found.prefill.tokens_per_s:,.0f} tokens/s, "
            f"decode {found.decode.total_s * 1e3:.2f} ms a step"
        )


def _layout_text(found: Candidate) -> str:
    split = " split" if found.latents == SPLIT else ""
    return "x".join(map(str, found.shape)) + split


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:,.2f} GiB"
