"""One strict JAX set-up for every test: 8 virtual CPU devices, no accidental promotion."""

from collections.abc import Callable
from pathlib import Path

import hypothesis
import jax
import pytest

TESTS = Path(__file__).parent
DEVICES = 8

# Before the first use of a device, hence at import. Test workers and later runs share the
# compilation cache; it lies in the checkout, so that HOME and other machines have no say.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(TESTS.parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The same examples everywhere; no deadline, because a first example may compile.
hypothesis.settings.register_profile(
    "jinfire", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("jinfire")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects `long` tests unless --long or a -m expression asks for them."""
    if config.getoption("--long") or "long" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Path]:
    """The folder of a golden checkpoint: `golden("llama31_f32")`."""

    def folder(name: str) -> Path:
        path = TESTS / "golden" / name
        if not path.is_dir():
            known = sorted(p.name for p in path.parent.glob("*") if p.is_dir())
            raise ValueError(f"no golden case {name!r}; there are {known}")
        return path

    return folder
