"""The lock files: complete, exact, hashed, and free of any registry's address."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RUNTIME = PROJECT["project"]["dependencies"]
BUILD = PROJECT["dependency-groups"]["build"]
AOT = PROJECT["dependency-groups"]["aot"]
DEV = RUNTIME + PROJECT["project"]["optional-dependencies"]["dev"]


def locked(name: str) -> dict[str, str]:
    """Package -> version of a lock file, after checking that every entry is exact and hashed."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8").replace("\\\n", " ")
    versions = {}
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(
            r"([a-z0-9-]+)==(\S+)( ;[^-]*?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*", line
        )
        assert match, f"{name}: not an exact version with hashes: {line[:100]!r}"
        versions[match[1]] = match[2]
    return versions


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("runtime.lock", RUNTIME + BUILD), ("dev.lock", DEV), ("aot.lock", AOT)],
)
def test_lock_satisfies_the_project(name: str, wanted: list[str]) -> None:
    versions = locked(name)
    problems = []
    for requirement in map(Requirement, wanted):
        version = versions.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version):
            problems.append(f"{requirement}: {name} has {version}; run `make lock`")
    assert not problems, problems


def test_locks_agree() -> None:
    runtime, dev = locked("runtime.lock"), locked("dev.lock")
    common = runtime.keys() & dev.keys()
    assert {name: runtime[name] for name in common} == {name: dev[name] for name in common}


def test_jax_is_pinned_once() -> None:
    assert locked("runtime.lock")["jax"] == locked("runtime.lock")["jaxlib"]
    for plugin in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        assert locked("aot.lock")[plugin] == locked("runtime.lock")["jax"]
    extra = PROJECT["project"]["optional-dependencies"]["cuda12"]
    assert extra == [f"jax[cuda12]=={locked('runtime.lock')['jax']}"]
