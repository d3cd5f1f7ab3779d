"""The gradient of the grouped product: against `jax.lax.ragged_dot`, float64 and differences."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import GROUPED_MATMUL
from pallas_kernels.kernel import ArgSpec

SPECS = [spec for spec in GROUPED_MATMUL.arg_specs if not spec.compile_only]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def weighted_sum(product, x, weights, sizes, pull) -> jax.Array:
    """A scalar whose gradient with respect to the product is `pull`, where that is not NaN."""
    out = product(x, weights, sizes)
    return jnp.sum(jnp.where(jnp.isnan(pull), 0, out.astype(jnp.float32) * pull))


def ragged(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    out = jax.lax.ragged_dot(x, jnp.swapaxes(weights, 1, 2), sizes)
    in_group = jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes)
    return jnp.where(in_group, out, 0)


def gradients(product, *args: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.jit(jax.grad(partial(weighted_sum, product), argnums=(0, 1)))(*args)


def expected(x, weights, sizes, pull) -> tuple[np.ndarray, np.ndarray]:
    """Float64; zero for rows of no group and for groups without rows, whatever they hold."""
    dx = np.zeros(x.shape)
    dw = np.zeros(weights.shape)
    end = 0
    for e, size in enumerate(sizes):
        rows = slice(end, end + size)
        end += size
        if size:
            dx[rows] = pull[rows].astype(np.float64) @ weights[e].astype(np.float64)
            dw[e] = pull[rows].astype(np.float64).T @ x[rows].astype(np.float64)
    return dx, dw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_matches_float64(spec: ArgSpec, dtype: str) -> None:
    """Rows of no group and weights of empty groups are NaN, and so are their outputs' gradients."""
    arrays = spec.make(3, DTYPES[dtype])
    x, weights, sizes = arrays["x"], arrays["weights"], arrays["group_sizes"]
    pull = np.random.default_rng(1).normal(size=(x.shape[0], weights.shape[1])).astype(x.dtype)
    pull[sum(sizes) :] = np.nan
    primals = jnp.asarray(x), jnp.asarray(weights)
    _, pulled_back = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes)), *primals)
    got, want = pulled_back(jnp.asarray(pull)), expected(x, weights, sizes, pull)
    for ours, reference in zip(got, want, strict=True):
        assert ours.dtype == x.dtype
        error = np.abs(np.asarray(ours).astype(np.float64) - reference).max()
        assert error <= GROUPED_MATMUL.tolerance[dtype] * max(np.abs(reference).max(), 1e-30)
        assert not np.asarray(ours)[reference == 0].any()


@pytest.mark.parametrize(
    "sizes", [(3, 0, 17, 1, 4), (0, 0, 0), (0, 30), (1,) * 30, (29, 0, 1)], ids=str
)
def test_matches_ragged_dot(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 24)).astype(np.float32)
    weights = rng.normal(size=(len(sizes), 16, 24)).astype(np.float32)
    pull = rng.normal(size=(30, 16)).astype(np.float32)
    args = (x, weights, np.asarray(sizes, np.int32), pull)
    for ours, theirs in zip(
        gradients(grouped_matmul, *args), gradients(ragged, *args), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_matches_differences() -> None:
    """Along random directions of rows and weights at once; the product is linear in each."""
    rng = np.random.default_rng(2)
    sizes = np.asarray([5, 0, 9, 2], np.int32)
    shapes = ((20, 24), (4, 16, 24))
    point = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    pull = rng.normal(size=(20, 16)).astype(np.float32)
    slopes = gradients(grouped_matmul, *point, sizes, pull)

    def at(step: float, along: list[np.ndarray]) -> float:
        x, weights = (p.astype(np.float64) + step * a for p, a in zip(point, along, strict=True))
        return float(np.sum(GROUPED_MATMUL.reference(x, weights, sizes) * pull))

    for _ in range(4):
        along = [rng.normal(size=shape) for shape in shapes]
        slope = sum(
            float(np.sum(s * a)) for s, a in zip(map(np.asarray, slopes), along, strict=True)
        )
        # Exact for a quadratic, whatever the step.
        assert (at(1, along) - at(-1, along)) / 2 == pytest.approx(slope, rel=1e-5)


def test_inference_compiles_to_what_it_was() -> None:
    """Nothing of the gradient in a program that takes none."""
    args = SPECS[0].make(0).values()

    def instructions(product) -> list[str]:
        def program(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
            return product(x, weights, sizes)

        text = jax.jit(program).lower(*args).compile().as_text() or ""
        # Metadata names places in the source.
        lines = (line.partition(", metadata=")[0] for line in text.splitlines())
        return [line for line in lines if line.lstrip().startswith(("%", "ROOT %"))]

    plain = instructions(GROUPED_MATMUL)
    assert len(plain) > 20
    assert instructions(grouped_matmul) == plain
