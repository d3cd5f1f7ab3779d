"""Device kernels: each operation's reference, implementations and argument sets."""

from pallas_kernels.bench import (
    SMOKE_WORKLOADS,
    WORKLOADS,
    Workload,
    counted,
    seconds_per_call,
)
from pallas_kernels.compiler import TARGET_NAMES, Compiler, Resources, Target
from pallas_kernels.expanded_latent_attention import expanded_latent_attention
from pallas_kernels.grouped_matmul import GROUPED_MATMUL, grouped_matmul
from pallas_kernels.int4_format import GROUP as INT4_GROUP
from pallas_kernels.int4_format import PER_WORD as INT4_PER_WORD
from pallas_kernels.int4_format import pack_for_device, unpack_from_device
from pallas_kernels.int4_matmul import (
    GROUPED_INT4_MATMUL,
    INT4_MATMUL,
    grouped_int4_matmul,
    int4_matmul,
)
from pallas_kernels.kernel import ArgSpec, Kernel
from pallas_kernels.kv_codec import decode_kv, encode_kv, merge_kv
from pallas_kernels.latent_attention import (
    LATENT_ATTENTION,
    join_parts,
    latent_attention,
    latent_attention_part,
)
from pallas_kernels.paged_attention import PAGED_ATTENTION, paged_attention, write_pages
from pallas_kernels.prefill_attention import PREFILL_ATTENTION, prefill_attention
from pallas_kernels.toolchain import ToolchainMissing, run_python
from pallas_kernels.unweight_blob import (
    HASH_AT,
    HEADER_BYTES,
    Corrupt,
    TileOrder,
    UnweightHeader,
    check_blob,
    check_words,
    hash_blob,
)
from pallas_kernels.unweight_decompress import (
    UNWEIGHT_COMPACT,
    UNWEIGHT_EXPONENT,
    UNWEIGHT_EXPONENTS,
    UNWEIGHT_HUFFMAN,
    UNWEIGHT_PALETTE,
    UNWEIGHT_TRANSCODE,
    abstract_matrix,
    unweight_decompress,
    unweight_exponents,
    unweight_transcode,
)
from pallas_kernels.unweight_decompress_xla import unweight_rows
from pallas_kernels.unweight_format import (
    UnweightOptions,
    choose_palette,
    pack_nibbles,
    unpack_nibbles,
    unweight_decode,
    unweight_encode,
)
from pallas_kernels.unweight_huffman import canonical_codes, code_lengths, decode_table
from pallas_kernels.unweight_matmul import (
    GROUPED_MATMULS,
    MATMULS,
    grouped_unweight_matmul,
    unweight_matmul,
)
from pallas_kernels.unweight_matrix import MatrixTiling, UnweightMatrix

KERNELS = {
    kernel.name: kernel
    for kernel in (
        PAGED_ATTENTION,
        LATENT_ATTENTION,
        PREFILL_ATTENTION,
        GROUPED_MATMUL,
        INT4_MATMUL,
        GROUPED_INT4_MATMUL,
        UNWEIGHT_PALETTE,
        UNWEIGHT_EXPONENT,
        UNWEIGHT_COMPACT,
        UNWEIGHT_HUFFMAN,
        UNWEIGHT_EXPONENTS,
        UNWEIGHT_TRANSCODE,
        *MATMULS.values(),
        *GROUPED_MATMULS.values(),
    )
}

__all__ = [
    "KERNELS",
    "ArgSpec",
    "Kernel",
    # operations
    "paged_attention",
    "latent_attention",
    "latent_attention_part",
    "join_parts",
    "expanded_latent_attention",
    "prefill_attention",
    "grouped_matmul",
    "int4_matmul",
    "grouped_int4_matmul",
    "write_pages",
    "INT4_GROUP",
    "INT4_PER_WORD",
    "pack_for_device",
    "unpack_from_device",
    # keys and values on their way
    "encode_kv",
    "decode_kv",
    "merge_kv",
    # compressed weights: the format, and its oracle
    "HASH_AT",
    "HEADER_BYTES",
    "Corrupt",
    "TileOrder",
    "UnweightHeader",
    "UnweightOptions",
    "canonical_codes",
    "check_blob",
    "check_words",
    "choose_palette",
    "code_lengths",
    "decode_table",
    "hash_blob",
    "pack_nibbles",
    "unpack_nibbles",
    "unweight_decode",
    "unweight_encode",
    # coded weights
    "abstract_matrix",
    "unweight_decompress",
    "unweight_exponents",
    "unweight_transcode",
    "unweight_matmul",
    "grouped_unweight_matmul",
    "unweight_rows",
    "UnweightMatrix",
    "MatrixTiling",
    # measurement
    "WORKLOADS",
    "SMOKE_WORKLOADS",
    "Workload",
    "counted",
    "seconds_per_call",
    # compilation for GPUs that are not there
    "TARGET_NAMES",
    "Compiler",
    "Resources",
    "Target",
    "ToolchainMissing",
    "run_python",
]
