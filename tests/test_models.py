"""The registry: every family's record agrees with itself and with the abstract tree."""

import pytest

from jinfire.checkpoints.source import NameMap
from jinfire.errors import UnsupportedConfig
from jinfire.models import MODELS, ModelFamily, parse_config
from jinfire.models.spec import abstract_tree

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,  # two digits in a layer's name
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}

families = pytest.mark.parametrize("family", MODELS.values(), ids=MODELS)


def small(family: ModelFamily, **changes):
    return parse_config({"model_type": family.name, **SMALL, **changes}, {"eos_token_id": 2})


def test_keys_are_names() -> None:
    assert list(MODELS) == [family.name for family in MODELS.values()]


@families
def test_config_names_its_family(family: ModelFamily) -> None:
    assert small(family).family == family.name
    for architecture in family.architectures:
        assert small(family, architectures=[architecture]) == small(family)
    with pytest.raises(UnsupportedConfig, match=f"architectures.*{family.architectures[0]}"):
        small(family, architectures=["OtherModel"])


@families
def test_tensor_names_are_those_of_the_tree(family: ModelFamily) -> None:
    """Each logical name of the untied model has one name in each format, and back."""
    tree = abstract_tree(small(family, tie_word_embeddings=False))
    for table in (family.tensor_names, family.gguf.tensor_names if family.gguf else None):
        if table is None:
            continue
        names = NameMap(table)
        native = {name: names.native(name) for name in tree}
        assert len(set(native.values())) == len(tree)
        assert {names.logical(name) for name in native.values()} == tree.keys()
        patterns = {name.replace("layers.0.", "layers.{i}.") for name in tree}
        assert table.keys() <= patterns  # nothing that the model does not have
