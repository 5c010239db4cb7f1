"""Which layers to patch: greedy forward selection with interaction, and the budget rule (METHOD, section 1).

Pure functions over a callable that scores sets of layers; nothing here knows a model.

The score of a set S is `dF(S) = F(S) - F({})`: what patching the layers of S gains over all-Reuse on held-out text (here
the fall of the KL divergence). The greedy path is S_1, S_2, ...: each step adds the candidate whose *joint* score with
the layers already chosen is best. Candidates are the best of the restore-one profile. The path goes on when a step
gains nothing: with interaction the next may. The budget is `k* = argmax dF(S_k) / cost(S_k)`.

Cost of a set: the sum over its layers of the bytes per token of their Patch codes; with equal ranks this is the paper's
`c k`. Bytes and not seconds, because the artifact must not depend on how busy the machine was while it was made; on the
links that this project is for, bytes are also what a layer costs. Ties go to the smaller k and the lower layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scd_trt.config import ScdError

LayerSet = tuple[int, ...]
"""Layers in the order in which they were chosen."""

Score = Callable[[Sequence[LayerSet]], Sequence[float]]
"""Gains over all-Reuse of several sets."""


class LayerSelectionError(ScdError):
    """The configured patch layers do not exist."""


@dataclass(frozen=True)
class Step:
    """One point of the greedy path: the set, its gain over all-Reuse, its cost, and gain per cost."""

    layers: LayerSet
    gain: float
    cost: float

    @property
    def efficiency(self) -> float:
        return self.gain / self.cost


@dataclass(frozen=True)
class Selection:
    """The greedy path and the layers that the budget rule keeps of it, in ascending order."""

    path: tuple[Step, ...]
    layers: LayerSet


def select(candidates: LayerSet, score: Score, *, costs: Mapping[int, float], max_layers: int) -> Selection:
    """Choose the layers to patch.

    Args:
        candidates: layers that may be patched.
        score: gains of several sets at once, so that they can be measured in one batch.
        costs: positive cost of patching each candidate.
        max_layers: length of the greedy path.
    """
    path = greedy_path(candidates, score, costs=costs, max_layers=max_layers)
    return Selection(path, within_budget(path))


def configured(layers: LayerSet, score: Score, *, costs: Mapping[int, float]) -> Selection:
    """Take the given layers as they are; the path adds them one by one, so that their gain can still be seen."""
    sets = [layers[: stop + 1] for stop in range(len(layers))]
    path = [Step(chosen, gain, _cost(chosen, costs)) for chosen, gain in zip(sets, score(sets), strict=True)]
    return Selection(tuple(path), tuple(sorted(layers)))


def best_layers(profile: Mapping[int, float], count: int) -> LayerSet:
    """The `count` layers of the largest gain, best first."""
    return tuple(sorted(profile, key=lambda layer: (-profile[layer], layer))[:count])


def greedy_path(candidates: LayerSet, score: Score, *, costs: Mapping[int, float], max_layers: int) -> tuple[Step, ...]:
    """S_1, S_2, ... up to `max_layers` layers."""
    path: list[Step] = []
    chosen: LayerSet = ()
    while len(chosen) < min(max_layers, len(candidates)):
        trials = [(*chosen, layer) for layer in sorted(set(candidates) - set(chosen))]
        gains = score(trials)
        best = max(range(len(trials)), key=lambda index: (gains[index], -index))
        chosen = trials[best]
        path.append(Step(chosen, gains[best], _cost(chosen, costs)))
    return tuple(path)


def within_budget(path: Sequence[Step]) -> LayerSet:
    """`argmax dF(S_k) / cost(S_k)`, ascending; empty where no set of the path gains anything."""
    gaining = [step for step in path if step.gain > 0]
    return tuple(sorted(max(gaining, key=lambda step: step.efficiency).layers)) if gaining else ()


def check_layers(layers: LayerSet, num_layers: int) -> LayerSet:
    """The configured patch layers, ascending.

    Raises:
        LayerSelectionError: one of them does not exist or is named twice.
    """
    for layer in layers:
        if layer >= num_layers:
            raise LayerSelectionError(f"method.patch_layers: layer {layer} of a model with layers 0..{num_layers - 1}")
        if layers.count(layer) > 1:
            raise LayerSelectionError(f"method.patch_layers: layer {layer} is named twice")
    return tuple(sorted(layers))


def _cost(layers: LayerSet, costs: Mapping[int, float]) -> float:
    return sum(costs[layer] for layer in layers)
