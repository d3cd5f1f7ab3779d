"""A process that compiles for GPUs on a machine without one.

XLA's CUDA plugin and NVIDIA's assembler (requirements/aot.lock) lie in a folder of their own: plain
JAX would complain at every start about a CUDA plugin without a GPU. Processes that compile for a
GPU are started with that folder, and with what tells the plugin that no GPU is wanted.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

# `make install-aot` puts the wheels here, out of sight of every other process.
WHEELS = Path(sys.prefix) / "aot"
SYSTEM_CUDA = Path("/usr/local/cuda")
IMPORT_ROOT = Path(__file__).resolve().parent.parent


class ToolchainMissing(RuntimeError):
    """The CUDA plugin or the assembler is not installed."""


def environment() -> dict[str, str]:
    """The whole environment of a process that compiles for GPUs; nothing is inherited.

    Raises: ToolchainMissing.
    """
    if WHEELS.is_dir():
        paths, cuda = [WHEELS], WHEELS / "nvidia" / "cu13"
    else:
        paths, cuda = [], SYSTEM_CUDA
        if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
            raise ToolchainMissing("no CUDA plugin: make install-aot (Linux, 0.3 GB download)")
    if not (cuda / "bin" / "ptxas").exists():
        raise ToolchainMissing(f"no assembler {cuda}/bin/ptxas: make install-aot")
    return {
        "PATH": f"{cuda}/bin:{os.defpath}",
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, IMPORT_ROOT])),
        "CUDA_ROOT": str(cuda),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def device_environment() -> dict[str, str]:
    """This process's own environment, for one that uses the GPU at hand and reads the assembler."""
    paths = [str(IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }


def run_python(
    *arguments: str, device: bool = False, timeout_s: float = 3600, show_progress: bool = False
) -> str:
    """Standard output of a Python process that compiles for absent GPUs, or for the one at hand.

    With `show_progress` what it writes to stderr is seen at once.
    Raises: ToolchainMissing; RuntimeError with the end of its output where it fails.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        env=device_environment() if device else environment(),
        stdout=subprocess.PIPE,
        stderr=None if show_progress else subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        said = f"\n{done.stderr[-4000:]}" if done.stderr else ""
        raise RuntimeError(f"{' '.join(arguments)}: exit status {done.returncode}{said}")
    return done.stdout


def assembler_version() -> str:
    """Version of ptxas, on which register counts depend."""
    ptxas = Path(environment()["CUDA_ROOT"]) / "bin" / "ptxas"
    text = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V([\d.]+)", text)
    return found.group(1) if found else text.strip()
