"""Hugging Face transformers as a measured peer: one process, JSON commands in, JSON answers out.

Runs in a virtual environment of its own (torch, transformers, gguf) and imports nothing of this
project. Every line of stdin is a command, every line of stdout its answer, in order:

    {"op": "load", "model": PATH, "dtype": "bfloat16", "threads": 2}
    {"op": "decode", "prompt": [ids], "tokens": 32}
    {"op": "prefill", "prompt": [ids]}
    {"op": "ragged", "prompts": [[ids], ...], "outputs": [n, ...], "batch": 32}
    {"op": "info"}

Units: seconds on the monotonic clock. Greedy, end tokens ignored, output lengths fixed.
"""

import json
import pathlib
import platform
import resource
import sys
import time

import gguf
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Bench:
    """One loaded model and the timed operations on it."""

    def __init__(self) -> None:
        self.model = None

    def load(self, model: str, dtype: str, threads: int) -> dict:
        """Load a Hugging Face folder or a GGUF file, eager mode, default (sdpa) attention."""
        torch.set_num_threads(threads)
        path = pathlib.Path(model)
        start = time.perf_counter()
        if path.suffix == ".gguf":
            self.model = load_gguf(path, getattr(torch, dtype))
        else:
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self.model.eval()
        parameters = sum(p.numel() for p in self.model.parameters())
        return {"load_s": time.perf_counter() - start, "parameters": parameters}

    def threads(self, threads: int) -> dict:
        torch.set_num_threads(threads)
        return {}

    def decode(self, prompt: list[int], tokens: int) -> dict:
        """One request; `decode_s` runs from the first output token to the last."""
        started = time.perf_counter()
        out = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        ids = [int(out.logits[0, -1].argmax())]
        first = time.perf_counter()
        for _ in range(tokens - 1):
            out = self.model(torch.tensor([ids[-1:]]), cache=out.cache, use_cache=True)
            ids.append(int(out.logits[0, -1].argmax()))
        return {
            "ttft_s": first - started,
            "decode_s": time.perf_counter() - first,
            "steps": tokens - 1,
            "token_ids": ids,
        }

    def prefill(self, prompt: list[int]) -> dict:
        """Prompt in, first token out."""
        started = time.perf_counter()
        out = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        token = int(out.logits[0, -1].argmax())
        return {"prefill_s": time.perf_counter() - started, "token_ids": [token]}

    def ragged(self, prompts: list[list[int]], outputs: list[int], batch: int) -> dict:
        """Static batches in arrival order, left padded, each run until its longest output ends.

        Rows that are done go on being computed and their tokens are not counted: that is what a
        static batch costs.
        """
        token_ids = []
        started = time.perf_counter()
        for at in range(0, len(prompts), batch):
            token_ids += self._static_batch(prompts[at : at + batch], outputs[at : at + batch])
        return {"wall_s": time.perf_counter() - started, "token_ids": token_ids}

    def _static_batch(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        chosen = []
        past = None
        for _ in range(max(outputs)):
            out = self.model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                cache=past,
                use_cache=True,
                logits_to_keep=1,
            )
            past = out.cache
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            chosen.append(ids)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=-1)
            positions = positions[:, -1:] + 1
        rows = torch.cat(chosen, dim=-1).tolist()
        return [row[:n] for row, n in zip(rows, outputs, strict=True)]

    def info(self) -> dict:
        return {
            "system": "transformers",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "peak_rss_bytes": peak_rss_bytes(),
        }


_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def load_gguf(path: pathlib.Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama-family GGUF, dequantised; transformers' own GGUF loading needs `accelerate` too."""
    reader = gguf.GGUFReader(path)

    def field(name: str) -> float:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    tensors = {t.name: t for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
    )
    state = {}
    for name, tensor in tensors.items():
        dense = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        parts = name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                dense = _unpermute(dense, heads if parts[2] == "attn_q" else kv_heads)
            target = f"model.layers.{parts[1]}.{_GGUF_LAYER_NAMES[parts[2]]}"
        else:
            target = _GGUF_NAMES[parts[0]]
        state[f"{target}.weight"] = dense
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{path}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.to(dtype)


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the two rotary halves of every head's rows; this undoes it."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


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
    with torch.inference_mode():
        for line in sys.stdin:
            command = json.loads(line)
            operation = getattr(bench, command.pop("op"))
            print(json.dumps(operation(**command)), flush=True)


if __name__ == "__main__":
    main()
