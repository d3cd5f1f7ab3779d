"""Text to token ids and back, and chat templates.

The byte-pair arithmetic is the `tokenizers` library's; this module finds out which tokenizer a
checkpoint means, from `tokenizer.json` or from the metadata of a GGUF file.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jinfire.errors import CheckpointMismatch, UnsupportedConfig
from jinfire.template import RENDER_TIMEOUT_S, render

MAX_FILE_BYTES = 512 * 2**20

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"

# Token types of `tokenizer.ggml.token_type`.
GGUF_CONTROL, GGUF_USER_DEFINED = 3, 4


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    isolated = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([isolated, _byte_level(use_regex=False)])


def _cl100k_pattern(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# Values of `tokenizer.ggml.pre`: pre-tokenizer, whether a whole word that is a token skips the
# merges, whether a start token is added where the file does not say.
# Source: llama.cpp `llama-vocab.cpp`; the tokenizer.json files of the models.
GGUF_PRE_TOKENIZERS: dict[str, tuple[Callable[[], pre_tokenizers.PreTokenizer], bool, bool]] = {
    "smollm": (
        lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
        ),
        False,
        False,
    ),
    "gpt-2": (lambda: _byte_level(use_regex=True), False, False),
    "llama-bpe": (lambda: _split(_cl100k_pattern(r"\p{N}{1,3}")), True, True),
    "qwen2": (lambda: _split(_cl100k_pattern(r"\p{N}")), False, False),
}
# Qwen normalises to composed characters in its tokenizer.json; llama.cpp leaves that out.
GGUF_NFC = frozenset({"qwen2"})


class Tokenizer:
    """A checkpoint's tokenizer with its special tokens and chat template."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        bos_id: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        render_timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        # Cutting or padding is for training batches; a prompt is never cut in silence.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.chat_template = chat_template
        self.render_timeout_s = render_timeout_s

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """The tokenizer of a Hugging Face folder.

        Raises: CheckpointMismatch for files that cannot be read.
        """
        path = folder / TOKENIZER_NAME
        try:
            inner = tokenizers.Tokenizer.from_str(_read_text(path))
        except CheckpointMismatch:
            raise
        except Exception as error:  # the library raises bare `Exception`
            raise CheckpointMismatch(f"{path}: not a tokenizer ({error})") from error
        config: Any = {}
        if (folder / TOKENIZER_CONFIG_NAME).exists():
            try:
                config = json.loads(_read_text(folder / TOKENIZER_CONFIG_NAME))
            except (ValueError, RecursionError) as error:
                raise CheckpointMismatch(f"{folder / TOKENIZER_CONFIG_NAME}: {error}") from error
            if not isinstance(config, dict):
                raise CheckpointMismatch(f"{folder / TOKENIZER_CONFIG_NAME}: expected an object")
        template = _config_template(config.get("chat_template"))
        if (folder / TEMPLATE_NAME).exists():
            template = _read_text(folder / TEMPLATE_NAME)
        eos_id = _special_id(inner, config.get("eos_token"))
        return cls(
            inner,
            bos_id=_special_id(inner, config.get("bos_token")),
            eos_ids=frozenset() if eos_id is None else frozenset({eos_id}),
            chat_template=template,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """The tokenizer in a GGUF file's metadata.

        Raises: UnsupportedConfig naming the kind of tokenizer; CheckpointMismatch where the
        tables do not fit each other.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise UnsupportedConfig(f"tokenizer.ggml.model: expected 'gpt2', got {kind!r}")
        pre = metadata.get("tokenizer.ggml.pre")
        if not isinstance(pre, str) or pre not in GGUF_PRE_TOKENIZERS:
            raise UnsupportedConfig(
                f"tokenizer.ggml.pre: expected one of {sorted(GGUF_PRE_TOKENIZERS)}, got {pre!r}"
            )
        make_pre_tokenizer, skip_merges, adds_bos = GGUF_PRE_TOKENIZERS[pre]
        tokens, types, merges = _gguf_tables(metadata)
        inner = tokenizers.Tokenizer(
            models.BPE(
                vocab={token: i for i, token in enumerate(tokens)},
                merges=merges,
                ignore_merges=skip_merges,
            )
        )
        if pre in GGUF_NFC:
            inner.normalizer = normalizers.NFC()
        inner.pre_tokenizer = make_pre_tokenizer()
        inner.decoder = decoders.ByteLevel()
        for kind, is_special in ((GGUF_CONTROL, True), (GGUF_USER_DEFINED, False)):
            added = [
                AddedToken(token, normalized=False, special=is_special)
                for token, token_type in zip(tokens, types, strict=True)
                if token_type == kind
            ]
            inner.add_special_tokens(added) if is_special else inner.add_tokens(added)

        bos_id = _gguf_id(metadata, "bos", len(tokens))
        ends = [_gguf_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
        if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos_id is not None:
            bos = tokens[bos_id]
            inner.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=None, special_tokens=[(bos, bos_id)]
            )
        template = metadata.get("tokenizer.chat_template")
        return cls(
            inner,
            bos_id=bos_id,
            eos_ids=frozenset(i for i in ends if i is not None),
            chat_template=template if isinstance(template, str) else None,
        )

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows; a model's vocabulary may be padded beyond it."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special` adds what the checkpoint puts around a prompt.

        Special tokens written out in `text` are recognised, as chat templates need.

        Raises: ValueError for text with lone surrogates.
        """
        try:
            return self._inner.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"prompt: expected valid Unicode text, got {text[:40]!r}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens; unfinished UTF-8 gives U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """The stored form of one token, e.g. `<|im_end|>`; None outside the vocabulary."""
        return self._inner.id_to_token(token_id)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation; encode it with `add_special=False`.

        Messages and variables are JSON values.

        Raises: ValueError where there is no template, or the template refuses, fails, or takes
        more time or memory than `jinfire/template.py` allows.
        """
        if self.chat_template is None:
            raise ValueError("chat: this checkpoint has no chat template")
        known: dict[str, Any] = {}
        if self.bos_id is not None:
            known["bos_token"] = self.token(self.bos_id)
        if len(self.eos_ids) == 1:
            known["eos_token"] = self.token(next(iter(self.eos_ids)))
        variables = {**known, **variables, "messages": [dict(m) for m in messages]}
        variables["add_generation_prompt"] = add_generation_prompt
        return render(self.chat_template, variables, self.render_timeout_s)

    def save(self, folder: Path) -> None:
        """The tokenizer as the files that `from_folder` reads."""
        (folder / TOKENIZER_NAME).write_text(self._inner.to_str(), encoding="utf-8")
        config: dict[str, Any] = {}
        if self.bos_id is not None:
            config["bos_token"] = self.token(self.bos_id)
        if self.eos_ids:
            config["eos_token"] = self.token(min(self.eos_ids))
        content = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
        (folder / TOKENIZER_CONFIG_NAME).write_text(content, encoding="utf-8")
        if self.chat_template is not None:
            (folder / TEMPLATE_NAME).write_text(self.chat_template, encoding="utf-8", newline="")


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointMismatch(f"{path}: more than {MAX_FILE_BYTES} bytes")
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointMismatch(f"{path}: cannot be read ({error})") from error


def _special_id(inner: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of a special token given as text or as `{"content": text}`."""
    text = token.get("content") if isinstance(token, dict) else token
    return inner.token_to_id(text) if isinstance(text, str) else None


def _config_template(template: Any) -> str | None:
    """The default template; old configs list several by name."""
    if isinstance(template, list):
        defaults = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    return template if isinstance(template, str) else None


def _gguf_tables(
    metadata: Mapping[str, Any],
) -> tuple[list[str], list[int], list[tuple[str, str]]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(types, list) or not isinstance(merges, list):
        raise CheckpointMismatch("tokenizer.ggml: expected tokens, token_type and merges")
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointMismatch(
            f"tokenizer.ggml: expected distinct tokens with one type each, got {len(tokens)} "
            f"tokens ({len(set(tokens))} distinct) and {len(types)} types"
        )
    known, pairs = set(tokens), []
    for merge in merges:
        pair = tuple(str(merge).split(" "))
        if len(pair) != 2 or not {*pair, "".join(pair)} <= known:
            raise CheckpointMismatch(f"tokenizer.ggml.merges: {merge!r} joins unknown tokens")
        pairs.append(pair)
    return tokens, types, pairs


def _gguf_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < num_tokens):
        raise CheckpointMismatch(
            f"tokenizer.ggml.{name}_token_id: expected an id below {num_tokens}, got {token_id!r}"
        )
    return token_id
