"""`jinfire demo`: prompts answered by prefill and decode on separate meshes, and the proof.

The proof is the same prompts on one device, greedy in float32: every token has to be the same.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax

from jinfire.cli import console, options
from jinfire.cli.running import events_of, output_json
from jinfire.config import EngineConfig, Placement
from jinfire.engine import Engine
from jinfire.metrics import summary
from jinfire.progress import items_bar
from jinfire.request import FinishReason, RequestOutput, SamplingParams, TokenEvent

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Name the three primary colors.",
    "Give me three tips for a good night's sleep.",
    "What do bees make?",
)

# SmolLM2 has 9 query heads and 3 kv heads, and an MLP of 1536, so a tensor axis of 1 or 3.
PREFILL, DECODE = (2, 3), (2, 1)
PROMPT_CHUNK = 64
EXAMPLES = """\
examples:
  jinfire demo
  jinfire demo --prefill 1x1 --decode 3x1
  jinfire demo --model CHECKPOINT --prefill 2x2 --decode 1x4 --json
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="answers questions on two meshes and checks the tokens",
        description="Answer a few questions with prefill and decode on disjoint meshes of virtual "
        f"CPU devices (prefill {_text(PREFILL)} and decode {_text(DECODE)} if not given), then "
        "compare every token with a run on one device. Exit code 1 where they differ or a request "
        "fails.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    options.add_engine(parser, max_rows=str(_max_rows()), dtype=False)
    parser.set_defaults(dtype="float32", max_context=256)
    parser.add_argument(
        "--max-tokens", type=options.positive, default=40, metavar="N", help="most new tokens"
    )
    options.add_output(parser)


def run(args: argparse.Namespace) -> int:
    path = options.model_path(args)
    where = _placement(args)
    args.devices = args.devices or where.num_devices
    config = options.engine_config(
        args,
        max_rows=_max_rows(),
        prefill_shapes=((1, PROMPT_CHUNK),),
        row_buckets=(),
        context_buckets=(),
    )
    options.prepare_jax(args, where)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    if not args.json:
        print(f"{path.name} on {args.devices} virtual CPU devices: {where}\n", flush=True)
    options.note_start(path.name)
    split = _measure(path, where, config, params, None if args.json else Screen())
    options.note_start("the same on one device")
    single = _measure(path, Placement.colocated((1, 1)), config, params, None)
    document = _document(args, path, where, split, single)
    if args.json:
        console.print_json(document)
    else:
        _print(document)
    _print_errors(document)
    if not args.json:
        answer = "no"
        if document["tokens_identical"]:
            answer = f"yes, all {document['tokens_compared']}"
        print(f"\ntokens identical to the single-device run: {answer}")
    return console.OK if document["tokens_identical"] else console.FAILED


def _max_rows() -> int:
    return len(QUESTIONS) + len(QUESTIONS) % 2  # two microbatches of equal size


def _placement(args: argparse.Namespace) -> Placement:
    if args.colocated is None and args.prefill is None and args.decode is None:
        args.prefill, args.decode = PREFILL, DECODE
    return options.placement(args)


class Screen:
    """Answers in the order of their questions, although all are under way at once.

    One answer is shown as it grows. When it ends, the next follows with what it has so far.
    """

    def __init__(self) -> None:
        self._questions: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._ended: set[str] = set()
        self._waiting: list[str] = []

    def begin(self, request_id: str, question: str) -> None:
        self._questions[request_id] = question
        self._texts[request_id] = ""
        self._waiting.append(request_id)
        if len(self._waiting) == 1:
            self._show_next()

    def add(self, event: TokenEvent) -> None:
        text = event.text
        if event.finish_reason is not None:
            self._ended.add(event.request_id)
            text += " ..." if event.finish_reason is FinishReason.LENGTH else ""
        self._texts[event.request_id] += text
        if event.request_id != self._waiting[0]:
            return
        print(text, end="", flush=True)
        while self._waiting and self._waiting[0] in self._ended:
            self._waiting.pop(0)
            print("\n", flush=True)
            if self._waiting:
                self._show_next()

    def _show_next(self) -> None:
        request_id = self._waiting[0]
        print(f"> {self._questions[request_id]}\n{self._texts[request_id]}", end="", flush=True)


@dataclasses.dataclass
class Measurement:
    """What one engine did with the questions. Times and counts without `stats` are of serving."""

    outputs: list[RequestOutput]
    serve_s: float
    host_s: float
    wait_s: float
    compiled_while_serving: int
    stats: dict[str, Any]

    @property
    def host_share(self) -> float:
        """Part of the serving time that the host worked and did not wait for devices."""
        return self.host_s / (self.host_s + self.wait_s)

    def p50(self, name: str) -> float:
        return summary([output.metrics for output in self.outputs])[name].percentiles[50].value  # type: ignore[misc]


def _measure(
    path: Path,
    where: Placement,
    config: EngineConfig,
    params: SamplingParams,
    screen: Screen | None,
) -> Measurement:
    devices = jax.devices()[: where.num_devices]
    engine = Engine.from_pretrained(
        path, placement=where, config=config, devices=devices, warmup=True
    )
    prompts = [_prompt(engine, question) for question in QUESTIONS]
    before, start_s = engine.stats(), time.perf_counter()
    bar = None if screen else items_bar("answer", len(prompts), "request")
    request_ids = [engine.submit(prompt, params) for prompt in prompts]
    if screen:
        for request_id, question in zip(request_ids, QUESTIONS, strict=True):
            screen.begin(request_id, question)
    for event in events_of(engine, request_ids):
        if screen:
            screen.add(event)
        elif bar is not None and event.finish_reason is not None:
            bar.update()
    serve_s, after = time.perf_counter() - start_s, engine.stats()
    if bar is not None:
        bar.close()
    return Measurement(
        outputs=[engine.pop_output(request_id) for request_id in request_ids],
        serve_s=serve_s,
        host_s=after["host_seconds"] - before["host_seconds"],
        wait_s=after["wait_seconds"] - before["wait_seconds"],
        compiled_while_serving=after["compile_count"] - before["compile_count"],
        stats=after,
    )


