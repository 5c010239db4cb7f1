"""Streamed second moments of paired activations: all that the closed-form fit reads of the calibration text.

Owns: `Moments` (count, mean and centred cross-product, updated row batch by row batch), `PairStatistics` (the moments of
every layer, or group of layers, of a model pair) and their file, which lets an interrupted calibration continue exactly
where it stopped.

Shapes: T tokens, n width of a joint row. A joint row is `[a b]`: the producer's row followed by the consumer's, so
`n = n_a + n_b`. Per layer: keys before RoPE `[K_A K_B]`, values `[V_A V_B]` and, where Patch is possible, normalised
attention inputs `[X_A X_B]` (METHOD, section 1). Per group of layers, for policy `rd`: the keys
of all its layers side by side, and their values; and the mean rows of position 0 (`FirstRows`).

Arithmetic is float64. Batches are merged by Chan's update, which keeps products centred: summing raw products would lose
the digits that matter where a mean is large against its spread, as in keys. Memory is O(n^2) per layer and does not
depend on the number of tokens; no activation is kept.

File: one safetensors file, tensors `<layer>.<kind>.mean` and `.cross`, `first.a` and `.b`, counts and the number of
finished sequences in its metadata. It is replaced as a whole. Errors: `StatisticsError` for a file of other statistics.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scd_trt.config import ScdError

Kind = Literal["k", "v", "x", "group_k", "group_v"]


class StatisticsError(ScdError):
    """A file of partial statistics is damaged or belongs to another calibration."""


class Moments:
    """Count, mean and centred cross-product of joint rows, all that has been folded in so far."""

    def __init__(self, width_a: int, width_b: int) -> None:
        self.width_a = width_a
        self.count = 0
        self.mean_n = torch.zeros(width_a + width_b, dtype=torch.float64)
        self.cross_nn = torch.zeros(width_a + width_b, width_a + width_b, dtype=torch.float64)

    def update(self, a_TI: Tensor, b_TJ: Tensor) -> None:
        """Fold in rows of the producer and, in the same order, of the consumer.

        Raises:
            ValueError: the two do not pair up, have another width, or hold a value that is not finite.
        """
        width_b = self.mean_n.shape[0] - self.width_a
        if a_TI.shape != (b_TJ.shape[0], self.width_a) or b_TJ.shape[1:] != (width_b,):
            found = f"{tuple(a_TI.shape)} and {tuple(b_TJ.shape)}"
            raise ValueError(f"rows are {found}; expected [T, {self.width_a}] and [T, {width_b}]")
        rows_Tn = torch.cat([a_TI.double(), b_TJ.double()], dim=1)
        if rows_Tn.shape[0] == 0:
            return
        mean_n = rows_Tn.mean(0)
        if not bool(mean_n.isfinite().all()):
            raise ValueError("rows hold values that are not finite; one of the models overflows on this text")
        rows_Tn -= mean_n
        self._fold(rows_Tn.shape[0], mean_n, rows_Tn.T @ rows_Tn)

    def merge(self, other: Moments) -> None:
        """Fold in what another accumulator has seen, for example on another shard of the text."""
        if (other.width_a, other.mean_n.shape) != (self.width_a, self.mean_n.shape):
            raise ValueError(f"cannot merge moments of width {other.mean_n.shape[0]} into {self.mean_n.shape[0]}")
        if other.count:
            self._fold(other.count, other.mean_n, other.cross_nn)

    def covariance(self) -> Tensor:
        """Covariance `[n, n]`, divided by the count."""
        if self.count == 0:
            raise ValueError("no rows were folded in: the covariance is undefined")
        return self.cross_nn / self.count

    def _fold(self, count: int, mean_n: Tensor, cross_nn: Tensor) -> None:
        total = self.count + count
        delta_n = mean_n - self.mean_n
        self.cross_nn += cross_nn
        self.cross_nn.addr_(delta_n, delta_n, alpha=self.count * count / total)
        self.mean_n += delta_n * (count / total)
        self.count = total


class FirstRows:
    """Sums over sequences of both models' rows at position 0, `[K, L, 2, F]` each, keys first; K kinds of sequences."""

    def __init__(self, num_kinds: int, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
        """Shapes of one sequence's rows, `(L, 2, F)`."""
        self.count_K = torch.zeros(num_kinds, dtype=torch.float64)
        self.sum_a = torch.zeros(num_kinds, *shape_a, dtype=torch.float64)
        self.sum_b = torch.zeros(num_kinds, *shape_b, dtype=torch.float64)

    def update(self, kind: int, rows_a: Tensor, rows_b: Tensor) -> None:
        """Fold in one sequence's rows `[L, 2, F]`."""
        self.count_K[kind] += 1
        self.sum_a[kind] += rows_a
        self.sum_b[kind] += rows_b

    def means(self) -> tuple[Tensor, Tensor]:
        """Mean rows `[K, L, 2, F]` of the producer and of the consumer."""
        count_K111 = self.count_K[:, None, None, None]
        return self.sum_a / count_K111, self.sum_b / count_K111


class PairStatistics:
    """Moments of every layer of a pair, and how many calibration sequences they cover."""

    def __init__(
        self, widths: Mapping[tuple[int, Kind], tuple[int, int]], *, first_rows: FirstRows | None = None
    ) -> None:
        """Widths of the producer's and the consumer's rows, by layer (or group) and kind."""
        self.num_sequences = 0
        self.moments: dict[tuple[int, Kind], Moments] = {key: Moments(*found) for key, found in widths.items()}
        self.first_rows = first_rows

    def __getitem__(self, key: tuple[int, Kind]) -> Moments:
        return self.moments[key]

    @property
    def num_tokens(self) -> int:
        """Calibration tokens folded in."""
        return next((moments.count for moments in self.moments.values()), 0)

    @property
    def num_bytes(self) -> int:
        """Memory of all moments."""
        return sum(8 * (moments.mean_n.numel() + moments.cross_nn.numel()) for moments in self.moments.values())

    def save(self, path: Path, *, key: str) -> None:
        """Write the state under a `key` that names the calibration it belongs to."""
        counts = {_name(layer, kind): moments.count for (layer, kind), moments in self.moments.items()}
        state = {"key": key, "num_sequences": self.num_sequences, "counts": counts}
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        save_file(dict(self._tensors()), temporary, metadata={"state": json.dumps(state, sort_keys=True)})
        temporary.replace(path)

    def restore(self, path: Path, *, key: str) -> None:
        """Replace the state by what `save` wrote.

        Raises:
            StatisticsError: the file is damaged, or is of another key or shape; delete it to start over.
        """
        try:
            with safe_open(path, framework="pt") as file:
                state = json.loads((file.metadata() or {})["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StatisticsError(f"{path}: not a file of partial statistics ({error}); delete it") from error
        if state["key"] != key:
            raise StatisticsError(f"{path}: belongs to calibration {state['key']}, this one is {key}; delete it")
        self._check(path, tensors)
        self.num_sequences = state["num_sequences"]
        for (layer, kind), moments in self.moments.items():
            name = _name(layer, kind)
            moments.count = state["counts"][name]
            moments.mean_n, moments.cross_nn = tensors[f"{name}.mean"], tensors[f"{name}.cross"]
        if self.first_rows is not None:
            self.first_rows.count_K = tensors["first.count"]
            self.first_rows.sum_a, self.first_rows.sum_b = tensors["first.a"], tensors["first.b"]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for (layer, kind), moments in self.moments.items():
            yield f"{_name(layer, kind)}.mean", moments.mean_n
            yield f"{_name(layer, kind)}.cross", moments.cross_nn
        if self.first_rows is not None:
            yield "first.count", self.first_rows.count_K
            yield "first.a", self.first_rows.sum_a
            yield "first.b", self.first_rows.sum_b

    def _check(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        expected = {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors()}
        found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if found != expected:
            name = next(iter(sorted(expected.items() ^ found.items(), key=str)))
            raise StatisticsError(f"{path}: other tensors than this calibration has, first {name}; delete it")


def _name(layer: int, kind: Kind) -> str:
    return f"{layer}.{kind}"
