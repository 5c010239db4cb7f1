"""How each group of layers is coded, by weighted rate-distortion cost in one Lagrangian (METHOD, section 2.4).

Shapes: G groups, O consumer rows of a group (all its layers, one kind), I producer rows, M hidden size, R rank.
Modes of a group, all priced in the unit of the allocation, weighted mean squared error of the consumer's rows:

    transform   quantised components (`transform`, `rate_distortion`): what coding loses at the slope, and what no linear
                map explains; the rate follows the slope
    raw         the pool's rows at 16 bits: e = x_A - y_B, rows before RoPE, which each side applies itself. Nothing where
                both models are the same: `raw` is then the exact cache
    patch       the paper's Patch layers, affine, float16 codes of rank `r_h`: e = y_B - project(encode(x_A)), from the
                moments of attention inputs and B's projections. A key norm is linearised: an element's error is scaled
                as the norm scales the average key of its head

An error e of the consumer's rows costs `tr(W E[e e'])`, W the weights of elements (a diagonal) or of heads (blocks), as for
the transforms' components (`fisher.ErrorWeights`).

At one lambda, a price of bits, every group takes the mode of least `J = distortion + lambda * bits`. The lambda of the
allocation over transforms everywhere is where the search begins, but a mode comes whole: what a group takes changes what is
left for the others. So lambdas around it are tried too, each table that they lead to gets an allocation of its own within
the same bytes, and the table of least predicted distortion is proposed; transforms everywhere are always among them.
Predictions only propose: held-out text decides whether a table is kept (`rd`).

Rounding to 16 bits is not priced; it is far below everything else. Deliberately not here: `reuse`, which a transform
contains, and layers that the consumer computes itself, whose gain is measured (`quality.exact_layers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from scd_trt.distill.assembly import Layers, Transforms, projections
from scd_trt.distill.fisher import ErrorWeights
from scd_trt.distill.fit import LayerFits, Projections
from scd_trt.distill.plan import Job
from scd_trt.distill.rate_control import GroupSpectra
from scd_trt.distill.statistics import Kind, Moments, PairStatistics
from scd_trt.models import LoadedModel
from scd_trt.translator import LayerMaps, PatchLayer, RawLayer, TransformLayer

Mode = Literal["transform", "raw", "patch"]
Modes = tuple[Mode, ...]


_LAMBDA_STEPS = range(-10, 4)
"""Powers of two around the first lambda that are tried: mostly below it, for what takes many bytes."""


@dataclass(frozen=True)
class FixedCode:
    """A way to code a group that leaves no rate to choose.

    Attributes:
        layers: maps of the group's layers.
        distortion: weighted mean squared error of a token's rows.
    """

    mode: Mode
    layers: Layers
    bytes_per_token: int
    distortion: float


@dataclass(frozen=True)
class Candidate:
    """What a mode of a group is predicted to cost at a slope."""

    mode: Mode
    distortion: float
    num_bits: int
    slope: float

    @property
    def cost(self) -> float:
        """J."""
        return self.distortion + self.slope * self.num_bits


@dataclass(frozen=True)
class ModeTable:
    """A mode for each group, and what the rest of the bytes buys.

    Attributes:
        num_bytes: limit on the codes of a token.
        slope: distortion per bit at the margin.
        distortion: predicted, of all groups, with what the translation leaves unexplained.
        num_silent_groups: groups that get no byte.
    """

    modes: Modes
    num_bytes: int
    slope: float
    distortion: float
    num_silent_groups: int


@dataclass(frozen=True)
class Coding:
    """Maps of all groups; each group has a transform or layers of its own.

    Attributes:
        group_bytes: bytes of a token's codes, per group.
    """

    table: ModeTable
    layers: Layers
    transforms: Transforms
    group_bytes: tuple[int, ...]

    @property
    def modes(self) -> Modes:
        return self.table.modes

    @property
    def num_bytes(self) -> int:
        """Bytes of a token's codes."""
        return sum(self.group_bytes)

    @property
    def num_silent_groups(self) -> int:
        """Groups without codes, which the data path does not carry."""
        return self.group_bytes.count(0)


