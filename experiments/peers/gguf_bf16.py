"""A bfloat16 GGUF made from a quantised one, so that llama.cpp runs the same weights as we do.

Metadata and tokenizer are copied; matrices are dequantised to float32 and rounded to bfloat16;
float32 vectors (the norms) stay float32, which llama.cpp requires. Imports nothing of this project.
"""

import os
import pathlib
import sys

import gguf
import numpy as np
from tqdm import tqdm

# Written anew by the writer, or no longer true of the copy.
_OWN_FIELDS = {"general.architecture", "general.file_type", "general.quantization_version"}


def write_bf16_gguf(source: str | os.PathLike, target: str | os.PathLike) -> pathlib.Path:
    """The bfloat16 copy of `source` at `target`; a copy that already stands is kept.

    The copy is written beside its final name and renamed, so that a broken run leaves nothing
    that looks whole.
    """
    target = pathlib.Path(target)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".partial{os.getpid()}")
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(partial, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _OWN_FIELDS:
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in tqdm(reader.tensors, desc="bf16 GGUF", unit="tensor", file=sys.stderr):
        shape = tensor.shape.tolist()[::-1]
        dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        dense = dense.astype(np.float32).reshape(shape)
        if dense.ndim == 1:
            writer.add_tensor(tensor.name, dense)
            continue
        writer.add_tensor(
            tensor.name,
            gguf.quants.quantize(dense, gguf.GGMLQuantizationType.BF16),
            raw_dtype=gguf.GGMLQuantizationType.BF16,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


if __name__ == "__main__":
    print(write_bf16_gguf(*sys.argv[1:3]))
