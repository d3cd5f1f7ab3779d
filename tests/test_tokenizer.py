"""Tokenizers from `tokenizer.json` and GGUF metadata, chat templates of strangers."""

import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from tokenizers import pre_tokenizers

from jinfire.checkpoints import load_tokenizer
from jinfire.errors import CheckpointMismatch, UnsupportedConfig
from jinfire.fetch import cached
from jinfire.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "i n", "n g", "in g"]
SPECIAL = ["<|end|>", "<|start|>", "<|turn|>"]


def gguf_metadata(**changes) -> dict:
    """A tiny byte-level BPE vocabulary in the form GGUF keeps it."""
    tokens = SPECIAL + ["<user>"] + ALPHABET + [m.replace(" ", "") for m in MERGES]
    types = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": types,
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata())


def pieces(tokenizer: Tokenizer, text: str, **options) -> list[str | None]:
    return [tokenizer.token(i) for i in tokenizer.encode(text, **options)]


def test_merges_digits_and_specials(tokenizer):
    assert pieces(tokenizer, "a the 12") == ["a", "Ġthe", "Ġ", "1", "2"]
    assert pieces(tokenizer, "<|start|>x<user>") == ["<|start|>", "x", "<user>"]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {0})
    assert tokenizer.vocab_size == len(gguf_metadata()["tokenizer.ggml.tokens"])


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "12", ["1", "2"]),
        ("gpt-2", "12", ["12"]),
        ("llama-bpe", "1212", ["12", "1", "2"]),
        ("qwen2", "12", ["1", "2"]),
    ],
)
def test_pre_tokenizers_split_digits_as_their_models_do(pre, text, expected):
    made = Tokenizer.from_gguf(gguf_metadata(pre=pre))
    assert pieces(made, text, add_special=False) == expected


def test_start_token_follows_the_file_then_the_family():
    assert pieces(Tokenizer.from_gguf(gguf_metadata(pre="llama-bpe")), "a")[0] == "<|start|>"
    for pre in ("smollm", "llama-bpe"):
        off = Tokenizer.from_gguf(gguf_metadata(pre=pre, add_bos_token=False))
        on = Tokenizer.from_gguf(gguf_metadata(pre=pre, add_bos_token=True))
        assert pieces(off, "a") == ["a"]
        assert pieces(on, "a") == ["<|start|>", "a"]
        assert pieces(on, "a", add_special=False) == ["a"]


def test_qwen_composes_characters():
    made = Tokenizer.from_gguf(gguf_metadata(pre="qwen2"))
    assert made.encode("e\u0301") == made.encode("\u00e9")


@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text):
    made = Tokenizer.from_gguf(gguf_metadata())
    assert made.decode(made.encode(text)) == text


def test_decode_drops_special_tokens_and_marks_unfinished_characters(tokenizer):
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode([1, *ids, 0]) == "é"


def test_lone_surrogates_are_a_value_error(tokenizer):
    with pytest.raises(ValueError, match="valid Unicode"):
        tokenizer.encode("\ud800")


def test_all_end_tokens_count():
    made = Tokenizer.from_gguf(gguf_metadata(eot_token_id=2))
    assert made.eos_ids == {0, 2}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": "tekken"}, UnsupportedConfig, "tokenizer.ggml.pre.*'tekken'"),
        ({"pre": None}, UnsupportedConfig, "tokenizer.ggml.pre"),
        ({"model": "llama"}, UnsupportedConfig, "tokenizer.ggml.model.*'llama'"),
        ({"merges": None}, CheckpointMismatch, "merges"),
        ({"merges": ["no such"]}, CheckpointMismatch, "no such"),
        ({"token_type": [1]}, CheckpointMismatch, "1 types"),
        ({"eos_token_id": 10**6}, CheckpointMismatch, "eos_token_id"),
        ({"bos_token_id": "x"}, CheckpointMismatch, "bos_token_id"),
    ],
)
def test_unknown_kinds_and_broken_tables_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(gguf_metadata(**changes))


# --- folders


def test_saved_files_read_back(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ messages[0].content }}\r\n{{ bos_token }}"
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    back = load_tokenizer(tmp_path)
    tokenizer.chat_template = None
    assert back is not None
    text = "the <|start|>ing 12 ü"
    assert back.encode(text) == tokenizer.encode(text)
    assert (back.bos_id, back.eos_ids, back.vocab_size) == (1, {0}, tokenizer.vocab_size)
    assert back.chat_template == "{{ messages[0].content }}\r\n{{ bos_token }}"


