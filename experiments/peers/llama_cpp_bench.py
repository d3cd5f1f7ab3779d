"""llama.cpp (llama-cpp-python) as a measured peer: one process, JSON commands in, JSON answers out.

Runs in a virtual environment of its own and imports nothing of this project. Drives llama.cpp's
own batch interface (`llama_decode`), without the Python wrapper's sampling and logit copies, so
that what is timed is llama.cpp. Every line of stdin is a command, every line of stdout its answer:

    {"op": "load", "model": PATH, "threads": 2, "context": 1024, "slots": 32}
    {"op": "decode", "prompt": [ids], "tokens": 32}
    {"op": "prefill", "prompt": [ids]}
    {"op": "ragged", "prompts": [[ids], ...], "outputs": [n, ...], "slots": 32}
    {"op": "info"}

Units: seconds on the monotonic clock. Greedy, end tokens ignored, output lengths fixed.
"""

import collections
import ctypes
import json
import pathlib
import platform
import resource
import sys
import time

import llama_cpp
import numpy as np

BATCH_TOKENS = 512

# Keep a reference: llama.cpp calls it for as long as the process lives.
_silent = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Bench:
    """One loaded model with one context of `slots` sequences, and the timed operations on it."""

    def load(
        self,
        model: str,
        threads: int,
        context: int = 1024,
        slots: int = 1,
        extra_buffers: bool = True,
    ) -> dict:
        """Load a GGUF. `extra_buffers` lets llama.cpp repack weights for the CPU at hand."""
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        start = time.perf_counter()
        settings = llama_cpp.llama_model_default_params()
        settings.use_extra_bufts = extra_buffers
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), settings)
        if not self.model:
            raise ValueError(f"{model}: llama.cpp could not load it")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.context_tokens, self.thread_count = context, threads
        self.context = None
        self._open(slots)
        return {"load_s": time.perf_counter() - start}

    def _open(self, slots: int) -> None:
        if self.context:
            llama_cpp.llama_batch_free(self.batch)
            llama_cpp.llama_free(self.context)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = self.context_tokens * slots
        settings.n_batch = settings.n_ubatch = BATCH_TOKENS
        settings.n_seq_max = slots
        settings.n_threads = settings.n_threads_batch = self.thread_count
        settings.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise ValueError(f"llama.cpp could not open {slots} slots of {self.context_tokens}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.slots = slots

    def threads(self, threads: int) -> dict:
        llama_cpp.llama_set_n_threads(self.context, threads, threads)
        self.thread_count = threads
        return {}

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """One batch of (token, position, slot, wanted); greedy tokens of the wanted, in order."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, slot, wanted) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = slot
            batch.logits[i] = wanted
        code = llama_cpp.llama_decode(self.context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for {len(entries)} tokens")
        return [self._argmax(i) for i, entry in enumerate(entries) if entry[3]]

    def _argmax(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, index)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.vocab,))))

    def _prompt(self, prompt: list[int]) -> int:
        chosen = []
        for at in range(0, len(prompt), BATCH_TOKENS):
            chunk = prompt[at : at + BATCH_TOKENS]
            last = len(prompt) - 1
            chosen = self._run([(t, at + i, 0, at + i == last) for i, t in enumerate(chunk)])
        return chosen[0]

    def decode(self, prompt: list[int], tokens: int) -> dict:
        """One request; `decode_s` runs from the first output token to the last."""
        self._clear()
        started = time.perf_counter()
        ids = [self._prompt(prompt)]
        first = time.perf_counter()
        for i in range(tokens - 1):
            ids += self._run([(ids[-1], len(prompt) + i, 0, True)])
        return {
            "ttft_s": first - started,
            "decode_s": time.perf_counter() - first,
            "steps": tokens - 1,
            "token_ids": ids,
        }

    def prefill(self, prompt: list[int]) -> dict:
        """Prompt in, first token out."""
        self._clear()
        started = time.perf_counter()
        token = self._prompt(prompt)
        return {"prefill_s": time.perf_counter() - started, "token_ids": [token]}

    def ragged(self, prompts: list[list[int]], outputs: list[int], slots: int) -> dict:
        """Continuous batching over parallel slots, as llama.cpp's server does it.

        Every batch holds one token of each running slot, then prompt tokens of the slots still
        being filled, up to the batch size; a slot that ends takes the next waiting request.
        """
        if slots != self.slots:
            self._open(slots)
        self._clear()
        waiting = collections.deque(range(len(prompts)))
        free = list(range(slots))[::-1]
        running: dict[int, int] = {}
        filled: dict[int, int] = {}
        token_ids: list[list[int]] = [[] for _ in prompts]
        started = time.perf_counter()
        while waiting or running or filled:
            while waiting and free:
                slot = free.pop()
                running[slot] = waiting.popleft()
                filled[slot] = 0
            entries, owners = [], []
            for slot, request in running.items():
                if slot not in filled:
                    done = token_ids[request]
                    position = len(prompts[request]) + len(done) - 1
                    entries.append((done[-1], position, slot, True))
                    owners.append(slot)
            for slot in list(filled):
                prompt, at = prompts[running[slot]], filled[slot]
                stop = min(len(prompt), at + BATCH_TOKENS - len(entries))
                last = len(prompt) - 1
                entries += [(prompt[i], i, slot, i == last) for i in range(at, stop)]
                filled[slot] = stop
                if stop == len(prompt):
                    del filled[slot]
                    owners.append(slot)
            for slot, token in zip(owners, self._run(entries), strict=True):
                request = running[slot]
                token_ids[request].append(token)
                if len(token_ids[request]) == outputs[request]:
                    llama_cpp.llama_memory_seq_rm(self.memory, slot, -1, -1)
                    del running[slot]
                    free.append(slot)
        return {"wall_s": time.perf_counter() - started, "token_ids": token_ids}

    def info(self) -> dict:
        return {
            "system": "llama.cpp",
            "llama_cpp_python": llama_cpp.__version__,
            "build": llama_cpp.llama_print_system_info().decode(),
            "python": platform.python_version(),
            "threads": self.thread_count,
            "peak_rss_bytes": peak_rss_bytes(),
        }


def peak_rss_bytes() -> int:
    """Largest resident size; `ru_maxrss` of a fresh child would still hold its parent's."""
    try:
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    bench = Bench()
    for line in sys.stdin:
        command = json.loads(line)
        operation = getattr(bench, command.pop("op"))
        print(json.dumps(operation(**command)), flush=True)


if __name__ == "__main__":
    main()
