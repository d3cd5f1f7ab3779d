"""What weights take in the lossless forms of Unweight, and what decoding them moves and needs.

Bits per weight are measured, not bounds: format and index included, on the weights that `SOURCES`
names. A model of other weights may differ by some hundredths.
"""

import dataclasses
from typing import Self

BFLOAT16_BITS = 16

# Classes of tensors by how they are coded; any other tensor stays as it is.
WEIGHTS, CODES, SCALES = "weights", "int4_codes", "int4_scales"
PLAIN_BITS = {WEIGHTS: BFLOAT16_BITS, CODES: 4, SCALES: BFLOAT16_BITS}

# Kinds that stay dense: vectors, and what is multiplied in float32.
DENSE_KINDS = ("norms", "router")

# Weights that are operands of something else than a plain product: decoded in full for it.
OPERANDS = ("attention.latent_up.weight",)

SOURCES = {
    WEIGHTS: "all matrices of Whisper base and tiny.en, MiniLM-L6, SmolLM2-135M (dequantised) and "
    "stories260K as bfloat16: huffman 10.70 to 10.93, compact 11.30 to 11.48, palette 12.03 to "
    "12.15 with index and padding",
    CODES: "Huffman code of the 16 values of 4-bit groups, made from trained weights (a proxy)",
    SCALES: "Huffman code of the bfloat16 scales of those groups (a proxy)",
}


@dataclasses.dataclass(frozen=True)
class Form:
    """One resident form. `bits` are those of a value by class of tensor; a class that is not
    named stays as it is. `temp` is what a variant of decoding writes to memory before a product
    reads it, as a share of the plain tensor.
    """

    bits: dict[str, float]
    temp: dict[str, float]

    def best(self) -> str:
        """The variant that moves least."""
        return min(self.temp, key=lambda variant: self.temp[variant])


# Kind: measured on the weights of `SOURCES`. Source of the variants: Cf-TR-2026.04.v1; those of
# "compact" are ours.
FORMS = {
    "huffman": Form(
        {WEIGHTS: 10.75, CODES: 3.6, SCALES: 7.7},
        {"full": 1, "exponent": 1 / 2, "transcode": 1 / 4},
    ),
    "palette": Form({WEIGHTS: 12.1}, {"full_palette": 1, "direct": 0}),
    "compact": Form({WEIGHTS: 11.45}, {"full_compact": 1, "compact": 0}),
}
NONE = "none"
NAMES = (NONE, *FORMS)


@dataclasses.dataclass(frozen=True)
class Unweight:
    """The form that weights lie in on the devices, and the variant that decodes them.

    Form "none" is dense. `OPERANDS`, and 4-bit codes with their scales, are decoded in full,
    whatever the variant: no product takes them coded.
    """

    form: str = NONE
    variant: str = NONE

    @classmethod
    def of(cls, form: str) -> Self:
        """The form with the variant that moves least. Raises: ValueError listing the forms."""
        if form not in NAMES:
            raise ValueError(f"unweight: expected one of {', '.join(NAMES)}, got {form!r}")
        return cls() if form == NONE else cls(form, FORMS[form].best())

    def variants(self) -> tuple[Self, ...]:
        """The form with each of its variants."""
        if self.form == NONE:
            return ()
        return tuple(dataclasses.replace(self, variant=name) for name in FORMS[self.form].temp)

    def share(self, kind: str, itemsize: int) -> float:
        """Bytes of a coded tensor of a class over its plain ones; 1 where it stays as it is.

        The low halves of float32 weights are stored as they are.
        """
        if self.form == NONE or kind not in FORMS[self.form].bits:
            return 1.0
        plain = 8 * itemsize if kind == WEIGHTS else PLAIN_BITS[kind]
        low = plain - PLAIN_BITS[kind]
        return (FORMS[self.form].bits[kind] + low) / plain

    def temp_share(self, kind: str, name: str) -> float:
        """What decoding a tensor of a class writes to memory over its plain bytes."""
        if self.form == NONE or kind not in FORMS[self.form].bits:
            return 0.0
        in_full = kind != WEIGHTS or name in OPERANDS
        return 1.0 if in_full else FORMS[self.form].temp[self.variant]

    def moved_share(self, kind: str, name: str, itemsize: int) -> float:
        """Bytes that one use of a tensor reads and writes over its plain ones."""
        return self.share(kind, itemsize) + 2 * self.temp_share(kind, name)


DENSE = Unweight()
