"""Metrics from hand-written event logs with known answers."""

import dataclasses
import math

import numpy as np
import pytest

from jinfire.metrics import (
    DEFINITIONS,
    SUMMARIZED,
    Event,
    EventLog,
    RequestMetrics,
    request_metrics,
    summary,
)


def log_of(*events, request_id="r"):
    log = EventLog()
    for kind, time_s, *value in events:
        log.record(request_id, kind, time_s, *value)
    return log.pop(request_id)


FULL = (
    ("arrival", 10.0, 7),
    ("admitted", 10.5, 4),
    ("prefill_start", 11.0),
    ("prefill_end", 11.25),
    ("kv_sent", 11.25, 4096),
    ("kv_received", 11.5, 2960),
    ("token", 11.625),
    ("token", 12.0),
    ("token", 12.5),
    ("finish", 12.5, "length"),
)


def test_disaggregated_request():
    metrics = request_metrics(log_of(*FULL))
    assert metrics.ttft_s == 1.625
    assert metrics.queue_s == 1.0
    assert metrics.prefill_s == 0.25
    assert metrics.transfer_s == 0.25
    assert metrics.first_decode_s == 0.5
    assert metrics.tpot_s == (12.5 - 11.625) / 2
    assert metrics.itl_s == (0.375, 0.5)
    assert metrics.e2e_s == 2.5
    assert metrics.normalized_latency_s == 2.5 / 3
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens) == (7, 4, 3)
    assert (metrics.kv_bytes, metrics.preemptions, metrics.finish_reason) == (4096, 0, "length")
    assert metrics.kv_bytes_sent == 2960


def test_first_token_is_not_an_inter_token_gap():
    metrics = request_metrics(log_of(*FULL))
    assert len(metrics.itl_s) == metrics.output_tokens - 1
    assert sum(metrics.itl_s) == pytest.approx(metrics.tpot_s * 2)


def test_colocated_request_has_no_transfer():
    events = [event for event in FULL if not event[0].startswith("kv")]
    metrics = request_metrics(log_of(*events))
    assert math.isnan(metrics.transfer_s)
    assert metrics.kv_bytes == 0
    assert metrics.first_decode_s == 0.75


@pytest.mark.parametrize(
    ("tokens", "missing"),
    [
        ((), {"ttft_s", "tpot_s", "e2e_s", "first_decode_s", "normalized_latency_s"}),
        ((11.625,), {"tpot_s", "first_decode_s"}),
    ],
)
def test_missing_is_nan_and_never_zero(tokens, missing):
    events = [event for event in FULL if event[0] != "token"]
    metrics = request_metrics(log_of(*events, *(("token", t) for t in tokens)))
    for name in ("ttft_s", "tpot_s", "e2e_s", "first_decode_s", "normalized_latency_s"):
        assert math.isnan(getattr(metrics, name)) == (name in missing), name
    assert metrics.itl_s == ()
    assert metrics.output_tokens == len(tokens)


def test_rejected_request():
    metrics = request_metrics(log_of(("arrival", 1.0, 9), ("status", 1.0, "RequestTooLong")))
    assert metrics.status == "RequestTooLong"
    assert metrics.finish_reason is None
    assert not metrics.completed
    assert not metrics.meets(ttft_s=100)
    assert math.isnan(metrics.queue_s)


def test_tokens_that_arrive_together_share_the_gap():
    events = log_of(
        ("arrival", 0.0, 1), ("token", 1.0), ("token", 3.0, 4), ("token", 4.0), ("token", 4.0)
    )
    metrics = request_metrics(events)
    assert metrics.output_tokens == 7
    assert metrics.itl_s == (0.5, 0.5, 0.5, 0.5, 0.5, 0.5)
    assert metrics.tpot_s == 0.5


def test_tokens_with_the_first_have_no_gap():
    metrics = request_metrics(log_of(("arrival", 0.0, 1), ("token", 1.0, 2), ("token", 3.0, 2)))
    assert metrics.itl_s == (1.0, 1.0)
    assert metrics.tpot_s == 2.0 / 3


