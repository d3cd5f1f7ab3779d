"""Text out of tokens as they come: unfinished characters and stop strings are held back."""

from collections.abc import Callable, Sequence

# After this many tokens without a clean character border the bytes are taken to be invalid. A
# UTF-8 character has at most 4 bytes.
_MAX_PENDING = 16
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one request, released piece by piece.

    `decode` maps output token ids to text. `stop` strings end the text where the first one that
    is complete begins, however tokens cut it; what may become a stop string is held back.

    Only a short window is decoded per token: the tokens that made the last piece, as context (a
    decoder may drop a leading space or join bytes), and those since.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop: expected a sequence of non-empty strings, got {stop!r}")
        self.stopped = False
        self._decode = decode
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._window: list[int] = []
        self._context = 0  # window tokens whose text is out
        self._emitted = 0  # window characters whose text is out
        self._held = ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """The text that this token made printable; empty after a stop string."""
        if self.stopped:
            return ""
        self._window.append(token_id)
        return self._release(self._new_text(final=False), final=False)

    def flush(self) -> str:
        """What was held back, at the end of the request."""
        if self.stopped:
            return ""
        return self._release(self._new_text(final=True), final=True)

    def _new_text(self, final: bool) -> str:
        text = self._decode(self._window)
        pending = len(self._window) - self._context
        unfinished = text.endswith(_REPLACEMENT)
        forced = final or pending >= _MAX_PENDING
        stable = text.rstrip(_REPLACEMENT) if unfinished and not forced else text
        new = stable[self._emitted :]
        self._emitted = max(self._emitted, len(stable))
        if forced or (new and not unfinished):
            # The tokens of this piece are the context of the next.
            del self._window[: self._context]
            self._context = len(self._window)
            self._emitted = len(self._decode(self._window))
        return new

    def _release(self, new: str, final: bool) -> str:
        text = self._held + new
        cut = self._find_stop(text)
        if cut is not None:
            self.stopped = True
            out, self._held = text[:cut], ""
        else:
            keep = 0 if final else self._may_begin_stop(text)
            out, self._held = text[: len(text) - keep], text[len(text) - keep :]
        if out:
            self._pieces.append(out)
        return out

    def _find_stop(self, text: str) -> int | None:
        # The one that is complete first wins, so the cut does not depend on the token borders.
        found = [(text.find(stop), stop) for stop in self._stop]
        ends = [(start + len(stop), start) for start, stop in found if start >= 0]
        return min(ends)[1] if ends else None

    def _may_begin_stop(self, text: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        for length in range(min(len(text), self._longest_stop - 1), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
