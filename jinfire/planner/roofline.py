"""Least times of prefill and decode: bytes over bandwidth, FLOPs over peak, bytes over links.

A *tick* is the time of one stage for one microbatch. Its memory traffic and its arithmetic overlap,
so the longer of both counts; collectives do not overlap with either, and wait for each other.
Launches, latencies and what a kernel loses against the peak are not in it: real steps are longer.
Source: Williams et al., Roofline (CACM 52/4, 2009); ring all-reduce: Thakur et al. (IJHPCA 2005).
"""

import dataclasses

from jinfire.config import LayerSpec
from jinfire.planner.footprint import Footprint, Tensor, Workload, microbatch_rows
from jinfire.planner.gpus import GPU
from jinfire.programs.decode import decode_microbatches
from sharding import Schedule

# Keys and values of latents; which side of it attention is on is the phase's matter.
LATENT_UP = "attention.latent_up.weight"


@dataclasses.dataclass(frozen=True)
class Tick:
    """What one device reads, computes and sends for one microbatch.

    `weight_bytes` of coded weights are what decoding reads and writes too.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float
    link_bytes: float


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """Predicted time of a phase and its terms.

    `total_s` is that of one dispatch of prefill, a microbatch for every stage, or of one
    decode step of all rows; `tokens` are those that it puts through the model. A dispatch of more
    stages has more tokens: `tokens_per_s` is what layouts are compared by. `weights_s`, `kv_s`,
    `flops_s` and `link_s` are times of a device at work: while it reads weights, reads keys and
    values, multiplies, and sends. `bubble_s` is what it waits for other stages.
    """

    tick: Tick
    microbatches: int
    tokens: int
    weights_s: float
    kv_s: float
    flops_s: float
    link_s: float
    bubble_s: float
    total_s: float
    bubble_fraction: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s

    @property
    def bound(self) -> str:
        """The term that more of would help least without: what the phase waits for."""
        memory_s = self.weights_s + self.kv_s
        terms = {
            "weights" if self.weights_s >= self.kv_s else "kv": memory_s,
            "flops": self.flops_s,
            "links": self.link_s,
        }
        return max(terms, key=lambda name: terms[name])


def decode_time(footprint: Footprint, gpu: GPU, load: Workload) -> PhaseTime:
    """One decode step of all rows at their full context."""
    stages = footprint.layout.mesh_spec.pipeline
    microbatches = decode_microbatches(stages, load.rows)
    rows = microbatch_rows(stages, load.rows)
    tick = _tick(footprint, rows, rows, rows, load.context)
    schedule = Schedule(stages, microbatches, load.steps)
    return _phase(footprint, gpu, tick, schedule, rows)


def prefill_time(footprint: Footprint, gpu: GPU, load: Workload) -> PhaseTime:
    """One chunk of each row of a prefill dispatch, in the middle of a prompt of `context`."""
    stages = footprint.layout.mesh_spec.pipeline
    tokens = load.prefill_rows * load.chunk
    context = (load.context + load.chunk) // 2
    tick = _tick(footprint, tokens, load.prefill_rows, 0, context, expands=True)
    return _phase(footprint, gpu, tick, Schedule(stages, stages), tokens)


def _phase(
    footprint: Footprint, gpu: GPU, tick: Tick, schedule: Schedule, tick_tokens: int
) -> PhaseTime:
    weights_s = tick.weight_bytes / gpu.bandwidth_bytes_per_s
    kv_s = tick.kv_bytes / gpu.bandwidth_bytes_per_s
    flops_s = tick.flops / gpu.peak_flops(footprint.dtype)
    link_s = tick.link_bytes / gpu.link_bytes_per_s
    tick_s = max(weights_s + kv_s, flops_s) + link_s
    ticks, busy = schedule.ticks / schedule.steps, schedule.microbatches
    return PhaseTime(
        tick=tick,
        microbatches=busy,
        tokens=busy * tick_tokens,
        weights_s=weights_s * busy,
        kv_s=kv_s * busy,
        flops_s=flops_s * busy,
        link_s=link_s * busy,
        bubble_s=tick_s * (ticks - busy),
        total_s=tick_s * ticks,
        bubble_fraction=schedule.bubble_fraction,
    )


def _tick(
    footprint: Footprint,
    tokens: int,
    rows: int,
    head_rows: int,
    context: int,
    *,
    expands: bool = False,
) -> Tick:
    """One microbatch of `tokens` in `rows`, each token over `context` keys.

    `head_rows` are those of whom the head makes logits. With `expands` attention makes keys and
    values of all heads from the latents of a row's whole context, as prefill does; else queries
    are brought to the latents, as in decode.
    """
    weight_bytes = flops = 0.0
    tied = footprint.config.tie_embeddings
    for tensor, count in footprint.held():
        is_head = tensor.name == ("embed.weight" if tied else "head.weight")
        if tensor.name == "embed.weight" and not is_head:
            continue  # a lookup reads a few rows and multiplies nothing
        used = head_rows if is_head else tokens
        size = footprint.moved_bytes(tensor) * count
        weight_bytes += size * _share_read(footprint, tensor, used)
        if tensor.is_matrix and not (expands and tensor.name == LATENT_UP):
            share = _share_multiplied(footprint, tensor)
            flops += 2 * used * tensor.device_elements * tensor.values * count * share
    kv_bytes = 0.0
    # A chunk reads all latents, its own and those of others, a token those that a device holds.
    parts = 1 if expands else footprint.layout.slot_parts
    for spec in footprint.layout.slot_specs:
        keys = _keys(footprint, spec, context)
        kv_bytes += rows * keys * footprint.slot_kv_bytes / parts
        flops += _attention_flops(footprint, spec, tokens, rows, keys, expands)
    link_bytes = _link_bytes(footprint, tokens, head_rows)
    link_bytes += _latent_link_bytes(footprint, tokens, rows * context, expands)
    return Tick(weight_bytes, kv_bytes, flops, link_bytes)


def _share_read(footprint: Footprint, tensor: Tensor, tokens: int) -> float:
    """Share of a tensor that a microbatch reads: of experts those that some token takes."""
    if tokens == 0:
        return 0.0
    experts = footprint.config.experts
    if experts is None or tensor.kind != "routed_experts":
        return 1.0
    return 1 - (1 - experts.per_token / experts.count) ** tokens


def _share_multiplied(footprint: Footprint, tensor: Tensor) -> float:
    """Share of a tensor that one token multiplies; experts are taken evenly."""
    experts = footprint.config.experts
    if experts is None or tensor.kind != "routed_experts":
        return 1.0
    return experts.per_token / experts.count


def _keys(footprint: Footprint, spec: LayerSpec, context: int) -> int:
    """Keys that a query of a layer sees."""
    chunk = footprint.config.attention_chunk
    return min(context, chunk) if chunk and spec.attention == "chunked" else context


def _attention_flops(
    footprint: Footprint, spec: LayerSpec, tokens: int, rows: int, keys: int, expands: bool
) -> float:
    """Scores and mixture of query tokens in one layer on one device."""
    config = footprint.config
    heads = config.num_heads // footprint.layout.shards
    latent = config.latent
    if spec.attention == "latent" and latent is not None:
        if not expands:  # the latents are keys and values at once
            return 2 * tokens * heads * keys * (2 * latent.rank + latent.rope_dim)
        # New tokens are expanded from their pages, like those before them.
        made = rows * keys * (latent.nope_dim + latent.value_dim) * latent.rank
        seen = tokens * keys * (latent.nope_dim + latent.rope_dim + latent.value_dim)
        return 2 * heads * (made + seen)
    return 2 * tokens * heads * keys * 2 * config.head_dim


def _link_bytes(footprint: Footprint, tokens: int, head_rows: int) -> float:
    """Bytes that a device sends: sums over a stage, sums over stages, logits, and the handing on.

    A ring moves 2 (n - 1) / n of an array through every device to sum it over n, and (n - 1) / n to
    gather it.
    """
    config, layout = footprint.config, footprint.layout
    stages, shards, devices = layout.mesh_spec.pipeline, layout.shards, layout.mesh_spec.size
    hidden = tokens * config.width * footprint.itemsize
    sent = 2 * layout.slots * hidden * 2 * (shards - 1) / shards  # after attention, after the MLP
    sent += hidden * 2 * (devices - 1) / devices  # the embedding
    if stages > 1:
        sent += hidden
        sent += head_rows * config.width * footprint.itemsize * 2 * (stages - 1) / stages
    return sent + head_rows * config.vocab_size * 4 * (devices - 1) / devices


def _latent_link_bytes(footprint: Footprint, tokens: int, keys: int, expands: bool) -> float:
    """Bytes that a device sends for latents that are split over the devices of a stage.

    A chunk gathers the latents of its row, `keys` in all rows. A token's queries of all heads are
    gathered, and what every device makes of them goes to those that have the heads.
    """
    layout, parts = footprint.layout, footprint.layout.slot_parts
    moved = keys * footprint.slot_kv_bytes if expands else tokens * footprint.exchanged_bytes
    return layout.slots * moved * (parts - 1) / parts
