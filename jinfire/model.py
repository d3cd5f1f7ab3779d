"""A model without an engine: logits and hidden states of whole sequences."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import jax
import numpy as np

from jinfire.checkpoints import TensorSource, load_tokenizer, open_checkpoint, save
from jinfire.models.spec import abstract_tree
from jinfire.programs.forward import forward_program
from jinfire.programs.runtime import CompileLog, MeshModel
from jinfire.tokenizer import Tokenizer
from jinfire.unweight.policy import UnweightPolicy, as_policies
from jinfire.unweight.tensor import UnweightTensor
from jinfire.weights import Weight, parse_dtype
from sharding import Device, MeshSpec


class Model:
    """Full forward passes without a cache on one device, for parity and perplexity."""

    def __init__(
        self,
        source: TensorSource,
        tokenizer: Tokenizer | None = None,
        *,
        dtype: str = "float32",
        device: Device | None = None,
        unweight: str | UnweightPolicy | None = None,
    ) -> None:
        devices = [device or jax.devices()[0]]
        policy = as_policies(unweight).prefill
        self.config = source.config
        self.tokenizer = tokenizer
        self._model = MeshModel.load(
            source, MeshSpec(), devices, parse_dtype(dtype), CompileLog(), "weights", policy
        )
        self._forward = forward_program(self._model, hidden_states=False)
        self._forward_hidden = forward_program(self._model, hidden_states=True)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str = "float32",
        device: Device | None = None,
        unweight: str | UnweightPolicy | None = None,
    ) -> Self:
        """A model from a Hugging Face folder, a GGUF file or a stored folder.

        `unweight` holds bfloat16 weights compressed, in a variant or as a policy says.
        """
        tokenizer = load_tokenizer(path)
        source = open_checkpoint(path)
        try:
            return cls(source, tokenizer, dtype=dtype, device=device, unweight=unweight)
        finally:
            source.close()

    def params(self) -> dict[str, jax.Array]:
        """All weights by logical name, e.g. `layers.3.attention.query.weight`, decompressed."""
        tensors, specs = self._model.layout.tensors, abstract_tree(self.config)

        # On one device there is one stage, and a slot is a layer.
        def logical(name: str, weight: Weight) -> jax.Array:
            if isinstance(weight, UnweightTensor):
                array = _decompressed(weight)
            else:
                array = weight[0] if tensors[name].stacked else weight
            # A large vocabulary is padded to whole tiles.
            rows = specs[name].shape[0]
            return array if array.shape[0] == rows else array[:rows]

        return {name: logical(name, weight) for name, weight in self._model.params.items()}

    def save(self, path: str | Path) -> None:
        """Write a checkpoint folder (Orbax arrays, config, tokenizer) that `from_pretrained` reads.

        Raises: ValueError where the folder holds a checkpoint already.
        """
        save(path, self.config, self.params(), self.tokenizer)

    def logits(
        self, input_ids_BT: np.ndarray, lengths_B: Sequence[int] | np.ndarray | None = None
    ) -> np.ndarray:
        """Next-token logits at every position.

        Shapes: ids [B, T] -> float32 [B, T, V]. Rows are right-padded to `lengths_B`, and logits
        of the padding are 0.
        Raises: ValueError for ids outside the vocabulary, lengths outside 1 to T, or T over
        `config.max_position`.
        """
        ids_BT, lengths = self._checked(input_ids_BT, lengths_B)
        logits = np.array(self._forward(self._model.params, ids_BT)[0])
        logits[np.arange(ids_BT.shape[1])[None] >= lengths[:, None]] = 0
        return logits

    def hidden_states(self, input_ids_BT: np.ndarray) -> list[np.ndarray]:
        """The L + 1 residual streams, embeddings first, then the final norm's output.

        Shapes: ids [B, T] -> [B, T, D] each, in the model's dtype.
        """
        ids_BT, _ = self._checked(input_ids_BT, None)
        return [np.asarray(h) for h in self._forward_hidden(self._model.params, ids_BT)[1]]

    def perplexity(self, token_ids: Sequence[int]) -> float:
        """exp of the mean negative log-likelihood of every token but the first."""
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or ids.size < 2:
            raise ValueError(
                f"perplexity: expected a list of at least 2 tokens, got shape {ids.shape}"
            )
        logits = self.logits(ids[None])[0, :-1].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(logits, ids[1:, None].astype(np.int64), axis=-1)[:, 0]
        losses = np.log(np.exp(logits).sum(axis=-1)) - chosen
        return math.exp(losses.mean())

    def _checked(
        self, input_ids_BT: np.ndarray, lengths_B: Sequence[int] | np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray(input_ids_BT)
        if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"input_ids: expected integers [B, T], got {ids.dtype} {ids.shape}")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(
                f"input_ids: expected ids in [0, {self.config.vocab_size}), got "
                f"{ids.min()} to {ids.max()}"
            )
        rows, length = ids.shape
        if length > self.config.max_position:
            raise ValueError(
                f"input_ids: expected at most max_position={self.config.max_position} tokens, "
                f"got {length}"
            )
        lengths = np.full(rows, length) if lengths_B is None else np.asarray(lengths_B)
        integers = np.issubdtype(lengths.dtype, np.integer) and lengths.shape == (rows,)
        if not integers or lengths.min() < 1 or lengths.max() > length:
            raise ValueError(f"lengths: expected integers [{rows}] in 1 to {length}, got {lengths}")
        return ids.astype(np.int32), lengths


@jax.jit
def _decompressed(weight: UnweightTensor) -> jax.Array:
    return weight.local().dense()
