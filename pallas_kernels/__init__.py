"""Device kernels: each operation's reference, implementations and argument sets."""

from pallas_kernels.kernel import ArgSpec, Kernel
from pallas_kernels.paged_attention import PAGED_ATTENTION, paged_attention, write_pages
from pallas_kernels.prefill_attention import PREFILL_ATTENTION, prefill_attention

KERNELS = {kernel.name: kernel for kernel in (PAGED_ATTENTION, PREFILL_ATTENTION)}

__all__ = ["KERNELS", "ArgSpec", "Kernel", "paged_attention", "prefill_attention", "write_pages"]
