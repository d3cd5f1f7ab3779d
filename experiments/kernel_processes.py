"""Child processes of `experiments/kernels.py`: the assembler they find, and how they are ended.

A GPU kernel can hang, and an illegal access spoils the device for the whole process. So each kernel
is measured in a process of its own, which is killed when nothing more comes from it.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

from experiments.harness import ROOT

SYSTEM_CUDA = pathlib.Path("/usr/local/cuda")

# Exit status of a child whose device answers no more, and what is said of it.
DEVICE_LOST = 3
LOST = "the device answers no more"

POLL_S = 0.1
LOG_CHARACTERS = 1500


# -- the assembler


def packages_cuda() -> pathlib.Path | None:
    """The CUDA folder among the installed packages that has an assembler."""
    for name in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        for folder in (found.submodule_search_locations or ()) if found else ():
            if (pathlib.Path(folder) / "bin" / "ptxas").exists():
                return pathlib.Path(folder)
    return None


def system_cuda(usual: pathlib.Path = SYSTEM_CUDA) -> pathlib.Path | None:
    """A CUDA folder with an assembler outside the packages: the usual one, else that on PATH."""
    if (usual / "bin" / "ptxas").exists():
        return usual
    found = shutil.which("ptxas")
    return pathlib.Path(found).resolve().parent.parent if found else None


def with_assembler(
    packages: pathlib.Path | None, system: pathlib.Path | None
) -> tuple[list[str], str]:
    """What goes in front of a command so that JAX finds ptxas, and a line that says which.

    JAX looks in its CUDA packages, which may lack the compiler's, and in `CUDA_ROOT`; Mosaic
    kernels do not compile without it.
    """
    if packages:
        return [], f"ptxas: {packages}/bin/ptxas, of the CUDA packages"
    if system:
        line = f"ptxas: the CUDA packages have none, taking {system}/bin/ptxas"
        return ["env", f"CUDA_ROOT={system}"], line
    return [], (
        f"ptxas: none in the CUDA packages, in {SYSTEM_CUDA}/bin or on PATH: "
        "Mosaic kernels will not compile"
    )


def assembler_version(root: pathlib.Path | None) -> str | None:
    """Version of a CUDA folder's ptxas."""
    if root is None:
        return None
    command = [root / "bin" / "ptxas", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"V([\d.]+)", done.stdout)
    return found.group(1) if found else None


# -- supervision


def supervise(
    command: Sequence[str],
    progress: Callable[[], object],
    limit_s: float,
    stall_s: float,
) -> str | None:
    """Why a process had to be given up, with the end of what it complained; None where it ended.

    It has so long in all, and so long between two changes of `progress()`.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log, start_new_session=True)
        try:
            reason = _watch(process, progress, limit_s, stall_s)
        finally:
            _end(process)
        log.seek(0)
        said = log.read().decode(errors="replace")[-LOG_CHARACTERS:].strip()
    return f"{reason}\n{said}" if said and reason not in (None, LOST) else reason


def _watch(
    process: subprocess.Popen, progress: Callable[[], object], limit_s: float, stall_s: float
) -> str | None:
    start = moved = time.perf_counter()
    last = progress()
    while process.poll() is None:
        time.sleep(POLL_S)
        now = time.perf_counter()
        if (current := progress()) != last:
            last, moved = current, now
        if now - moved > stall_s:
            return f"hangs: killed after {stall_s:.0f} s without a result"
        if now - start > limit_s:
            return f"killed after its {limit_s:.0f} s"
    if process.returncode == DEVICE_LOST:
        return LOST
    return f"exit status {process.returncode}" if process.returncode else None


def _end(process: subprocess.Popen) -> None:
    """Kills what is left of the process and its own children, the assembler."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end", flush=True)
