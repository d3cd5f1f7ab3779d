"""`jinfire chat`: a conversation in the terminal, or scripted with `--message`."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from jinfire.cli import console, options
from jinfire.cli.running import event_json, events_of, held_interrupts
from jinfire.engine import Engine
from jinfire.request import FinishReason, RequestOutput, SamplingParams, TokenEvent
from jinfire.tokenizer import Tokenizer

try:
    import readline  # noqa: F401  (gives `input` its line editing and history)
except ImportError:  # not on every platform
    pass

EXAMPLES = """\
examples:
  jinfire chat
  jinfire chat --system "Answer in one sentence." --temperature 0
  jinfire chat --message "What is a prime number?" --message "Name three." --json

In the conversation: /reset forgets it, /quit or Ctrl-D ends, Ctrl-C stops the answer.
"""
HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


@dataclasses.dataclass
class Turn:
    """One message with its answer."""

    message: str
    output: RequestOutput


def with_template(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, if it can render a conversation."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise console.UsageError(
            "this checkpoint has no tokenizer with a chat template; use `jinfire generate`"
        )
    return tokenizer


class Conversation:
    """A message history on an engine.

    Every turn sends the whole history; the prefix cache has the pages of what came before.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None) -> None:
        self._tokenizer = with_template(engine.tokenizer)
        self._engine = engine
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._system)

    def ask(self, message: str, show: Callable[[TokenEvent], None]) -> Turn:
        """The answer to a message. Ctrl-C ends it early; what came until then is kept.

        An answer that the engine ended as an error leaves the history as it was before.
        Raises: ValueError, and the history is as before, when the request is refused.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        prompt = self._tokenizer.encode(self._tokenizer.render_chat(messages), add_special=False)
        request_id = self._engine.submit(prompt, self._params)
        with held_interrupts() as interrupted:
            for event in events_of(self._engine, {request_id}, stop=interrupted):
                show(event)
        output = self._engine.pop_output(request_id)
        if output.finish_reason is not FinishReason.ERROR:
            self.messages = [*messages, {"role": "assistant", "content": output.text}]
        return Turn(message, output)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model, in the terminal, from a pipe (a message a line) or with "
        "--message.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--message",
        action="append",
        default=[],
        metavar="TEXT",
        help="say this, print the answer and end; repeatable, one turn each",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    options.add_engine(parser, max_rows="1")
    options.add_sampling(parser, max_tokens=256, temperature=0.2, top_p=0.9)
    options.add_output(parser)


def run(args: argparse.Namespace) -> int:
    params = options.sampling_params(args)
    config = options.engine_config(args, max_rows=1)
    engine = options.load_engine(args, config, check=with_template)
    conversation = Conversation(engine, params, args.system)
    if args.message:
        code, turns = _scripted(args, conversation, args.message)
    elif sys.stdin.isatty():
        code, turns = _interactive(args, conversation)
    else:
        lines = (line.strip() for line in sys.stdin)
        code, turns = _scripted(args, conversation, [line for line in lines if line])
    if args.json:
        documents = [_turn_json(turn) for turn in turns]
        document = {"command": "chat", "turns": documents, "messages": conversation.messages}
        console.print_json({**document, "stats": engine.stats()})
    return code


def _scripted(
    args: argparse.Namespace, conversation: Conversation, messages: list[str]
) -> tuple[int, list[Turn]]:
    turns = []
    for message in messages:
        if len(messages) > 1 and not args.json:
            print(f"> {message}")
        try:
            turn = conversation.ask(message, _shower(args, len(turns)))
        except ValueError as error:
            console.print_error(f"{type(error).__name__}: {error}")
            return console.FAILED, turns
        turns.append(turn)
        if _failed(turn):
            return console.FAILED, turns
        if turn.output.finish_reason is FinishReason.ABORT:
            return console.INTERRUPTED, turns
    return console.OK, turns


def _interactive(args: argparse.Namespace, conversation: Conversation) -> tuple[int, list[Turn]]:
    turns: list[Turn] = []
    code = console.OK
    console.print_note(HELP)
    while True:
        try:
            message = input("> ").strip()
        except EOFError:
            console.print_note("")
            return code, turns
        except KeyboardInterrupt:
            console.print_note("\n(/quit or Ctrl-D ends)")
            continue
        if message in ("/quit", "/exit"):
            return code, turns
        if message == "/reset":
            conversation.reset()
        elif message.startswith("/"):
            console.print_note(HELP)
        elif message:
            try:
                turn = conversation.ask(message, _shower(args, len(turns)))
            except ValueError as error:
                console.print_error(f"{type(error).__name__}: {error} (/reset starts anew)")
                continue
            turns.append(turn)
            if _failed(turn):
                code = console.FAILED
            else:
                console.print_note(f"({_cost(turn.output)})")


def _failed(turn: Turn) -> bool:
    """Whether the engine ended the answer as an error, which is reported."""
    if turn.output.finish_reason is not FinishReason.ERROR:
        return False
    error = turn.output.error
    console.print_error(f"{type(error).__name__}: {error}" if error else "the request failed")
    return True


def _shower(args: argparse.Namespace, turn: int) -> Callable[[TokenEvent], None]:
    def show(event: TokenEvent) -> None:
        if args.json:
            console.print_json(event_json(event, turn=turn))
        else:
            print(event.text, end="" if event.finish_reason is None else "\n", flush=True)

    return show


def _cost(output: RequestOutput) -> str:
    metrics: Any = output.metrics
    text = (
        f"{metrics.output_tokens} tokens, the first after {console.time_text(metrics.ttft_s)}, "
        f"then {console.time_text(metrics.tpot_s)} each; {metrics.cached_tokens} of "
        f"{metrics.prompt_tokens} prompt tokens were in the cache"
    )
    endings = {FinishReason.ABORT: "; stopped", FinishReason.LENGTH: "; cut at the token limit"}
    return text + endings.get(output.finish_reason, "") if output.finish_reason else text


def _turn_json(turn: Turn) -> dict[str, Any]:
    output = turn.output
    return {
        "message": turn.message,
        "text": output.text,
        "prompt_ids": output.prompt_ids,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "error": console.error_json(output.error),
        "metrics": output.metrics,
    }
