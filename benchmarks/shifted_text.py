"""What does the guard buy on text that the translator was not fitted on, and what does it cost? KL to the oracle.

    python benchmarks/shifted_text.py [PAIR.yaml] [--items N] [--kinds KIND,...] [--json FILE]      PAIR is distilled already

Kinds: held-out text of the pair's own source (test split); the sources of Python's standard library; German prose (the Debian
reference, fetched once with `apt-get download`); a table of numbers (matplotlib's sample data); random tokens.

Of every item a prefix is replaced and what follows is scored by the consumer. Rows:
    raw            the producer's cache as it is
    rd             codes of the whole prefix
    rd + cut       the guard (`method.guard: cut`): codes up to the first block beyond the limit, the consumer computes
                   the rest of the prefix itself over them
    rd + fp8       the same blocks as in `rd + cut` coded, the others the producer's cache in float8
    rd + finer     the same, the others over the same components without any quantisation: the most that finer bits can give;
                   counted as 8 bits for each component
Bytes per token are those of the prefix, blocks that are refused counting as none (`cut`), float8, or finer codes. With `cut`
the groups before the one that finds a block beyond have left by then: `wasted` is their share of an uncut prefix's bytes.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scd_trt import translator as translators
from scd_trt.codec import Decoder, Encoder, LayerInput, num_blocks_within
from scd_trt.config import PairConfig, ScdError, Source, cache_root, load_pair
from scd_trt.distill.calibration import Ids, heldout_length, text_sequences
from scd_trt.distill.plan import Job, prepare
from scd_trt.evaluate.baselines import through_fp8
from scd_trt.evaluate.metrics import bootstrap_interval, compare_logits
from scd_trt.models import LoadedModel, ModelTrace, cache_layers, forward_with_cache, load_model, trace
from scd_trt.translator import RowTransform, Translator

DEFAULT = Path(__file__).parents[1] / "engine_configs" / "smollm2-qa" / "pair.yaml"
GERMAN_PACKAGE, GERMAN_FILE = "debian-reference-de", "usr/share/debian-reference/debian-reference.de.txt.gz"
DOCUMENT_CHARS = 6000
"""Longer texts are cut: items shall come from different documents."""

Cache = list[tuple[Tensor, Tensor]]


class ShiftedTextError(ScdError):
    """A kind of text cannot be had on this machine."""


@dataclass(frozen=True)
class Item:
    """One text, scored.

    Attributes:
        kl: of every row, nats per token.
        bytes_per_token: of every row.
        refused: share of blocks that the guard refuses.
        wasted: share of an uncut prefix's bytes that had left before a later group refused their blocks.
        novelty: mean of the blocks' worst group, 1 at the limit.
    """

    kl: dict[str, float]
    bytes_per_token: dict[str, float]
    refused: float
    wasted: float
    novelty: float


class Bench:
    """Both models in the dtypes in which they serve, and the artifacts."""

    def __init__(self, config: PairConfig, job: Job, translator: Translator) -> None:
        self.translator = translator
        self.producer: LoadedModel = load_model(job.producer_path, dtype=config.producer.dtype)
        self.consumer: LoadedModel = load_model(job.consumer_path, dtype=config.consumer.dtype)
        self.prefix_tokens = config.heldout.prefix_tokens
        self.tokens_per_block = config.engine.tokens_per_block

    def item(self, ids: Sequence[int]) -> Item:
        """Score one text."""
        whole = torch.tensor(ids)
        prefix, scored = whole[: self.prefix_tokens], whole[self.prefix_tokens : -1]
        traced = trace(self.producer, prefix, capture={"kv"})
        raw = cache_layers(self.producer, traced)
        coded, novelty_GN = self._coded(raw)
        cuts = [num_blocks_within(novelty_T, self.tokens_per_block) for novelty_T in novelty_GN]
        cut = min(cuts)
        caches = {"raw": raw, "rd": coded, "rd + cut": self._completed(prefix, coded, cut * self.tokens_per_block)}
        caches["rd + fp8"] = self._joined(coded, [(through_fp8(k), through_fp8(v)) for k, v in raw], cut)
        caches["rd + finer"] = self._joined(coded, self._unquantised(traced), cut)
        oracle = self._logits(scored, cache_layers(self.consumer, trace(self.consumer, prefix, capture={"kv"})))
        kl = {
            name: compare_logits(oracle, self._logits(scored, cache), targets_T=whole[self.prefix_tokens + 1 :]).kl
            for name, cache in caches.items()
        }
        num_blocks = self.prefix_tokens // self.tokens_per_block
        blocks_GN = torch.stack([novelty_T.reshape(num_blocks, -1).mean(1) for novelty_T in novelty_GN])
        return Item(
            kl=kl,
            bytes_per_token=self._sizes(cut / num_blocks),
            refused=1 - cut / num_blocks,
            wasted=self._wasted(cuts, num_blocks),
            novelty=float(blocks_GN.amax(0).mean()),
        )

    def _coded(self, raw: Cache) -> tuple[Cache, list[Tensor]]:
        translator, positions = self.translator, torch.arange(self.prefix_tokens)
        encoder, decoder = Encoder(translator), Decoder(translator)
        cache: Cache = []
        novelty = []
        for group in range(len(translator.manifest.groups)):
            inputs = [LayerInput(*raw[layer]) for layer in translator.manifest.source_layers(group)]
            encoded = encoder.encode_guarded(group, inputs, positions, seq_len=len(positions))
            cache += decoder.decode(group, encoded.codes_TC, positions, seq_len=len(positions))
            novelty.append(encoded.novelty_T)
        return [(k.to(self.consumer.dtype), v.to(self.consumer.dtype)) for k, v in cache], novelty

    def _unquantised(self, traced: ModelTrace) -> Cache:
        """Every group's components as real numbers; groups without a transform as they are."""
        keys, values = list(traced.k_TF), list(traced.v_TF)
        for group, (start, stop) in enumerate(self.translator.manifest.groups):
            transform = self.translator.transform(group)
            if transform is not None:
                sources = self.translator.manifest.source_layers(group)
                keys[start:stop] = _translated(transform.keys, [traced.k_TF[layer] for layer in sources], stop - start)
                values[start:stop] = _translated(
                    transform.values, [traced.v_TF[layer] for layer in sources], stop - start
                )
        return cache_layers(self.consumer, replace(traced, k_TF=tuple(keys), v_TF=tuple(values)))

    def _completed(self, prefix: Tensor, coded: Cache, num_kept: int) -> Cache:
        """The first tokens' cache as coded; the consumer computes the rest of the prefix over it."""
        if num_kept == len(prefix):
            return coded
        kept = [(k[:num_kept], v[:num_kept]) for k, v in coded]
        traced = trace(self.consumer, prefix[num_kept:], past=kept if num_kept else None, capture={"kv"})
        own = cache_layers(self.consumer, traced, start_position=num_kept)
        return _concatenated(kept, own)

    def _joined(self, coded: Cache, other: Cache, cut: int) -> Cache:
        num_kept = cut * self.tokens_per_block
        dtype = self.consumer.dtype
        return _concatenated(
            [(k[:num_kept], v[:num_kept]) for k, v in coded],
            [(k[num_kept:].to(dtype), v[num_kept:].to(dtype)) for k, v in other],
        )

    def _logits(self, scored: Tensor, cache: Cache) -> Tensor:
        return forward_with_cache(self.consumer, scored, cache, start_position=self.prefix_tokens).float()

    def _sizes(self, kept: float) -> dict[str, float]:
        manifest = self.translator.manifest
        dense, size = manifest.dense_bytes_per_token, sum(manifest.bytes_per_token)
        sizes = {"raw": dense, "rd": size, "rd + cut": kept * size, "rd + fp8": kept * size + (1 - kept) * dense / 2}
        layouts = [layout for layout in manifest.transforms if layout is not None]
        finer = sum(layout.keys.num_components + layout.values.num_components for layout in layouts)
        return sizes | {"rd + finer": kept * size + (1 - kept) * finer}

    def _wasted(self, cuts: Sequence[int], num_blocks: int) -> float:
        """Bytes of blocks behind the final cut that groups had sent before a later one made it."""
        sizes, kept, wasted = self.translator.manifest.bytes_per_token, num_blocks, 0
        for size, within in zip(sizes, cuts, strict=True):
            kept = min(kept, within)
            wasted += size * (kept - min(cuts))
        return wasted / (sum(sizes) * num_blocks)