@dataclass(frozen=True)
class Coder:
    """All that a pair's groups may be coded with.

    Attributes:
        fixed: for each group its modes other than `transform`.
    """

    spectra: GroupSpectra
    groups: tuple[tuple[int, int], ...]
    fixed: tuple[tuple[FixedCode, ...], ...]

    def plain(self, num_bytes: int) -> Coding:
        """Transforms everywhere."""
        return self.coding(self._table(self._plain_modes, num_bytes))

    def coding(self, table: ModeTable) -> Coding:
        """The maps of a table."""
        transformed = _transformed(table.modes)
        left = table.num_bytes - self._fixed_bytes(table.modes)
        found = dict(zip(transformed, self.spectra.at_bytes(left, groups=transformed), strict=True))
        layers: list[LayerMaps] = []
        for group, (start, stop) in enumerate(self.groups):
            layers += [TransformLayer()] * (stop - start) if group in found else self._code(group, table.modes).layers
        sizes = [
            found[group].layout.bytes_per_token if group in found else self._code(group, table.modes).bytes_per_token
            for group in range(len(self.groups))
        ]
        return Coding(table, tuple(layers), tuple(map(found.get, range(len(self.groups)))), tuple(sizes))

    def decide(self, num_bytes: int) -> ModeTable:
        """The table of least predicted distortion; see the module docstring."""
        plain = self._table(self._plain_modes, num_bytes)
        wanted = {self._wanted(plain.slope * 2.0**step, num_bytes) for step in _LAMBDA_STEPS} - {plain.modes}
        tables = [plain, *(self._table(modes, num_bytes) for modes in sorted(wanted))]
        return min(tables, key=lambda table: (table.num_silent_groups, table.distortion))

    def candidates(self, slope: float) -> list[list[Candidate]]:
        """Every mode of every group, `transform` first."""
        return [
            [self._transform(group, slope)]
            + [Candidate(code.mode, code.distortion, 8 * code.bytes_per_token, slope) for code in codes]
            for group, codes in enumerate(self.fixed)
        ]

    @property
    def _plain_modes(self) -> Modes:
        return tuple("transform" for _ in self.groups)

    def _wanted(self, slope: float, num_bytes: int) -> Modes:
        """The cheapest mode of each group; where bytes do not hold all wishes, those that save most go first."""
        modes: list[Mode] = ["transform"] * len(self.groups)
        wishes = []
        for group, (transform, *others) in enumerate(self.candidates(slope)):
            best = min([transform, *others], key=lambda candidate: candidate.cost)
            if best is not transform:
                wishes.append((best.cost - transform.cost, group, best))
        left = num_bytes - len(self.groups)
        for _, group, best in sorted(wishes, key=lambda wish: wish[:2]):
            # every other group keeps a byte at least
            if best.num_bits // 8 - 1 <= left:
                left -= best.num_bits // 8 - 1
                modes[group] = best.mode
        return tuple(modes)

    def _table(self, modes: Modes, num_bytes: int) -> ModeTable:
        transformed = _transformed(modes)
        allocations = self.spectra.allocate(num_bytes - self._fixed_bytes(modes), groups=transformed)
        coding = sum(allocation.predicted_distortion for allocation in allocations)
        sizes = [one.total_bits + two.total_bits for one, two in zip(allocations[::2], allocations[1::2], strict=True)]
        return ModeTable(
            modes=modes,
            num_bytes=num_bytes,
            slope=allocations[0].slope if allocations else 0.0,
            distortion=coding
            + sum(self.spectra.translation(group) for group in transformed)
            + sum(self._code(group, modes).distortion for group in range(len(modes)) if group not in transformed),
            num_silent_groups=sizes.count(0),
        )

    def _transform(self, group: int, slope: float) -> Candidate:
        """The least cost of every component by itself; whole packing units, which an allocation has, cost a few bits more."""
        table = self.spectra.table
        widths_W = torch.tensor(table.widths)
        variance_C = torch.cat([self.spectra.keys[group].variance_C, self.spectra.values[group].variance_C])
        distortion_CW = variance_C[:, None] * torch.tensor(table.distortion, dtype=torch.float64)
        chosen_C1 = (distortion_CW + slope * widths_W).argmin(1, keepdim=True)
        distortion = self.spectra.translation(group) + float(distortion_CW.gather(1, chosen_C1).sum())
        return Candidate("transform", distortion, int(widths_W[chosen_C1].sum()), slope)

    def _code(self, group: int, modes: Modes) -> FixedCode:
        return next(code for code in self.fixed[group] if code.mode == modes[group])

    def _fixed_bytes(self, modes: Modes) -> int:
        transformed = _transformed(modes)
        return sum(self._code(group, modes).bytes_per_token for group in range(len(modes)) if group not in transformed)


def fixed_codes(
    job: Job, statistics: PairStatistics, weights: ErrorWeights, consumer: LoadedModel
) -> tuple[tuple[FixedCode, ...], ...]:
    """The modes of each group other than `transform`, as far as `method.modes` has them and the models allow it.

    Args:
        statistics: with attention inputs of every layer, if `patch` is among the modes.
    """
    modes = job.config.method.modes
    fits = LayerFits(statistics, job.config.method.ridge)
    found = []
    for group, (start, stop) in enumerate(job.groups):
        codes = []
        if "raw" in modes and job.has_own_sources(group):
            codes.append(_raw(job, statistics, group, weights))
        if "patch" in modes and job.has_own_sources(group):
            parts = [
                _patched_layer(fits, statistics, layer, projections(consumer, layer), job.r_h[layer])
                for layer in range(start, stop)
            ]
            distortion = sum(
                weighted(error_2OO[index], weights.of_group(layer, layer + 1, index))
                for layer, (_, error_2OO) in zip(range(start, stop), parts, strict=True)
                for index in (0, 1)
            )
            size = sum(job.patch_bytes(layer) for layer in range(start, stop))
            codes.append(FixedCode("patch", tuple(maps for maps, _ in parts), size, distortion))
        found.append(tuple(codes))
    return tuple(found)


