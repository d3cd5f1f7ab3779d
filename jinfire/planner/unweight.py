"""What weights take in the lossless forms of Unweight, and what decoding them moves and needs.

Bits per weight are measured, not bounds: format and index included, on the weights that `SOURCES`
names. A model of other weights may differ by some hundredths.
"""

import dataclasses
from typing import Self

from jinfire.layout import OPERANDS
from jinfire.unweight.policy import VARIANTS

BFLOAT16_BITS = 16

# Classes of tensors by how they are coded; any other tensor stays as it is.
WEIGHTS, CODES, SCALES = "weights", "int4_codes", "int4_scales"
PLAIN_BITS = {WEIGHTS: BFLOAT16_BITS, CODES: 4, SCALES: BFLOAT16_BITS}

# Kinds that stay dense: vectors, and what is multiplied in float32.
DENSE_KINDS = ("norms", "router")

SOURCES = {
    WEIGHTS: "all matrices of Whisper base and tiny.en, MiniLM-L6, SmolLM2-135M (dequantised) and "
    "stories260K as bfloat16: huffman 10.70 to 10.93, compact 11.30 to 11.48, palette 12.03 to "
    "12.15 with index and padding",
    CODES: "Huffman code of the 16 values of 4-bit groups, made from trained weights (a proxy)",
    SCALES: "Huffman code of the bfloat16 scales of those groups (a proxy)",
}

# Bits of a value by class of tensor; a class that is not named stays as it is. Kind: measured on
# the weights of `SOURCES`.
FORMS: dict[str, dict[str, float]] = {
    "huffman": {WEIGHTS: 10.75, CODES: 3.6, SCALES: 7.7},
    "palette": {WEIGHTS: 12.1},
    "compact": {WEIGHTS: 11.45},
}
NONE = "none"
NAMES = (NONE, *FORMS)


@dataclasses.dataclass(frozen=True)
class Unweight:
    """The form that weights lie in on the devices, and the variant that decodes them.

    Form "none" is dense. Weights that are operands of something else than a plain product, and
    4-bit codes with their scales, are decoded in full: no product takes them coded.
    """

    form: str = NONE
    variant: str = NONE

    @classmethod
    def of(cls, form: str) -> Self:
        """The form with the variant that moves least. Raises: ValueError listing the forms."""
        if form not in NAMES:
            raise ValueError(f"unweight: expected one of {', '.join(NAMES)}, got {form!r}")
        if form == NONE:
            return cls()
        return min(cls(form).variants(), key=lambda each: VARIANTS[each.variant].written)

    def variants(self) -> tuple[Self, ...]:
        """The form with each of its variants."""
        return tuple(
            dataclasses.replace(self, variant=name)
            for name, variant in VARIANTS.items()
            if variant.form == self.form
        )

    def share(self, kind: str, itemsize: int) -> float:
        """Bytes of a coded tensor of a class over its plain ones; 1 where it stays as it is.

        The low halves of float32 weights are stored as they are.
        """
        bits = FORMS.get(self.form, {}).get(kind)
        if bits is None:
            return 1.0
        plain = 8 * itemsize if kind == WEIGHTS else PLAIN_BITS[kind]
        low = plain - PLAIN_BITS[kind]
        return (bits + low) / plain

    def temp_share(self, kind: str, projection: str) -> float:
        """What decoding a tensor of a class writes to memory over its plain bytes."""
        if kind not in FORMS.get(self.form, {}):
            return 0.0
        in_full = kind != WEIGHTS or projection in OPERANDS
        return 1.0 if in_full else VARIANTS[self.variant].written

    def moved_share(self, kind: str, projection: str, itemsize: int) -> float:
        """Bytes that one use of a tensor reads and writes over its plain ones."""
        return self.share(kind, itemsize) + 2 * self.temp_share(kind, projection)


DENSE = Unweight()
