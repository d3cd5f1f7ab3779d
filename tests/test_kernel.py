"""Kernel records: every XLA form over every argument set, counts, dispatch, tuned block sizes."""

import dataclasses
import inspect
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import KERNELS, SMOKE_WORKLOADS, WORKLOADS, Workload, counted
from pallas_kernels import kernel as kernel_module
from pallas_kernels.kernel import ArgSpec, Kernel, device_slug, is_hopper, tuned_entries

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
CASES = [
    pytest.param(kernel, spec, name, id=f"{kernel.name}-{spec.name}-{name}".replace(" ", "_"))
    for kernel in KERNELS.values()
    for spec in kernel.arg_specs
    for name in DTYPES
    if name in kernel.tolerance and not spec.compile_only
]


@pytest.mark.parametrize(("kernel", "spec", "dtype"), CASES)
def test_xla_form_matches_float64(kernel: Kernel, spec: ArgSpec, dtype: str) -> None:
    arrays = spec.make(7, DTYPES[dtype])
    want = kernel.reference(**arrays, **spec.static)
    call = jax.jit(partial(kernel, implementation="xla", **spec.static))
    got = np.asarray(call(*arrays.values()))
    assert kernel.exact or got.dtype == DTYPES[dtype]
    assert kernel.error(got, want) <= kernel.tolerance[dtype]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_counts_are_of_what_is_used(kernel: Kernel) -> None:
    for spec in kernel.arg_specs:
        if spec.compile_only:
            continue
        arrays = spec.make(0)
        xla = partial(kernel, implementation="xla", **spec.static)
        there = sum(
            x.size * x.dtype.itemsize
            for x in [*arrays.values(), jax.eval_shape(xla, *arrays.values())]
        )
        nothing = "group_sizes" in arrays and not arrays["group_sizes"].any()
        assert nothing or kernel.flops(**arrays, **spec.static) > 0
        assert nothing or 0 < kernel.bytes(**arrays, **spec.static) <= there


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_arguments_have_the_references_names(kernel: Kernel) -> None:
    names = list(inspect.signature(kernel.reference).parameters)
    for spec in kernel.arg_specs:
        shapes = spec.shapes(np.float32)
        assert names[: len(shapes)] == list(shapes)
        assert set(spec.static) <= set(names[len(shapes) :])
        if not spec.compile_only:
            arrays = spec.make(0)
            assert {n: (x.shape, x.dtype) for n, x in arrays.items()} == {
                n: (x.shape, x.dtype) for n, x in shapes.items()
            }


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_argument_sets_have_names_of_their_own(kernel: Kernel) -> None:
    names = [spec.name for spec in kernel.arg_specs]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_space_is_of_the_block_sizes(kernel: Kernel) -> None:
    if kernel.blocks is None:
        assert not kernel.space
        return
    fields = {field.name: field.default for field in dataclasses.fields(kernel.blocks)}
    for name, values in kernel.space.items():
        assert name in fields
        assert len(set(values)) == len(values) > 1


def test_compile_only_sets_make_no_arrays() -> None:
    shape = jax.ShapeDtypeStruct((1 << 40,), jnp.float32)
    spec = ArgSpec("huge", lambda rng, dtype: {"x": shape}, {}, compile_only=True)
    assert spec.shapes() == {"x": shape}
    with pytest.raises(ValueError, match="huge: expected a set that runs"):
        spec.make(0)


@pytest.mark.parametrize("workload", SMOKE_WORKLOADS, ids=lambda w: f"{w.kernel}-{w.name}")
def test_workloads_are_right_and_countable(workload: Workload) -> None:
    kernel = KERNELS[workload.kernel]
    (arrays,) = workload.buffers(1)
    call = partial(kernel, **workload.static)
    got = np.asarray(jax.jit(call)(*arrays.values()))
    host = {name: np.asarray(x) for name, x in arrays.items()}
    want = kernel.reference(**host, **workload.static)
    assert kernel.error(got, want) <= kernel.tolerance["bfloat16"]
    assert kernel.bytes(**counted(arrays), **workload.static) > 0
    assert kernel.flops(**counted(arrays), **workload.static) > 0


def test_workloads_cover_every_kernel() -> None:
    assert {w.kernel for w in WORKLOADS} == {w.kernel for w in SMOKE_WORKLOADS} == set(KERNELS)
    for workload in WORKLOADS:
        shapes = workload.shapes()
        kernel = KERNELS[workload.kernel]
        assert list(inspect.signature(kernel.reference).parameters)[: len(shapes)] == list(shapes)
        assert kernel.refusal(*shapes.values(), **workload.static) is None


# -- dispatch


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int = 8


def multiply(x: jax.Array, *, by: int = 2, blocks: Blocks, interpret: object = False) -> jax.Array:
    return x * by * blocks.rows


TOY = Kernel(
    name="toy",
    reference=lambda x, by: by * x,
    implementations={"xla": lambda x, *, by=2: x * by, "mosaic": multiply},
    arg_specs=(),
    tolerance={},
    flops=lambda x: x.size,
    bytes=lambda x: 2 * x.nbytes,
    unsupported=lambda x, *, by=2: "no halves" if x.dtype == np.float16 else None,
    blocks=Blocks,
    space={"rows": (8, 16)},
)


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "device_kind", lambda: "NVIDIA H200")


