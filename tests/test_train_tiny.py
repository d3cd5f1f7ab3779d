"""Training of tiny models on bytes: data, tokenizer, resumption, the experiment as a whole."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jinfire as jf
from experiments import train_tiny
from experiments.__main__ import main
from experiments.byte_text import (
    BOS,
    EOS,
    OTHER_FOLDERS,
    VOCAB_SIZE,
    Corpus,
    byte_tokenizer,
    corpus,
    even_rows,
    random_rows,
    standard_library,
)
from experiments.harness import Options
from experiments.tiny_models import TINY_MODELS
from experiments.trainer import RUN_NAME, STEPS_NAME, TrainConfig, Trainer

CONFIG = TrainConfig(
    model="kimi-smoke",
    steps=30,
    batch=4,
    learning_rate=1e-2,
    warm_up=2,
    save_every=10,
    held_out_rows=8,
    bias_rate=1e-2,
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of 41 small files, and some that do not count."""
    folder = tmp_path / "lib"
    for number in range(41):
        path = folder / f"package{number % 3}" / f"m{number:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"number = {number}\n" * 4)
    for name in ("test/test_x.py", "a/site-packages/x.py", "_sysconfigdata__linux.py", "x.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("never read")
    return folder


# -- data


def test_corpus_holds_files_out(sources: Path) -> None:
    found = corpus(sources)
    texts = {
        name: [bytes(part.astype(np.uint8)).decode() for part in _files(stream)]
        for name, stream in (("training", found.training), ("held_out", found.held_out))
    }
    assert len(texts["training"]) == 39
    assert len(texts["held_out"]) == 2
    assert len({*texts["training"], *texts["held_out"]}) == 41
    assert not any("never read" in text for part in texts.values() for text in part)
    assert corpus(sources).sha256 == found.sha256
    (sources / "package0" / "m00.py").write_text("changed")
    assert corpus(sources).sha256 != found.sha256


def _files(stream: np.ndarray) -> list[np.ndarray]:
    assert stream[-1] == EOS
    return [part[part != EOS] for part in np.split(stream, np.flatnonzero(stream == EOS) + 1)[:-1]]


def test_too_few_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("1")
    with pytest.raises(ValueError, match="expected 20 Python files, got 1"):
        corpus(tmp_path)


def test_standard_library_is_large_and_python() -> None:
    found = standard_library()
    assert found.training.size > 2_000_000
    assert found.held_out.size > 50_000
    assert found.training.max() == EOS
    assert "site-packages" in OTHER_FOLDERS
    text = bytes(found.training[found.training < 256].astype(np.uint8))
    assert b"def __init__(self" in text


def test_rows_are_runs_behind_a_start() -> None:
    stream = np.arange(200, dtype=np.uint16)
    rows = random_rows(stream, 5, 12, (0, 3))
    assert rows.shape == (5, 13)
    assert rows.dtype == np.int32
    assert (rows[:, 0] == BOS).all()
    assert (np.diff(rows[:, 1:], axis=1) == 1).all()
    np.testing.assert_array_equal(rows, random_rows(stream, 5, 12, (0, 3)))
    assert not np.array_equal(rows, random_rows(stream, 5, 12, (0, 4)))
    even = even_rows(stream, 3, 12)
    np.testing.assert_array_equal(even[:, 1], [0, 94, 188])
    assert even[-1, -1] == 199


# -- tokenizer


def test_tokenizer_is_the_bytes(tmp_path: Path) -> None:
    text = "def f(x):\n\treturn  'é∑🙂\x00\x7f\xad\u0100'  # \r\n"
    byte_tokenizer().save(tmp_path)
    tokenizer = jf.Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(text) == [BOS, *text.encode()]
    assert tokenizer.encode(text, add_special=False) == list(text.encode())
    assert tokenizer.decode([BOS, *text.encode(), EOS]) == text
    assert tokenizer.decode([0xE2, 0x28]) == "\ufffd("
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (BOS, {EOS})
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.encode("<eos>", add_special=False) == [EOS]


# -- models


@pytest.mark.parametrize("name", TINY_MODELS)
def test_models_are_what_they_say(name: str) -> None:
    model = jf.TrainableModel(TINY_MODELS[name])
    config = model.config
    assert config.vocab_size == VOCAB_SIZE
    assert (config.bos_id, config.eos_ids) == (BOS, {EOS})
    attention = [layer.attention for layer in config.layers]
    experts = [layer.mlp == "experts" for layer in config.layers]
    if name.startswith("llama4"):
        assert attention == ["chunked"] * (len(attention) - 1) + ["unrotated"]
        assert all(experts)
    else:
        assert set(attention) == {"latent"}
        assert experts == [False] + [True] * (len(experts) - 1)
    if name.endswith("tiny"):
        assert 1e6 < model.num_parameters < 3e6


# -- training


def trainer(folder: Path, config: TrainConfig = CONFIG, **identity: str) -> Trainer:
    rng = np.random.default_rng(0)
    stream = rng.integers(97, 105, 4000).astype(np.uint16)
    return Trainer(config, Corpus(stream, stream[:400], "none"), folder, identity)


def run_to_end(one: Trainer) -> dict[str, np.ndarray]:
    for _ in one.steps():
        pass
    one.close()
    return {name: np.asarray(value) for name, value in one.params.items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run_to_end(trainer(tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("broken_off_after", [4, 15, 30])
def test_resumed_run_gives_the_same_bits(
    tmp_path: Path, uninterrupted: dict[str, np.ndarray], broken_off_after: int
) -> None:
    first = trainer(tmp_path)
    for step in first.steps():
        if step.number == broken_off_after:
            break
    first.close()
    second = trainer(tmp_path)
    # At the last step written: every tenth.
    assert second.done == broken_off_after // 10 * 10
    again = run_to_end(second)
    assert second.compilations == (0 if broken_off_after == 30 else 1)
    for name, value in uninterrupted.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_checkpoints_of_another_run_are_left_behind(tmp_path: Path) -> None:
    run_to_end(trainer(tmp_path, sources="old"))
    assert json.loads((tmp_path / RUN_NAME).read_text())["sources"] == "old"
    same, other = trainer(tmp_path, sources="old"), trainer(tmp_path, sources="new")
    assert (same.done, other.done) == (30, 0)
    longer = trainer(tmp_path, dataclasses.replace(CONFIG, steps=31), sources="new")
    assert longer.done == 0


def test_loss_falls_and_seeds_differ(tmp_path: Path, uninterrupted: dict[str, np.ndarray]) -> None:
    one = trainer(tmp_path, dataclasses.replace(CONFIG, seed=1))
    before = one.held_out(one.params).loss
    losses = [step.loss for step in one.steps()]
    after = one.held_out(one.params)
    one.close()
    # Eight letters, equally likely.
    assert before > 5
    assert np.log(8) - 0.1 < after.loss < 3.2
    assert losses[-1] < losses[0] - 2
    assert after.load.sum() == 2 * 8 * 64
    assert (after.imbalance >= 1).all()
    assert not np.array_equal(np.asarray(one.params["head.weight"]), uninterrupted["head.weight"])


def test_selection_biases_move_with_the_rate_alone(uninterrupted: dict[str, np.ndarray]) -> None:
    bias = uninterrupted["layers.1.mlp.router.bias"]
    moves = bias / CONFIG.bias_rate
    np.testing.assert_allclose(moves, np.round(moves), atol=1e-4)
    assert np.abs(moves).max() <= CONFIG.steps
    assert moves.any()


# -- the experiment


def test_smoke_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(cache=tmp_path / "cache")
    monkeypatch.setattr("experiments.__main__.Options", lambda **_: options)
    with pytest.raises(FileNotFoundError, match="experiments train_tiny"):
        train_tiny.trained_model("kimi-tiny", options)

    def run(*arguments: str) -> dict:
        only = ["--only", "model=llama4-smoke", "--results", str(tmp_path)]
        assert main(["train_tiny", "--smoke", *only, *arguments]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    document = run()
    assert document["written"] == 1
    values = document["rows"][0]["values"]
    assert values["held_out_bits_per_byte"] < values["untrained_bits_per_byte"] - 0.5
    assert values["training_tokens"] == 6 * 8 * 64
    folder = Path(document["outputs"][0])
    assert folder == train_tiny.trained_model("llama4-smoke", options)
    assert not (folder.parent / STEPS_NAME).exists()

    model = jf.Model.from_pretrained(folder, dtype="bfloat16")
    assert model.tokenizer is not None
    assert model.tokenizer.encode("x") == [BOS, ord("x")]
    assert np.isfinite(model.logits(np.asarray([[BOS, *b"import sys"]]))).all()
    whole = jf.Model.from_pretrained(train_tiny.trained_model("llama4-smoke", options, "float32"))
    for name, value in whole.params().items():
        rounded = value.astype(jax.numpy.bfloat16)
        np.testing.assert_array_equal(rounded, model.params()[name], err_msg=name)

    assert run()["written"] == 0
    # A row without its weights is measured again: the weights are what others need.
    sha256 = _row(tmp_path)["model_sha256"]
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink()
    folder.rmdir()
    assert run()["written"] == 1
    assert folder.exists()
    assert _row(tmp_path)["model_sha256"] == sha256


def _row(folder: Path) -> dict:
    return json.loads((folder / "train_tiny.jsonl").read_text())
