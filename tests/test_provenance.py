"""What a row says of the code that made it."""

import subprocess
from pathlib import Path

import pytest

from experiments import harness


def test_source_hash_ignores_words_about_code(tmp_path: Path) -> None:
    file = tmp_path / "m.py"

    def of(text: str) -> str:
        file.write_text(text)
        return harness.source_hash(["m.py"], tmp_path)

    first = of('"""Doc."""\nx = 1\n')
    assert of("# A comment.\nx = 1\n") == first
    assert of("x = 2\n") != first
    with pytest.raises(ValueError, match="does not exist"):
        harness.source_hash(["gone"], tmp_path)


def test_rows_of_a_cpu_stand_whatever_changes_in_gpu_kernels(tmp_path: Path) -> None:
    (tmp_path / "pallas_kernels").mkdir()
    plain = tmp_path / "pallas_kernels" / "product_xla.py"
    kernel = tmp_path / "pallas_kernels" / "product_mosaic.py"

    def hashes() -> tuple[str, str]:
        whole = harness.source_hash(["pallas_kernels"], tmp_path)
        return harness.source_hash(["pallas_kernels"], tmp_path, harness.GPU_SOURCES), whole

    plain.write_text("x = 1")
    kernel.write_text("x = 1")
    on_cpu, on_gpu = hashes()
    kernel.write_text("x = 2")
    assert hashes()[0] == on_cpu
    assert hashes()[1] != on_gpu
    plain.write_text("x = 2")
    assert hashes()[0] != on_cpu


@pytest.mark.parametrize("pattern", harness.GPU_SOURCES)
def test_gpu_sources_exist(pattern: str) -> None:
    assert list(harness.ROOT.glob(pattern))


def test_git_state(tmp_path: Path) -> None:
    assert harness.git_state(tmp_path / "nowhere") == ("unknown", True)

    def git(*command: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "--quiet", "--no-verify", "-m", "a")
    commit, dirty = harness.git_state(tmp_path)
    assert len(commit) == 40
    assert not dirty
    (tmp_path / "experiments" / "results").mkdir(parents=True)
    (tmp_path / "experiments" / "results" / "toy.jsonl").write_text("{}")
    assert not harness.git_state(tmp_path)[1]
    (tmp_path / "a").write_text("2")
    assert harness.git_state(tmp_path)[1]
