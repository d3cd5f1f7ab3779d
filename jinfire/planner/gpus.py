"""GPUs as their vendor describes them."""

import dataclasses
import re

GIB = 2**30
MIB = 2**20

# Kept free of weights, activations and pages on every GPU: CUDA context, loaded kernels, the
# buffers of NCCL and cuBLAS. An allowance, not a measurement.
WORKSPACE_BYTES = int(1.5 * GIB)


@dataclasses.dataclass(frozen=True)
class GPU:
    """One kind of GPU.

    `memory_bytes` is what the driver reports as the total (nvidia-smi), less than the name says
    where error correction and the firmware take their part. Rates are peaks: `bfloat16_flops` of
    tensor cores without sparsity, `float32_flops` without tensor cores; `link_bytes_per_s` goes
    one way between two GPUs of a server, half of what data sheets name for both directions.
    `target` is the chip that `pallas_kernels` compiles for.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    bfloat16_flops: float
    float32_flops: float
    link: str
    link_bytes_per_s: float
    source: str
    target: str | None = None

    @property
    def usable_bytes(self) -> int:
        """What weights, pages and activations may take."""
        return self.memory_bytes - WORKSPACE_BYTES

    def peak_flops(self, dtype: str) -> float:
        """Products of float32 data keep their precision, which tensor cores do not."""
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops


# Kind: cited. Peaks are those of the data sheets, halved where they count sparsity.
_ROWS = (
    GPU(
        *("A100", 81920 * MIB, 2.039e12, 312e12, 19.5e12, "NVLink 3", 300e9),
        source="NVIDIA A100 80GB data sheet (SXM)",
    ),
    GPU(
        *("B200", 183359 * MIB, 7.7e12, 2250e12, 75e12, "NVLink 5", 900e9),
        source="NVIDIA HGX B200 data sheet, an eighth of the board",
    ),
    GPU(
        *("H100", 81559 * MIB, 3.35e12, 989e12, 67e12, "NVLink 4", 450e9),
        source="NVIDIA H100 data sheet (SXM, 80 GB)",
        target="h100",
    ),
    GPU(
        *("H100-NVL", 95830 * MIB, 3.9e12, 835e12, 60e12, "NVLink 4 bridge", 300e9),
        source="NVIDIA H100 data sheet (NVL, 94 GB)",
        target="h100",
    ),
    GPU(
        *("H200", 143771 * MIB, 4.8e12, 989e12, 67e12, "NVLink 4", 450e9),
        source="NVIDIA H200 data sheet (SXM, 141 GB)",
        target="h200",
    ),
    GPU(
        *("L40S", 46068 * MIB, 0.864e12, 362e12, 91.6e12, "PCIe 4 x16", 32e9),
        source="NVIDIA L40S data sheet",
    ),
)
# Far beyond what the links of a server reach, and what layouts are still listed for.
MAX_COUNT = 4096

GPUS: dict[str, GPU] = {gpu.name: gpu for gpu in _ROWS}


def parse_gpus(text: str) -> tuple[GPU, int]:
    """A kind of GPU and how many: "8xH100", or "H100" for one.

    Raises: ValueError listing the kinds, or naming the most that are counted.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(.+)", text.strip(), re.IGNORECASE)
    gpu = GPUS.get(match[2].upper().replace(" ", "-")) if match else None
    if match is None or gpu is None:
        raise ValueError(f"gpus: expected COUNTxKIND of {', '.join(GPUS)}, got {text!r}")
    digits = match[1] or "1"
    if len(digits) > len(str(MAX_COUNT)) or int(digits) > MAX_COUNT:
        raise ValueError(f"gpus: expected at most {MAX_COUNT}, got {text!r}")
    return gpu, int(digits)
