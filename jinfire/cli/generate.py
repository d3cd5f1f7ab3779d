"""`jinfire generate`: prompts in, continuations out."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from jinfire.cli import console, options
from jinfire.cli.running import event_json, events_of, output_json
from jinfire.engine import Engine
from jinfire.progress import items_bar
from jinfire.request import FinishReason, RequestOutput, TokenEvent
from jinfire.tokenizer import Tokenizer

MAX_ROWS = 8
EXAMPLES = """\
examples:
  jinfire generate "The capital of France is" --temperature 0
  jinfire generate --chat "Name three primes." "Name three rivers." --temperature 0
  jinfire generate --prompts-file prompts.jsonl --temperature 0 --json > outputs.json
  echo "Once upon a time" | jinfire generate --temperature 0
  jinfire generate --model CHECKPOINT --token-ids "17 4 99" --temperature 0 --colocated 2x1

One prompt is streamed, several run as a batch. A prompt that is refused or fails is reported on
stderr, the others run, and the exit code is 1.
"""


@dataclasses.dataclass
class Job:
    """One prompt and what became of it: refused with `error`, or an output, maybe with `error`."""

    prompt: str | list[int]
    request_id: str | None = None
    output: RequestOutput | None = None
    error: Exception | None = None


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue prompts",
        description="Continue prompts, from arguments, a file or stdin.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    parser.add_argument(
        "--prompts-file",
        metavar="PATH",
        help='a prompt a line, or JSONL with {"prompt": text or token ids}; - is stdin, which is '
        "also read when no prompt is given",
    )
    parser.add_argument(
        "--token-ids",
        action="store_true",
        help='prompts are token ids such as "17 4 99", and so is what is printed',
    )
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    options.add_engine(parser, max_rows=f"the number of prompts, at most {MAX_ROWS}")
    options.add_sampling(parser, max_tokens=64)
    options.add_output(parser)


def run(args: argparse.Namespace) -> int:
    if args.token_ids and args.chat:
        raise console.FlagError("--chat: expected text prompts, got --token-ids")
    params = options.sampling_params(args)
    jobs = [Job(prompt) for prompt in _prompts(args)]
    config = options.engine_config(args, max_rows=min(len(jobs), MAX_ROWS))
    is_text = any(isinstance(job.prompt, str) for job in jobs)

    def check(tokenizer: Tokenizer | None) -> None:
        if tokenizer is None and is_text:
            raise console.UsageError("this checkpoint has no tokenizer: pass ids with --token-ids")

    engine = options.load_engine(args, config, check)
    for number, job in enumerate(jobs, 1):
        try:
            job.request_id = engine.submit(_encode(engine, job.prompt, args.chat), params)
        except ValueError as error:
            job.error = error
            _print_job_error(number, error)
    shown = Streamer(args) if len(jobs) == 1 else None
    _finish(engine, jobs, shown)
    for number, job in enumerate(jobs, 1):
        if job.output is not None and job.output.finish_reason is FinishReason.ERROR:
            job.error = job.output.error or RuntimeError("the request failed")
            _print_job_error(number, job.error)
    if args.json:
        documents = [_job_json(index, job) for index, job in enumerate(jobs)]
        document = {"command": "generate", "outputs": documents, "stats": engine.stats()}
        console.print_json(document)
    elif shown is None:
        _print_batch(args, jobs)
    return console.FAILED if any(job.error for job in jobs) else console.OK


def _finish(engine: Engine, jobs: Sequence[Job], shown: "Streamer | None") -> None:
    by_id = {job.request_id: job for job in jobs if job.request_id is not None}
    if not by_id:
        return
    bar = None if shown else items_bar("generate", len(by_id), "request")
    for event in events_of(engine, by_id):
        if shown:
            shown.show(event)
        if event.finish_reason is not None:
            by_id[event.request_id].output = engine.pop_output(event.request_id)
            if bar is not None:
                bar.update()
    if bar is not None:
        bar.close()


def _print_job_error(number: int, error: Exception) -> None:
    console.print_error(f"prompt {number}: {type(error).__name__}: {error}")


class Streamer:
    """The tokens of one request on stdout, as they come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._as_json, self._as_ids = args.json, args.token_ids

    def show(self, event: TokenEvent) -> None:
        if self._as_json:
            console.print_json(event_json(event, prompt=0))
            return
        if self._as_ids:
            separator = " " if event.index else ""
            text = "" if event.token_id is None else f"{separator}{event.token_id}"
        else:
            text = event.text
        print(text, end="" if event.finish_reason is None else "\n", flush=True)


def _print_batch(args: argparse.Namespace, jobs: Sequence[Job]) -> None:
    for number, job in enumerate(jobs, 1):
        if job.output is None:
            continue
        prompt = job.prompt if isinstance(job.prompt, str) else _ids_text(job.prompt)
        print(f"[{number}/{len(jobs)}] {prompt}")
        print(_ids_text(job.output.token_ids) if args.token_ids else job.output.text)
        print()


def _job_json(index: int, job: Job) -> dict[str, Any]:
    document = {"index": index, "prompt": job.prompt}
    if job.output is not None:
        return {**document, **output_json(job.output), "error": console.error_json(job.error)}
    refused = {"finish_reason": "error", "token_ids": [], "text": ""}
    return {**document, **refused, "error": console.error_json(job.error)}


def _encode(engine: Engine, prompt: str | list[int], chat: bool) -> str | list[int]:
    if not chat or not isinstance(prompt, str) or engine.tokenizer is None:
        return prompt
    text = engine.tokenizer.render_chat([{"role": "user", "content": prompt}])
    return engine.tokenizer.encode(text, add_special=False)


def _ids_text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


# Prompts.


def _prompts(args: argparse.Namespace) -> list[str | list[int]]:
    prompts: list[str | list[int]] = [
        _parse_ids(text, f"prompt {number}") if args.token_ids else text
        for number, text in enumerate(args.prompts, 1)
    ]
    if args.prompts_file is not None and args.prompts_file != "-":
        try:
            with open(args.prompts_file, encoding="utf-8") as file:
                prompts += _read_prompts(file, args.prompts_file, args.token_ids)
        except OSError as error:
            raise console.FlagError(f"--prompts-file: {error}") from error
    elif args.prompts_file == "-" or not (prompts or sys.stdin.isatty()):
        prompts += _read_prompts(sys.stdin, "stdin", args.token_ids)
    if not prompts:
        raise console.UsageError("no prompt: pass it as an argument, with --prompts-file or stdin")
    return prompts


def _read_prompts(file: TextIO, name: str, as_ids: bool) -> list[str | list[int]]:
    """Prompts of a file, one a line; JSONL where every line begins with a brace."""
    try:
        lines = [(number, line.rstrip("\r\n")) for number, line in enumerate(file, 1)]
    except UnicodeDecodeError as error:
        raise console.UsageError(f"{name}: expected UTF-8 text ({error})") from error
    lines = [(number, line) for number, line in lines if line.strip()]
    is_jsonl = name.endswith(".jsonl") or all(line.startswith("{") for _, line in lines)
    if is_jsonl:
        return [_from_json(line, f"{name}:{number}") for number, line in lines]
    if as_ids:
        return [_parse_ids(line, f"{name}:{number}") for number, line in lines]
    return [line for _, line in lines]


def _from_json(line: str, place: str) -> str | list[int]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise console.UsageError(f"{place}: not JSON ({error})") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise console.UsageError(f'{place}: expected {{"prompt": text or token ids}}')


def _parse_ids(text: str, place: str) -> list[int]:
    words = text.replace(",", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise console.UsageError(f"{place}: expected token ids, got {text!r}") from error
