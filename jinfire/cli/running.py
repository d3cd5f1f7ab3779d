"""Requests driven through an engine, and Ctrl-C while they run."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinfire.cli.console import error_json
from jinfire.engine import Engine
from jinfire.request import RequestOutput, TokenEvent


def events_of(
    engine: Engine, request_ids: Iterable[str], stop: Callable[[], bool] = lambda: False
) -> Iterator[TokenEvent]:
    """Events of these requests as they come, until all of them have ended.

    They are aborted once `stop` says so, which is asked between steps.
    """
    left = set(request_ids)
    while left:
        if stop():
            for request_id in left:
                engine.abort(request_id)  # its last event comes with the next step
        for event in engine.step():
            if event.request_id not in left:
                continue
            if event.finish_reason is not None:
                left.discard(event.request_id)
            yield event


@contextlib.contextmanager
def held_interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, asked between steps: an engine is not left halfway.

    The second press is a KeyboardInterrupt as always, for a step that takes long.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set  # signals go to the main thread
        return

    def handle(number: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def event_json(event: TokenEvent, **where: Any) -> dict[str, Any]:
    """One streamed token as a JSON line."""
    return {
        "event": "token",
        **where,
        "index": event.index,
        "token_id": event.token_id,
        "text": event.text,
        "finish_reason": event.finish_reason,
        "logprobs": event.logprobs,
    }


def output_json(output: RequestOutput) -> dict[str, Any]:
    """One finished request for a JSON document."""
    return {
        "request_id": output.request_id,
        "prompt_ids": output.prompt_ids,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "error": error_json(output.error),
        "logprobs": output.logprobs,
        "metrics": output.metrics,
    }