def main() -> None:
    """Measure all kinds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--items", type=int, default=8, help="texts of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--json", type=Path, help="file for the figures of every item")
    given = parser.parse_args()
    try:
        measured = measure(load_pair(given.pair), kinds=given.kinds.split(","), num_items=given.items)
    except ScdError as error:
        sys.exit(f"error: {error}")
    if given.json is not None:
        given.json.write_text(json.dumps({kind: [vars(item) for item in items] for kind, items in measured.items()}))


@torch.no_grad()
def measure(config: PairConfig, *, kinds: Sequence[str], num_items: int) -> dict[str, list[Item]]:
    """Score every kind of text; prints each as it is done."""
    job = prepare(config)
    translator = translators.load(config.translator_path())
    translator.check_guard()
    bench = Bench(config, job, translator)
    measured = {}
    for kind in kinds:
        sequences = texts(config, bench.consumer.tokenizer, kind, num_items=num_items)
        measured[kind] = [bench.item(ids) for ids in sequences]
        print_kind(kind, measured[kind])
    return measured


def print_kind(kind: str, items: Sequence[Item]) -> None:
    """A line of shares, then a line for each row."""
    refused, requests = [item.refused for item in items], [float(item.refused > 0) for item in items]
    print(
        f"{kind}: {len(items)} texts, {np.mean(refused):.1%} of blocks refused, {np.mean(requests):.0%} of texts cut, "
        f"novelty {np.mean([item.novelty for item in items]):.2f}, wasted {np.mean([item.wasted for item in items]):.1%}"
    )
    for row in items[0].kl:
        found = bootstrap_interval([item.kl[row] for item in items], seed=0)
        size = np.mean([item.bytes_per_token[row] for item in items])
        worst = max(item.kl[row] for item in items)
        interval = f"{found.mean:.4f} [{found.low:.4f}, {found.high:.4f}]"
        print(f"    {row:12s} {size:8.0f} B/token   KL {interval}   worst {worst:.4f}")
    sys.stdout.flush()


def texts(config: PairConfig, tokenizer: Any, kind: str, *, num_items: int) -> Ids:
    """Token ids of texts of one kind, each with the opening of a chat."""
    if kind not in KINDS:
        raise ShiftedTextError(f"no kind of text is called {kind!r}; choose among {', '.join(KINDS)}")

    def sequences(source: Source) -> Ids:
        length, seed = heldout_length(config.heldout), config.method.seed
        return text_sequences(tokenizer, source, "test", num_sequences=num_items, sequence_tokens=length, seed=seed)

    documents = KINDS[kind]
    if documents is not None:
        with tempfile.TemporaryDirectory() as directory:
            write_documents(Path(directory), documents())
            return sequences(directory)
    own = sequences(config.heldout.source)
    return own if kind == "own" else randomised(own, len(tokenizer), seed=config.method.seed)


def randomised(sequences: Ids, vocabulary_size: int, *, seed: int) -> Ids:
    """Random tokens behind what all sequences begin with."""
    generator = random.Random(seed)
    num_shared = next(index for index, column in enumerate(zip(*sequences, strict=True)) if len(set(column)) > 1)
    return tuple(
        (*ids[:num_shared], *(generator.randrange(vocabulary_size) for _ in ids[num_shared:])) for ids in sequences
    )


def write_documents(directory: Path, documents: Iterable[str]) -> None:
    """One file for each piece of at most `DOCUMENT_CHARS`; the corpus makes each a document with a split of its own."""
    pieces = (
        text[start : start + DOCUMENT_CHARS] for text in documents for start in range(0, len(text), DOCUMENT_CHARS)
    )
    for number, piece in enumerate(pieces):
        (directory / f"{number:05d}.txt").write_text(piece, encoding="utf-8")


def python_code() -> Iterator[str]:
    """The beginning of every module of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")[:DOCUMENT_CHARS]


