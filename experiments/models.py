"""The models that experiments run: where they are and what their token ids are."""

import dataclasses
import pathlib

import jinfire as jf
from experiments.harness import ROOT, Options, file_sha256


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """A checkpoint by name. `folder` None is one that `jinfire fetch` gets."""

    name: str
    vocab_size: int
    folder: str | None = None

    def path(self, options: Options) -> pathlib.Path:
        if self.folder is not None:
            return ROOT / self.folder
        return options.model or jf.fetch(self.name)

    def sha256(self, options: Options) -> str:
        return file_sha256(self.path(options))


MODELS = {
    model.name: model
    for model in (
        ModelFile("smollm2", vocab_size=49_152),
        ModelFile("golden_llama31", vocab_size=320, folder="tests/golden/llama31_f32"),
        ModelFile("golden_llama4", vocab_size=288, folder="tests/golden/llama4_nested_scout_f32"),
        ModelFile("golden_kimi_k25", vocab_size=288, folder="tests/golden/kimi_k25_int4_sharded"),
        ModelFile("golden_qwen3_moe", vocab_size=352, folder="tests/golden/qwen3_moe_f32"),
    )
}