def predictions(coder: Coder, table: ModeTable, *, prefix_tokens: int) -> list[dict[str, Any]]:
    """What is known of every group's modes, as plain data: losses and costs in nats per scored token.

    Args:
        prefix_tokens: length of the prefix that losses are predicted for.
    """
    nats = 0.5 * prefix_tokens
    rows = []
    for (start, stop), candidates, chosen in zip(coder.groups, coder.candidates(table.slope), table.modes, strict=True):
        priced = {
            candidate.mode: {
                "loss": nats * candidate.distortion,
                "bytes_per_token": -(-candidate.num_bits // 8),
                "cost": nats * candidate.cost,
            }
            for candidate in candidates
        }
        rows.append({"layers": [start, stop], "mode": chosen, "predicted": priced})
    return rows


def _raw(job: Job, statistics: PairStatistics, group: int, weights: ErrorWeights) -> FixedCode:
    kinds: tuple[Kind, Kind] = ("group_k", "group_v")
    start, stop = job.groups[group]
    return FixedCode(
        mode="raw",
        layers=(RawLayer(),) * (stop - start),
        bytes_per_token=job.dense_bytes_per_token * (stop - start) // job.num_layers,
        distortion=sum(
            weighted(difference(statistics[group, kind]), weights.of_group(start, stop, index))
            for index, kind in enumerate(kinds)
        ),
    )


def weighted(moment_OO: Tensor, weights: Tensor) -> float:
    """What an error of this second moment costs, with weights `[O]` of elements or `[O, O]`."""
    found = moment_OO.diagonal() if weights.dim() == 1 else moment_OO
    return max(float((found * weights).sum()), 0.0)


def difference(moments: Moments) -> Tensor:
    """Second moment `[O, O]` of the difference of the producer's and the consumer's rows, both of the same width."""
    width, covariance_nn = moments.width_a, moments.covariance()
    cross_OO = covariance_nn[:width, width:]
    shift_O = moments.mean_n[:width] - moments.mean_n[width:]
    spread_OO = covariance_nn[:width, :width] + covariance_nn[width:, width:] - cross_OO - cross_OO.T
    return spread_OO + torch.outer(shift_O, shift_O)


def _patched_layer(
    fits: LayerFits, statistics: PairStatistics, layer: int, given: Projections, rank: int
) -> tuple[PatchLayer, Tensor]:
    """A Patch layer, and its errors as `patch_error` gives them."""
    maps = fits.patch(layer, given, r_h=rank)
    return maps, patch_error(statistics[layer, "x"], maps, given)


def patch_error(moments: Moments, maps: PatchLayer, given: Projections) -> Tensor:
    """Second moments `[2, F, F]` of the errors of a Patch layer's keys and values, from the moments of attention inputs."""
    width, covariance_nn = moments.width_a, moments.covariance()
    project_MO = given.weight_MO.double()
    # the consumer's row less the patched one, as one map of the joint row [x_A x_B]
    error_nO = torch.cat([-maps.encode_h.weight.double() @ maps.project.weight.double(), project_MO])
    keys_FF, values_FF = (part_nF.T @ covariance_nn @ part_nF for part_nF in error_nO.chunk(2, dim=1))
    if given.k_norm_D is not None:
        keys_MF = project_MO.chunk(2, dim=1)[0]
        power_F = (keys_MF * (covariance_nn[width:, width:] @ keys_MF)).sum(0)
        mean_F = moments.mean_n[width:] @ keys_MF + given.bias_O.double().chunk(2)[0]
        gain_F = _norm_gain(power_F + mean_F.square(), given.k_norm_D.double(), given.k_norm_eps)
        keys_FF = keys_FF * torch.outer(gain_F, gain_F)
    return torch.stack([keys_FF, values_FF])


def _norm_gain(power_F: Tensor, scale_D: Tensor, eps: float) -> Tensor:
    """How the key norm scales the error of each key, at the mean power of its head."""
    power_HD = power_F.view(-1, len(scale_D))
    return (scale_D / (power_HD.mean(1, keepdim=True) + eps).sqrt()).flatten()


def _transformed(modes: Modes) -> tuple[int, ...]:
    return tuple(group for group, mode in enumerate(modes) if mode == "transform")