def test_preempted_request_counts_first_times_and_all_bytes():
    events = log_of(
        *FULL[:7],
        ("preempted", 11.7),
        ("admitted", 11.8, 0),
        ("prefill_start", 11.9),
        ("prefill_end", 12.0),
        ("kv_sent", 12.0, 1000),
        ("kv_received", 12.1, 700),
        *FULL[7:],
    )
    metrics = request_metrics(events)
    assert (metrics.preemptions, metrics.kv_bytes, metrics.cached_tokens) == (1, 5096, 4)
    assert metrics.kv_bytes_sent == 3660
    assert (metrics.queue_s, metrics.prefill_s, metrics.transfer_s) == (1.0, 0.25, 0.25)


def test_objectives():
    metrics = request_metrics(log_of(*FULL))
    assert metrics.meets(ttft_s=1.625, tpot_s=0.4375)
    assert not metrics.meets(ttft_s=1.6)
    assert not metrics.meets(tpot_s=0.4)
    assert not dataclasses.replace(metrics, finish_reason="abort").meets()
    assert not dataclasses.replace(metrics, ttft_s=math.nan).meets()


def test_log_refuses_unknown_kinds_and_mixed_requests():
    log = EventLog()
    with pytest.raises(ValueError, match="expected one of arrival"):
        log.record("a", "arrived")
    with pytest.raises(ValueError, match=r"got \['a', 'b'\]"):
        request_metrics([Event("a", "arrival", 0.0), Event("b", "arrival", 0.0)])
    with pytest.raises(ValueError, match="one request"):
        request_metrics([])


def test_log_forgets_what_was_popped():
    log = EventLog()
    log.record("a", "arrival")
    log.record("b", "arrival")
    assert len(log.events("a")) == 1
    assert len(log) == 2
    assert len(log.pop("a")) == 1
    assert log.pop("a") == []
    assert len(log) == 1


def with_ttft(values):
    base = request_metrics(log_of(*FULL))
    return [dataclasses.replace(base, ttft_s=value) for value in values]


def test_summary_percentiles_n_and_missing():
    result = summary(with_ttft([*map(float, range(1, 101)), math.nan]))["ttft_s"]
    assert (result.n, result.requests, result.missing) == (100, 100, 1)
    assert [result.percentiles[p].value for p in (50, 90, 99)] == [50, 90, 99]
    assert result.mean.value == 50.5
    assert result.definition == DEFINITIONS["ttft_s"]
    for estimate in (result.mean, *result.percentiles.values()):
        assert estimate.low <= estimate.value <= estimate.high
    expected = 1.96 * np.std(np.arange(1, 101)) / 10
    assert (result.mean.high - result.mean.low) / 2 == pytest.approx(expected, rel=0.1)


def test_summary_percentiles_agree_with_numpy():
    values = np.random.default_rng(1).exponential(size=37)
    result = summary(with_ttft(values.tolist()), percentiles=(1, 50, 90, 100))["ttft_s"]
    for p, estimate in result.percentiles.items():
        assert estimate.value == np.percentile(values, p, method="inverted_cdf")


def test_summary_of_nothing_is_nan():
    for metrics in ([], with_ttft([math.nan])):
        result = summary(metrics)["ttft_s"]
        assert (result.n, result.missing) == (0, len(metrics))
        assert math.isnan(result.percentiles[50].value)


def test_summary_weights_gaps_by_token():
    base = request_metrics(log_of(*FULL))
    metrics = [
        dataclasses.replace(base, itl_s=(1.0,) * 9, tpot_s=1.0),
        dataclasses.replace(base, itl_s=(3.0,), tpot_s=3.0),
    ]
    result = summary(metrics)
    assert result["itl_s"].mean.value == pytest.approx(1.2)
    assert (result["itl_s"].n, result["itl_s"].requests) == (10, 2)
    assert result["tpot_s"].mean.value == 2.0


def test_every_time_has_a_definition():
    names = {f.name for f in dataclasses.fields(RequestMetrics) if f.name.endswith("_s")}
    assert names <= set(SUMMARIZED) <= set(DEFINITIONS)