def german() -> Iterator[str]:
    """The Debian reference in German, without its table of contents."""
    path = cache_root() / "texts" / GERMAN_PACKAGE / GERMAN_FILE
    if not path.exists():
        _fetch_debian(GERMAN_PACKAGE, cache_root() / "texts" / GERMAN_PACKAGE)
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    yield text[len(text) // 4 :]


def table() -> Iterator[str]:
    """Rows of numbers, comma-separated."""
    found = importlib.util.find_spec("matplotlib")
    if found is None or found.submodule_search_locations is None:
        raise ShiftedTextError(
            "the table is sample data of matplotlib, which is not installed; run: pip install matplotlib"
        )
    yield (Path(found.submodule_search_locations[0]) / "mpl-data" / "sample_data" / "Stocks.csv").read_text("utf-8")


KINDS: dict[str, Callable[[], Iterator[str]] | None] = {
    "own": None,
    "code": python_code,
    "german": german,
    "table": table,
    "random": None,
}
"""Documents of every kind; None: made from the pair's own source."""


def _fetch_debian(package: str, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    run: Callable[..., Any] = subprocess.run
    try:
        run(["apt-get", "download", package], cwd=target, check=True, capture_output=True)
        (archive,) = target.glob(f"{package}_*.deb")
        run(["dpkg-deb", "-x", str(archive), str(target)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ShiftedTextError(
            f"German text comes from Debian's package {package}, which cannot be fetched ({error}); on a Debian machine run "
            f"`apt-get update`, or unpack the package into {target} by hand"
        ) from error


def _translated(rows: RowTransform, layers: Sequence[Tensor], num_layers: int) -> list[Tensor]:
    """Rows of each of a group's layers through its components, which are not rounded to cells."""
    x_TI = torch.cat(list(layers), dim=1).float() - rows.mean_I
    # the middle of a cell is half a step above its edge
    decode_SO = rows.decode_SO.float()
    y_TO = (x_TI @ rows.encode_IS.float() - 0.5) @ decode_SO + rows.bias_O
    if rows.sink_in_KI is not None and rows.sink_out_KO is not None:
        y_TO[0] = rows.sink_out_KO[(rows.sink_in_KI - x_TI[0]).square().sum(1).argmin()]
    return list(y_TO.chunk(num_layers, dim=1))


def _concatenated(first: Cache, second: Cache) -> Cache:
    return [
        (torch.cat([k_1, k_2]), torch.cat([v_1, v_2])) for (k_1, v_1), (k_2, v_2) in zip(first, second, strict=True)
    ]


if __name__ == "__main__":
    main()
