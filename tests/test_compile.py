"""What programs cost: nothing compiles after the warm-up, pools are updated in place."""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from engines import (
    BOTH,
    BUCKETED,
    MODEL,
    PLACEMENTS,
    PairTokenizer,
    alone,
    check_idle,
    collect,
    drain,
    engine_config,
    greedy,
    prompts_of,
    same,
    seeded,
    tiny_engine,
)

from jinfire import Engine, Placement, SamplingParams
from jinfire.config import ExpertsConfig, LayerSpec
from jinfire.loading import RandomSource

COMPILED: list[str] = []
"""JAX's own record of every compilation in this process, persistent cache or not."""


def _listen(event: str, duration_s: float, **details) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(str(details.get("fun_name", event)))


jax.monitoring.register_event_duration_secs_listener(_listen)


def mixed_requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Every length and every kind of parameter; shared prefixes; 1 to 40 tokens."""
    rng = random.Random(3)
    stems = prompts_of([50, 50], seed=31)
    cases = []
    for i in range(count):
        length = rng.choice([1, 2, 4, 5, 8, 9, 15, 16, 17, 31, 33, 48])
        prompt = stems[i % 2][:length] if i % 3 else prompts_of([length], seed=i)[0]
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 3, 9, 16]) if length > 24 else rng.choice([1, 7, 40]),
            temperature=rng.choice([0.0, 1.0]),
            top_k=rng.choice([0, 1, 7]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.1]),
            seed=i,
            stop_token_ids=rng.sample(range(97), rng.choice([0, 1, 12])),
            stop=rng.choice([(), "q"]),
            logprobs=rng.choice([None, 0, 20]),
        )
        cases.append((prompt, params))
    return cases


@pytest.mark.parametrize("placement", BUCKETED)
def test_nothing_compiles_after_the_warm_up(placement):
    """200 mixed requests with aborts, prefix hits and preemption."""
    engine = Engine(
        RandomSource(MODEL),
        PairTokenizer(),  # type: ignore[arg-type]
        placement=PLACEMENTS[placement],
        config=engine_config(**BUCKETED[placement]),
    )
    assert engine.stats()["compile_count"] == 0
    engine.warmup()
    names = list(engine._runner.log.names)
    assert engine.stats()["compile_count"] == len(names) > 5
    assert engine.stats()["compile_seconds"] > 0
    seen = len(COMPILED)
    assert seen >= len(names), "JAX reports compilations"

    rng = random.Random(0)
    todo = mixed_requests(200)
    events = []
    while todo or engine.has_work:
        for _ in range(rng.choice([0, 1, 1, 7])):
            if todo:
                last = engine.submit(*todo.pop())
        events += engine.step()
        if rng.random() < 0.03:
            engine.abort(last)
    outputs = collect(engine, events)
    check_idle(engine)
    stats = engine.stats()
    assert len(outputs) == 200
    assert stats["preemptions"] > 0
    assert stats["prefix_hit_rate"] > 0
    engine.warmup()

    assert engine._runner.log.names == names
    assert stats["compile_count"] == len(names)
    assert COMPILED[seen:] == []
    # The listener was awake all the time.
    jax.jit(lambda x: x * 3 + len(COMPILED))(jnp.zeros(7))
    assert COMPILED[seen:] != []


KINDS = {
    "rings": (
        dataclasses.replace(
            MODEL,
            layers=(
                LayerSpec("chunked", kv_group="local"),
                LayerSpec("unrotated"),
                LayerSpec("chunked", kv_group="local"),
            ),
            attention_chunk=12,
        ),
        Placement.disaggregated((2, 1), (1, 2)),
    ),
    "experts": (
        dataclasses.replace(
            MODEL,
            layers=(LayerSpec(), LayerSpec(mlp="experts"), LayerSpec(mlp="experts")),
            experts=ExpertsConfig(8, 2, 32, normalise=True),
        ),
        Placement.disaggregated((1, 1, 2), (2, 1, 2)),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_compiles_late_in_other_models(kind):
    """Pages of two groups, and experts over their own axis."""
    model, placement = KINDS[kind]
    engine = Engine(
        RandomSource(model),
        PairTokenizer(),  # type: ignore[arg-type]
        placement=placement,
        config=engine_config(context_buckets=(32,), row_buckets=(2,)),
    )
    engine.warmup()
    seen = len(COMPILED)
    prompts, params = zip(*mixed_requests(60), strict=True)
    outputs = engine.generate(prompts, params)
    assert len(outputs) == 60
    check_idle(engine)
    assert COMPILED[seen:] == []


def test_warm_up_changes_no_token_and_needs_an_idle_engine():
    prompt = prompts_of([20], seed=5)[0]
    want = alone(tiny_engine("colocated"), prompt, seeded(1, 9))
    engine = Engine(
        RandomSource(MODEL),
        PairTokenizer(),  # type: ignore[arg-type]
        placement=PLACEMENTS["colocated"],
        config=engine_config(),
    )
    engine.warmup()
    same(alone(engine, prompt, seeded(1, 9)), want)
    name = engine.submit(prompt, seeded(1, 9))
    with pytest.raises(ValueError, match="expected an idle engine"):
        engine.warmup()
    engine.step()
    engine.abort(name)
    # A row is still active on the devices: the warm-up must not let it run into anything.
    engine.warmup()
    engine.pop_output(name)
    same(alone(engine, prompt, seeded(1, 9)), want)
    check_idle(engine)


def pointers(tree) -> list[int]:
    """Addresses of all shards of all arrays."""
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


@pytest.mark.parametrize("placement", [*BOTH, "colocated 2x2"])
def test_pools_and_rows_are_updated_in_place(placement, monkeypatch):
    """Every program deletes the pools it was given, and its own lie at the same address."""
    engine = tiny_engine(placement)
    runner = engine._runner
    calls = []

    def watch(name, reads):
        program = getattr(runner, name)

        def watched(*args):
            before = reads()
            where = pointers(before)
            result = program(*args)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before)), name
            assert pointers(reads()) == where, name
            calls.append(name)
            return result

        monkeypatch.setattr(runner, name, watched)

    watch("prefill", lambda: runner._pools[0])
    watch("decode", lambda: runner._pools[-1])
    if not engine.placement.is_colocated:
        watch("install", lambda: runner._pools[-1])
    install, decode = runner.install, runner.decode

    def rows_deleted(call):
        def watched(*args):
            before = runner._rows
            result = call(*args)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
            return result

        return watched

    monkeypatch.setattr(runner, "install", rows_deleted(install))
    monkeypatch.setattr(runner, "decode", rows_deleted(decode))
    engine.generate(prompts_of([3, 20, 40], seed=2), greedy(9))
    assert {"prefill", "decode"} <= set(calls)
    assert placement != "disaggregated" or "install" in calls
    check_idle(engine)


@pytest.mark.parametrize("placement", BOTH)
def test_device_memory_is_flat(placement):
    """What lives on the devices after each step does not grow with steps or requests."""
    engine = tiny_engine(placement)
    prompts = itertools.cycle(prompts_of([3, 17, 9, 30, 1], seed=2))

    def peak(requests):
        most = 0
        for i in range(requests):
            engine.submit(next(prompts), seeded(i, 12, logprobs=2))
        while engine.has_work:
            for event in engine.step():
                if event.finish_reason is not None:
                    engine.pop_output(event.request_id)
            most = max(most, sum(array.nbytes for array in jax.live_arrays()))
        return most

    peak(10)
    first, second = peak(40), peak(80)
    # Tokens that are not read yet vary with the timing; one copy of the pools would show.
    pools = engine.stats()["kv_pool_bytes"]
    assert abs(second - first) < pools / 2
    drain(engine)
    idle = sum(array.nbytes for array in jax.live_arrays())
    peak(20)
    assert sum(array.nbytes for array in jax.live_arrays()) <= idle + 4096
    check_idle(engine)