def test_unknown_implementation_is_named() -> None:
    with pytest.raises(ValueError, match=r"toy among \['mosaic', 'xla'\], received 'cuda'"):
        TOY(jnp.ones(3), implementation="cuda")


def test_mosaic_on_request_says_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match="toy: the Mosaic form does not take this: no halves"):
        TOY(jnp.ones(3, jnp.float16), implementation="mosaic")


def test_cpu_takes_the_xla_form() -> None:
    assert float(jax.jit(TOY)(jnp.float32(4))) == 8


@pytest.mark.parametrize(
    ("kind", "dtype", "calls"),
    [
        ("NVIDIA H200", jnp.float32, 1),
        ("NVIDIA H100 80GB HBM3", jnp.float32, 1),
        (None, jnp.float32, 1),
        ("NVIDIA H200", jnp.float16, 0),
        ("NVIDIA A100-SXM4-40GB", jnp.float32, 0),
        ("cpu", jnp.float32, 0),
    ],
)
def test_dispatch_follows_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, dtype: np.dtype, calls: int
) -> None:
    """The Mosaic form is in the program at all only where the device may be a Hopper chip."""
    traced = []

    def mosaic(x: jax.Array, **options: object) -> jax.Array:
        traced.append(options)
        return x

    monkeypatch.setattr(kernel_module, "device_kind", lambda: kind)
    kernel = dataclasses.replace(TOY, implementations={**TOY.implementations, "mosaic": mosaic})
    got = jax.jit(partial(kernel, by=3))(jnp.ones((), dtype))
    assert float(got) == 3
    assert len(traced) == calls
    assert all(options == {"by": 3, "blocks": Blocks()} for options in traced)


def test_interpret_and_blocks_reach_the_mosaic_form() -> None:
    seen = {}

    def mosaic(x: jax.Array, **options: object) -> jax.Array:
        seen.update(options)
        return x

    kernel = dataclasses.replace(TOY, implementations={**TOY.implementations, "mosaic": mosaic})
    kernel(jnp.ones(3), implementation="mosaic", interpret=True, blocks=Blocks(rows=64))
    assert seen["blocks"] == Blocks(rows=64)
    assert type(seen["interpret"]).__name__ == "InterpretGPUParams"


def test_kernel_without_blocks_is_called_without() -> None:
    kernel = dataclasses.replace(
        TOY, blocks=None, space={}, implementations={"xla": jnp.negative, "mosaic": jnp.abs}
    )
    assert float(kernel(jnp.float32(-4), implementation="mosaic")) == 4


# -- tuned block sizes


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries for x [M, 128] at two row counts."""
    entries = [
        {"shapes": [[[rows, 128], "float32"]], "blocks": {"rows": blocks}}
        for rows, blocks in ((16, 16), (4096, 128))
    ]
    document = {"kernels": {"toy": entries}}
    (tmp_path / "nvidia_h200.json").write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setattr(kernel_module, "tuned_entries", partial(tuned_entries, folder=tmp_path))


@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ((16, 128), np.float32, 16),
        ((1, 128), np.float32, 16),
        ((2048, 128), np.float32, 128),
        ((16, 64), np.float32, 8),
        ((16, 128), np.float16, 8),
        ((16,), np.float32, 8),
    ],
)
def test_blocks_of_the_nearest_shapes(
    tuned: None, shape: tuple[int, ...], dtype: np.dtype, rows: int
) -> None:
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert TOY.tuned_blocks([x], "NVIDIA H200") == Blocks(rows)


def test_defaults_where_nothing_was_tuned(tuned: None) -> None:
    x = jax.ShapeDtypeStruct((16, 128), np.float32)
    assert TOY.tuned_blocks([x], "NVIDIA H100 80GB HBM3") == Blocks()
    assert TOY.tuned_blocks([x], None) == Blocks()
    assert TOY.tuned_blocks([x, x], "NVIDIA H200") == Blocks()


def test_tuned_blocks_reach_the_kernel(tuned: None, on_h200: None) -> None:
    assert float(TOY(jnp.ones((16, 128)), implementation="mosaic")[0, 0]) == 2 * 16


def test_committed_block_sizes_fit_the_kernels() -> None:
    """Of every device that was tuned for; none has been so far."""
    for path in kernel_module.TUNED.glob("*.json"):
        for name, entries in json.loads(path.read_text(encoding="utf-8"))["kernels"].items():
            for entry in entries:
                assert KERNELS[name].blocks(**entry["blocks"]) is not None
                assert len(entry["shapes"]) == len(KERNELS[name].arg_specs[0].shapes())


def test_names_of_devices() -> None:
    assert device_slug("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"
    assert is_hopper("NVIDIA H200")
    assert is_hopper("NVIDIA GH200 480GB")
    assert not is_hopper("NVIDIA B200")
    assert not is_hopper("cpu")


def test_root_exports() -> None:
    assert set(pallas_kernels.__all__) <= set(vars(pallas_kernels))
