"""The trained aligner of a Patch layer: `g(z) = W_2 silu(W_1 z + b_1) + b_2`, fitted to `||g(z) - x_B||^2`.

Shapes: T rows, R rank of the code, M hidden size, P hidden width of the aligner.
Owns: `RowSample`, a uniform sample of bounded size of a stream's rows (second pass over the calibration text), and `train`.
The last layer is folded with the consumer's projections, as the affine aligner is, so the codec sees one more map and
nothing else. Memory is `capacity` rows whatever the length of the text. Everything random comes from the given seed.

Whether the result is used is decided on held-out KL by the pipeline, not here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from scd_trt.distill.fit import Projections, fold
from scd_trt.translator import AffineMap, PatchLayer

BATCH_ROWS = 256
LEARNING_RATE = 2e-3


class RowSample:
    """Uniform sample without replacement of at most `capacity` pairs of rows of a stream."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self._generator = torch.Generator().manual_seed(seed)
        self._keys_T = torch.empty(0)
        self._rows: tuple[Tensor, Tensor] | None = None

    def update(self, a_TI: Tensor, b_TJ: Tensor) -> None:
        """Offer rows; every row seen so far is equally likely to be kept: those of the smallest random keys are."""
        keys_T = torch.cat([self._keys_T, torch.rand(a_TI.shape[0], generator=self._generator)])
        kept = keys_T.argsort(stable=True)[: self.capacity]
        old = self._rows or (a_TI[:0], b_TJ[:0])
        self._keys_T = keys_T[kept]
        self._rows = (torch.cat([old[0], a_TI])[kept], torch.cat([old[1], b_TJ])[kept])

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The sampled rows of both sides."""
        if self._rows is None:
            raise ValueError("no rows were offered: there is nothing to train on")
        return self._rows


def train(
    affine: PatchLayer, sample: RowSample, projections: Projections, *, width: int, num_steps: int, seed: int
) -> PatchLayer:
    """Replace the affine aligner of a Patch layer by an MLP; its encoder stays.

    Args:
        sample: the producer's and the consumer's normalised inputs.
        width: hidden width P.
    """
    x_A_TM, x_B_TM = sample.rows
    codes_TR = affine.encode_h(x_A_TM)
    mean_M = x_B_TM.mean(0)
    spread = (x_B_TM - mean_M).std(correction=0).clamp_min(torch.finfo(torch.float32).tiny)
    parameters = _initial(codes_TR.shape[1], width, x_B_TM.shape[1], seed)
    _descend(parameters, codes_TR, (x_B_TM - mean_M) / spread, num_steps=num_steps, seed=seed)
    w1_RP, b1_P, w2_PM, b2_M = (parameter.detach() for parameter in parameters)
    return PatchLayer(
        encode_h=affine.encode_h,
        hidden=AffineMap(w1_RP.contiguous(), b1_P),
        project=fold(w2_PM * spread, b2_M * spread + mean_M, projections),
        k_norm_D=affine.k_norm_D,
        k_norm_eps=affine.k_norm_eps,
    )


def _initial(num_in: int, width: int, num_out: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w1_RP = torch.randn(num_in, width, generator=generator) / num_in**0.5
    w2_PM = torch.randn(width, num_out, generator=generator) / width**0.5
    parameters = [w1_RP, torch.zeros(width), w2_PM, torch.zeros(num_out)]
    return [parameter.requires_grad_() for parameter in parameters]


def _descend(parameters: list[Tensor], z_TR: Tensor, target_TM: Tensor, *, num_steps: int, seed: int) -> None:
    w1_RP, b1_P, w2_PM, b2_M = parameters
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, num_steps)
    with torch.enable_grad():
        for _ in range(num_steps):
            rows = torch.randint(z_TR.shape[0], (BATCH_ROWS,), generator=generator)
            predicted_TM = functional.silu(z_TR[rows] @ w1_RP + b1_P) @ w2_PM + b2_M
            gradients = torch.autograd.grad(functional.mse_loss(predicted_TM, target_TM[rows]), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimiser.step()
            schedule.step()
