"""Streaming detokenisation: however tokens are cut, the text is that of all tokens at once."""

import random

import pytest

from jinfire.text import Detokenizer


def decode_bytes(ids):
    """Byte-level tokens: id is a byte, ids from 256 on are special and skipped."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


WORDS = ["", " the", " cat", "s", "\n", " sat", "STOP", "ST", "OP"]


def decode_words(ids):
    return "".join(WORDS[i] for i in ids).removeprefix(" ")  # as Metaspace decoders do


def run(decode, ids, stop=()):
    detokenizer = Detokenizer(decode, stop)
    pieces = [detokenizer.push(i) for i in ids]
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    return pieces, detokenizer


@pytest.mark.parametrize("text", ["héllo", "日本語 текст", "a😀b😀😀", "", "👩‍👩‍👧"])
def test_pieces_join_to_the_text_and_are_never_half_characters(text):
    pieces, detokenizer = run(decode_bytes, list(text.encode()))
    assert detokenizer.text == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert all(pieces[i] for i, byte in enumerate(text.encode()) if byte < 128)


def test_character_is_released_with_its_last_byte():
    pieces, _ = run(decode_bytes, list("x😀".encode()))
    assert pieces == ["x", "", "", "", "😀", ""]


def test_unfinished_character_at_the_end_is_flushed():
    pieces, _ = run(decode_bytes, [*b"ab", 0xF0, 0x9F])
    assert pieces[:4] == ["a", "b", "", ""]
    assert pieces[4] == "\ufffd"


def test_invalid_bytes_are_not_held_for_ever():
    detokenizer = Detokenizer(decode_bytes)
    out = "".join(detokenizer.push(0xFF) for _ in range(200))
    assert len(out) >= 180


def test_leading_space_of_later_words_stays():
    _, detokenizer = run(decode_words, [1, 2, 3, 5])
    assert detokenizer.text == "the cats sat"


def test_skipped_tokens_lose_nothing():
    _, detokenizer = run(decode_bytes, [300, *b"a", 300, 301, *b" b", 300])
    assert detokenizer.text == "a b"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("one EN", ("END",), "one EN"),
        ("aaab", ("aab",), "a"),
        ("abcd", ("abcd", "bc"), "a"),
        ("xabc", ("bc", "abc"), "x"),
        ("stop", ("stop",), ""),
        ("日本語", ("本",), "日"),
        ("a\n\nb", ("\n\n",), "a"),
    ],
)
def test_stop_strings_over_token_borders(text, stop, expected):
    _, single = run(decode_bytes, list(text.encode()), stop)
    assert single.text == expected
    whole = Detokenizer(lambda ids: text * len(ids), stop)  # the whole text in one token
    whole.push(0)
    whole.flush()
    assert whole.text == expected
    assert single.stopped is whole.stopped is (expected != text)


def test_possible_stop_is_held_back_and_nothing_more():
    detokenizer = Detokenizer(decode_words, ("STOP",))
    assert detokenizer.push(1) == "the"
    assert detokenizer.push(7) == ""
    assert detokenizer.push(3) == "STs"
    assert detokenizer.push(7) == ""
    assert detokenizer.push(8) == ""
    assert detokenizer.stopped
    assert detokenizer.push(2) == ""
    assert detokenizer.flush() == ""
    assert detokenizer.text == "theSTs"


def test_random_cuts_agree_with_the_whole_text():
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice("ab😀é") for _ in range(rng.randrange(1, 15)))
        stop = tuple("".join(rng.choices("ab😀", k=rng.randrange(1, 4))) for _ in range(2))
        ends = sorted((text.find(s) + len(s), text.find(s)) for s in stop if s in text)
        expected = text[: ends[0][1]] if ends else text
        _, detokenizer = run(decode_bytes, list(text.encode()), stop)
        assert (detokenizer.text, detokenizer.stopped) == (expected, bool(ends))


def test_work_per_token_does_not_grow():
    sizes = []

    def decode(ids):
        sizes.append(len(ids))
        return decode_bytes(ids)

    run(decode, list(("abc😀" * 300).encode()), ("zzz",))
    assert max(sizes) < 40


@pytest.mark.parametrize("stop", ["text", ("",)])
def test_bad_stop_is_refused(stop):
    with pytest.raises(ValueError, match="stop"):
        Detokenizer(decode_bytes, stop)