def _prompt(engine: Engine, question: str) -> list[int]:
    if engine.tokenizer is None or engine.tokenizer.chat_template is None:
        raise console.UsageError("demo: expected a model with a tokenizer and a chat template")
    text = engine.tokenizer.render_chat([{"role": "user", "content": question}])
    return engine.tokenizer.encode(text, add_special=False)


def _document(
    args: argparse.Namespace,
    path: Path,
    where: Placement,
    split: Measurement,
    single: Measurement,
) -> dict[str, Any]:
    pairs = list(zip(split.outputs, single.outputs, strict=True))
    differing = [i for i, (a, b) in enumerate(pairs) if a.token_ids != b.token_ids]
    failed = [
        {"question": question, "run": run, "error": console.error_json(output.error)}
        for run, measured in (("placement", split), ("single_device", single))
        for question, output in zip(QUESTIONS, measured.outputs, strict=True)
        if output.finish_reason is FinishReason.ERROR
    ]
    compared = sum(len(output.token_ids) for output in split.outputs)
    return {
        "command": "demo",
        "model": path,
        "placement": str(where),
        "devices": {
            "total": args.devices,
            "prefill": where.prefill.size,
            "decode": where.decode_spec.size,
        },
        "requests": [
            {"question": question, **output_json(output)}
            for question, output in zip(QUESTIONS, split.outputs, strict=True)
        ],
        "kv_bytes_transferred": split.stats["kv_bytes_transferred"],
        "kv_bytes_sent": split.stats["kv_bytes_sent"],
        "bubble_fraction": split.stats["bubble_fraction"],
        **_times(split),
        "single_device": _times(single),
        "tokens_compared": compared,
        "tokens_identical": compared > 0 and not differing and not failed,
        "failed_requests": failed,
        "differing_requests": [
            {
                "question": QUESTIONS[i],
                "token_ids": pairs[i][0].token_ids,
                "single_device_token_ids": pairs[i][1].token_ids,
            }
            for i in differing
        ],
    }


def _times(measured: Measurement) -> dict[str, Any]:
    return {
        "ttft_p50_s": measured.p50("ttft_s"),
        "time_per_token_p50_s": measured.p50("tpot_s"),
        "serve_s": measured.serve_s,
        "host_share": measured.host_share,
        "compile_s": measured.stats["compile_seconds"],
        "compile_count": measured.stats["compile_count"],
        "compiled_while_serving": measured.compiled_while_serving,
    }


def _print(document: dict[str, Any]) -> None:
    devices, single = document["devices"], document["single_device"]
    requests = document["requests"]
    prompt_tokens = sum(len(request["prompt_ids"]) for request in requests)
    if devices["total"] == devices["prefill"]:
        split = "for both phases"
    else:
        split = f"{devices['prefill']} for prefill, {devices['decode']} for decode"
    kv_bytes, bubbles = document["kv_bytes_transferred"], document["bubble_fraction"].items()
    sent = document["kv_bytes_sent"]
    coded = "" if sent == kv_bytes else f", sent in {console.size_text(sent)}"
    console.print_table(
        "",
        [
            ("placement", document["placement"]),
            ("devices", f"{devices['total']} virtual CPU devices, {split}"),
            (
                "requests",
                f"{len(requests)} at once, {prompt_tokens} prompt tokens, "
                f"{document['tokens_compared']} new tokens in {document['serve_s']:.1f} s",
            ),
            (
                "time to first token",
                f"{console.time_text(document['ttft_p50_s'])} p50 "
                f"(one device: {console.time_text(single['ttft_p50_s'])})",
            ),
            (
                "time per token",
                f"{console.time_text(document['time_per_token_p50_s'])} p50 "
                f"(one device: {console.time_text(single['time_per_token_p50_s'])})",
            ),
            ("KV handed over", f"{console.size_text(kv_bytes)} ({kv_bytes:,} bytes){coded}"),
            (
                "idle stage time (bubble)",
                ", ".join(f"{phase} {console.percent_text(part)}" for phase, part in bubbles),
            ),
            ("host work", f"{console.percent_text(document['host_share'], 1)} of serving time"),
            (
                "compile",
                f"{document['compile_s']:.1f} s for {document['compile_count']} programs, before "
                f"serving (one device: {single['compile_s']:.1f} s)",
            ),
        ],
    )
    print(
        "\nThe virtual devices share the machine's cores, so these times check the plumbing and "
        "are no speed result."
    )


def _print_errors(document: dict[str, Any]) -> None:
    for failure in document["failed_requests"]:
        where = " (one device)" if failure["run"] == "single_device" else ""
        error = failure["error"] or {"type": "error", "message": "the request failed"}
        console.print_error(f"{failure['question']}{where}: {error['type']}: {error['message']}")
    if not document["tokens_compared"]:
        console.print_error("no tokens to compare")
    for difference in document["differing_requests"]:
        ours, theirs = difference["token_ids"], difference["single_device_token_ids"]
        same = [a == b for a, b in zip(ours, theirs, strict=False)]
        first = same.index(False) if False in same else len(same)
        console.print_error(f"{difference['question']}: tokens differ from number {first} on")


def _text(sizes: tuple[int, int]) -> str:
    return "x".join(map(str, sizes))