def test_folder_config_styles(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path.write_text(json.dumps({"eos_token": {"content": "<|turn|>"}, "chat_template": templates}))
    made = Tokenizer.from_folder(tmp_path)
    assert (made.eos_ids, made.bos_id, made.chat_template) == ({2}, None, "D")
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer.from_folder(tmp_path).chat_template == "F"
    path.unlink()
    assert Tokenizer.from_folder(tmp_path).eos_ids == frozenset()


def test_prompts_are_never_cut(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(content))
    assert len(Tokenizer.from_folder(tmp_path).encode("abcdef")) == 6


@pytest.mark.parametrize("content", ["", "{}", "{", '{"version": "1.0"}', "[" * 10**5])
def test_damaged_tokenizer_files_are_refused(content, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointMismatch, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


# --- chat templates


def chat(template: str, messages=({"role": "user", "content": "hi"},), **variables) -> str:
    inner = Tokenizer.from_gguf(gguf_metadata())
    inner.chat_template = template
    return inner.render_chat(messages, **variables)


def test_template_environment_is_that_of_transformers():
    template = """{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
{{ bos_token }}{{ m.role }}:{{ m['content'] }}{{ eos_token }}
    {% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "<hi> & ü"}]
    assert chat(template, messages) == "<|start|>user:<hi> & ü<|end|>\nassistant:"
    assert chat("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    assert chat("{{ tools | tojson }}", tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'
    assert chat("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": 2\n}'
    assert len(chat("{{ strftime_now('%Y') }}")) == 4
    assert chat("{% set n = namespace(i=0) %}{% for i in range(3) %}{% set n.i = n.i + i %}"
                "{% endfor %}{{ n.i }}") == "3"  # fmt: skip


def test_template_refusals_are_value_errors():
    with pytest.raises(ValueError, match="roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="chat template"):
        chat("{% if %}")
    with pytest.raises(ValueError, match="chat template"):
        chat("{{ messages[0].content.nothing.at_all }}")
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_gguf(gguf_metadata()).render_chat([])


def test_endless_templates_end():
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    inner = Tokenizer.from_gguf(gguf_metadata())
    inner.chat_template, inner.render_timeout_s = loops, 0.1
    with pytest.raises(ValueError, match=r"more than 0\.1 s"):
        inner.render_chat([])


@pytest.mark.parametrize("name", ["raise_exception", "range", "strftime_now", "namespace", "''"])
def test_python_internals_look_undefined(name):
    for attribute in ("__globals__", "__self__", "__class__", "__init__"):
        assert chat(f"{{{{ {name}.{attribute} }}}}") == ""


def test_conversation_is_not_changed():
    messages = [{"role": "user", "content": "hi"}]
    chat("{{ messages }}", messages)
    assert messages == [{"role": "user", "content": "hi"}]


# --- SmolLM2, where it has been fetched


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    path = cached("smollm2")
    if path is None:
        pytest.skip("SmolLM2 is not in the cache: jinfire fetch smollm2")
    made = load_tokenizer(path)
    assert made is not None
    return made


def reference_prompts() -> dict[str, dict]:
    cases = json.loads((Path(__file__).parent / "golden" / "greedy_reference.json").read_text())
    return {name: case for name, case in cases.items() if "prompt" in case}


@pytest.mark.parametrize("name", reference_prompts())
def test_smollm2_prompts_give_the_reference_ids(smollm2, name):
    case = reference_prompts()[name]
    assert smollm2.encode(case["prompt"]) == case["prompt_ids"]
    assert smollm2.decode(case["greedy_ids"]).startswith(case["text"][:20])


# The vocabulary has no token for some control characters and for the lead bytes of planes beyond
# U+3FFFF; they are dropped, as by the model's own tokenizer.
@hypothesis.given(
    text=st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF))
)
def test_smollm2_round_trip(smollm2, text):
    hypothesis.assume("<" not in text)
    assert smollm2.decode(smollm2.encode(text)) == text


def test_smollm2_chat(smollm2):
    rendered = smollm2.render_chat([{"role": "user", "content": "Hi"}])
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
