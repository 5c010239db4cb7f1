"""Incremental text: whole characters only, stop strings that span tokens, tokens beside their text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import save_tiny_tokenizer

from scd_trt.models import load_tokenizer
from scd_trt.serving.text_stream import Detokenizer, StopStrings, TextStream, TokenText

FIRST_BYTE = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def feed(tokenizer: Any, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.close()]


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_a_character_of_several_tokens_comes_out_whole(tokenizer: Any) -> None:
    ids = encode(tokenizer, "a€😀b")
    assert len(ids) == 9  # one token per byte: the point of this test
    assert feed(tokenizer, ids) == ["a", "", "", "€", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_shows_as_replacement_at_the_end(tokenizer: Any) -> None:
    assert feed(tokenizer, encode(tokenizer, "x😀")[:-1])[-1] == "\ufffd"


@given(st.text(max_size=60))
def test_pieces_of_any_text_join_to_it(tokenizer: Any, text: str) -> None:
    pieces = feed(tokenizer, encode(tokenizer, text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, 259), max_size=80))
def test_pieces_of_any_tokens_join_to_the_text_of_all(tokenizer: Any, ids: list[int]) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(feed(tokenizer, ids)) == whole


def test_endless_invalid_bytes_are_released(tokenizer: Any) -> None:
    lead_byte = encode(tokenizer, "😀")[0]
    detokenizer = Detokenizer(tokenizer)
    released = sum(len(detokenizer.push(lead_byte)) for _ in range(100))
    assert released >= 96  # at most four of them can still become a character


def test_a_stop_string_is_held_back_until_it_is_certain() -> None:
    stop = StopStrings(["END"])
    assert [stop.push(part) for part in ("a", "E", "N", "x", "E", "ND tail")] == [
        ("a", False),
        ("", False),
        ("", False),
        ("ENx", False),
        ("", False),
        ("", True),
    ]


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert StopStrings(["late", "ear"]).push("an early late") == ("an ", True)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_any_cut_of_a_text_stops_where_the_whole_text_does(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop, shown, stopped = StopStrings(stops), "", False
    for part in parts:
        piece, stopped = stop.push(part)
        shown += piece
        if stopped:
            break
    shown += "" if stopped else stop.close()
    # What a reader of the growing text sees: the first prefix of it that holds any stop string decides.
    first = next((n for n in range(len(text) + 1) if any(s in text[:n] for s in stops)), None)
    if first is None:
        assert (shown, stopped) == (text, False)
    else:
        assert stopped
        assert text.startswith(shown)
        assert not any(s in shown for s in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopStrings(["x", ""])


def test_tokens_come_with_the_text_they_belong_to(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, ("bXY",))
    pieces = [stream.push(token) for token in encode(tokenizer, "a€bbXYz")[:8]]
    assert [(piece.text, [token.index for token in piece.tokens]) for piece in pieces] == [
        ("a", [0]),
        ("", []),
        ("", []),
        ("€", [1, 2, 3]),
        ("", []),
        ("b", [4]),
        ("", []),
        ("", []),
    ]
    assert pieces[-1].stopped


def test_text_held_back_comes_out_at_the_end(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, ("stop",))
    assert [stream.push(token).text for token in encode(tokenizer, "a sto")] == ["a", " ", "", "", ""]
    last = stream.close()
    assert (last.text, last.stopped, [token.index for token in last.tokens]) == ("sto", False, [2, 3, 4])


def test_text_of_single_tokens(tokenizer: Any) -> None:
    texts = TokenText(tokenizer)
    space, letter = encode(tokenizer, " x")
    assert (texts.text(space), texts.utf8(letter)) == (" ", [120])
    assert texts.text(2) == "</s>"
    assert texts.utf8(encode(tokenizer, "€")[0]) is None


def test_tokenizers_that_drop_a_first_space_keep_it_in_the_middle() -> None:
    class Words:
        """Decodes as the SentencePiece family does: a space before every word but the first."""

        words = ("a", "b", "c")

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [self.words.index(word) for word in text.split()]

        def decode(self, token_ids: list[int], **_: Any) -> str:
            return " ".join(self.words[token] for token in token_ids)

    tokenizer: Any = Words()
    assert feed(tokenizer, [0, 1, 2]) == ["a", " b", " c", ""]
    assert TokenText(tokenizer).text(1) == " b"
