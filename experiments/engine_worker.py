"""The engine in a process of its own, spoken to like its peers: JSON commands in, answers out.

`python -m experiments.engine_worker` with the operations of `experiments/peers/`, so that all
systems are timed under equal conditions and each has a peak memory of its own:

    {"op": "load", "model": PATH, "dtype": "bfloat16", "config": {...}, "warmup": true}
    {"op": "decode", "prompt": [ids], "tokens": 32}
    {"op": "prefill", "prompt": [ids]}
    {"op": "ragged", "prompts": [[ids], ...], "outputs": [n, ...]}
    {"op": "host", "prompts": [[ids], ...], "short": 8, "long": 136}
    {"op": "info"}

Units: seconds on the monotonic clock. Greedy, end tokens ignored, output lengths fixed.
"""

import json
import pathlib
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import jinfire as jf


class Worker:
    """One engine on one device and the timed operations on it."""

    def __init__(self) -> None:
        self.import_rss_bytes = peak_rss_bytes()
        self.engine: jf.Engine

    def load(
        self, model: str, dtype: str, config: dict[str, Any], warmup: bool = False
    ) -> dict[str, Any]:
        start = time.perf_counter()
        self.engine = jf.Engine.from_pretrained(
            model,
            dtype=dtype,
            placement=jf.Placement.colocated((1, 1)),
            config=jf.EngineConfig(**config, prefix_caching=False),
            warmup=warmup,
        )
        return {"load_s": time.perf_counter() - start, "compiles": self._compiles()}

    def _compiles(self) -> int:
        return self.engine.stats()["compile_count"]

    def _run(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[int]
    ) -> tuple[float, list[list[int]]]:
        params = [greedy(n) for n in outputs]
        start = time.perf_counter()
        outs = self.engine.generate([list(p) for p in prompts], params)
        wall_s = time.perf_counter() - start
        return wall_s, [list(out.token_ids) for out in outs]

    def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """One request. The engine reads tokens late and several at a time, so the time of the
        first token is that of the same request with one token of output, run just before.
        """
        first_s, _ = self._run([prompt], [1])
        wall_s, token_ids = self._run([prompt], [tokens])
        return {
            "ttft_s": first_s,
            "decode_s": wall_s - first_s,
            "steps": tokens - 1,
            "token_ids": token_ids[0],
            "compiles": self._compiles(),
        }

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Prompt in, first token out."""
        wall_s, token_ids = self._run([prompt], [1])
        return {"prefill_s": wall_s, "token_ids": token_ids[0], "compiles": self._compiles()}

    def ragged(self, prompts: list[list[int]], outputs: list[int]) -> dict[str, Any]:
        """All requests at once, continuous batching."""
        wall_s, token_ids = self._run(prompts, outputs)
        return {"wall_s": wall_s, "token_ids": token_ids, "compiles": self._compiles()}

    def host(self, prompts: list[list[int]], short: int, long: int) -> dict[str, Any]:
        """Host and wall time of `long - short` decode steps of all rows: two runs, subtracted,
        so that prefill, admission and the end of the requests cancel.
        """
        spent = []
        for tokens in (short, long):
            host_s, thread_s = self.engine.stats()["host_seconds"], time.thread_time()
            wall_s, _ = self._run(prompts, [tokens] * len(prompts))
            spent.append(
                (
                    wall_s,
                    self.engine.stats()["host_seconds"] - host_s,
                    time.thread_time() - thread_s,
                )
            )
        wall_s, host_s, thread_s = (b - a for a, b in zip(*spent, strict=True))
        return {
            "wall_s": wall_s,
            "host_s": host_s,
            "thread_s": thread_s,
            "steps": long - short,
            "compiles": self._compiles(),
        }

    def info(self) -> dict[str, Any]:
        stats = self.engine.stats()
        names = ("weight_bytes", "kv_pool_bytes", "compile_count", "compile_seconds", "preemptions")
        return {
            "system": "jinfire",
            "version": jf.__version__,
            "peak_rss_bytes": peak_rss_bytes(),
            "import_rss_bytes": self.import_rss_bytes,
            **{name: stats[name] for name in names},
        }


def greedy(max_tokens: int) -> jf.SamplingParams:
    return jf.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def peak_rss_bytes() -> int:
    """Largest resident size of this process.

    From VmHWM where there is one: `ru_maxrss` of a fresh child still holds its parent's size.
    """
    try:
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        operation = getattr(worker, command.pop("op"))
        print(json.dumps(operation(**command)), flush=True)


if __name__ == "__main__":
    main()
