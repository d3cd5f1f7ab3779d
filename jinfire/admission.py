"""What a caller hands in, checked and completed into a `Request`."""

import numpy as np

from jinfire.checks import as_integer, as_items
from jinfire.config import ModelConfig
from jinfire.errors import EmptyPrompt, UnknownToken
from jinfire.request import Prompt, Request, SamplingParams, as_params
from jinfire.tokenizer import Tokenizer


class Admission:
    """Turns prompts and parameters into requests of one model.

    Seeds that the caller leaves open are drawn here, in order of submission.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, seed: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._seeds = np.random.default_rng(seed)

    def request(self, prompt: Prompt, params: SamplingParams, request_id: str) -> Request:
        """The request of one prompt.

        Raises: EmptyPrompt, UnknownToken, or ValueError for a prompt or parameters of another kind
        and for text where there is no tokenizer.
        """
        (params,) = as_params(params, 1)
        ids = self._token_ids(prompt, request_id)
        if params.stop and self._tokenizer is None:
            raise ValueError("stop: expected none, because this checkpoint has no tokenizer")
        vocab = self._config.vocab_size
        for name, values in (("prompt", ids), ("stop_token_ids", params.stop_token_ids)):
            unknown = next((token for token in values if not 0 <= token < vocab), None)
            if unknown is not None:
                raise UnknownToken(
                    f"request {request_id!r}: {name} expected token ids in [0, {vocab}), "
                    f"got {unknown}"
                )
        seed = int(self._seeds.integers(2**32)) if params.seed is None else params.seed
        eos_ids: frozenset[int] = frozenset()
        if not params.ignore_eos:
            known = () if self._tokenizer is None else self._tokenizer.eos_ids
            eos_ids = self._config.eos_ids | frozenset(known)
        return Request(request_id, ids, params, seed, eos_ids)

    def _token_ids(self, prompt: Prompt, request_id: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError(
                    "prompt: expected token ids, got text, and this checkpoint has no tokenizer"
                )
            prompt = self._tokenizer.encode(prompt)
        try:
            ids = tuple(as_integer(token) for token in as_items(prompt))
        except TypeError:
            raise ValueError(
                f"request {request_id!r}: prompt expected text or token ids, got {prompt!r:.80}"
            ) from None
        if not ids:
            raise EmptyPrompt(f"request {request_id!r}: expected at least one prompt token")
        return ids
