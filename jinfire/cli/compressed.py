"""What the commands say about a compressed folder."""

import math
from typing import Any

from jinfire.cli import console
from jinfire.unweight.describe import Description, TensorSize

# Why a tensor of a data type is stored as it was.
REASONS = {"F16": "float16 has no coded form"}


def document(description: Description) -> dict[str, Any]:
    """Totals as JSON values."""
    return {
        "form": description.options.form,
        "selection": description.options.tensors,
        "files": description.files,
        "source_bytes": description.source_bytes,
        "stored_bytes": description.stored_bytes,
        "ratio": description.ratio,
        "weights": description.weights,
        "bits_per_weight": description.bits_per_weight,
        "coded": _size(description.coded),
        "raw": {dtype: _size(size) for dtype, size in description.left_raw().items()},
    }


def _size(size: TensorSize) -> dict[str, Any]:
    return {
        "tensors": size.tensors,
        "weights": size.weights,
        "source_bytes": size.source_bytes,
        "stored_bytes": size.stored_bytes,
        "bits_per_weight": size.bits_per_weight,
        "ratio": size.ratio,
    }


def tensor_documents(description: Description) -> list[dict[str, Any]]:
    """Every tensor as JSON values."""
    return [
        {
            "name": tensor.name,
            "file": tensor.file,
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "form": tensor.form,
            "entropy": tensor.entropy,
            "verbatim_share": tensor.verbatim_share,
            **{key: value for key, value in _size(tensor).items() if key != "tensors"},
        }
        for tensor in description.tensors
    ]


def total_rows(description: Description) -> list[tuple[str, str]]:
    """Totals as a table of text."""
    coded, options = description.coded, description.options
    rows = [
        ("form", f"{options.form}, tensors {options.tensors}"),
        (
            "stored",
            f"{console.size_text(description.stored_bytes)} of "
            f"{console.size_text(description.source_bytes)}, "
            f"{console.percent_text(description.ratio, 1)}",
        ),
        ("bits per weight", f"{bits_text(description.bits_per_weight)}, whole files"),
        (
            "coded",
            f"{coded.tensors:,} tensors, {console.size_text(coded.source_bytes)}, "
            f"{bits_text(coded.bits_per_weight)} bits per weight",
        ),
    ]
    for dtype, size in description.left_raw().items():
        reason = f" ({REASONS[dtype]})" if dtype in REASONS else ""
        text = f"{size.tensors:,} tensors, {console.size_text(size.source_bytes)}{reason}"
        rows.append((f"{dtype} as it was", text))
    return rows


def bits_text(bits: float | None) -> str:
    return "-" if bits is None or math.isnan(bits) else f"{bits:.3f}"


def print_sizes(title: str, sizes: list[TensorSize]) -> None:
    """One line for every tensor, or every kind of them."""
    head = ("tensors", "dtype", "form", "entropy", "bits", "verbatim")
    lines = [
        (
            f"{size.tensors:,}",
            size.dtype,
            size.form,
            bits_text(size.entropy),
            bits_text(size.bits_per_weight),
            "-" if size.verbatim_share is None else console.percent_text(size.verbatim_share, 2),
        )
        for size in sizes
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    name_width = max([len(title), *(len(size.name) + 2 for size in sizes)])
    for name, line in zip(
        [title, *(f"  {size.name}" for size in sizes)], [head, *lines], strict=True
    ):
        cells = "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        print(f"{name:<{name_width}}  {cells}")
