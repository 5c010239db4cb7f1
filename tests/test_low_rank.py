"""Low-rank and KVTC-style coders: exact sizes, falling losses, and the plain formulas of PCA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serving_pairs import TinyPair, write_pair
from torch import Tensor

from scd_trt.distill.calibration import SilentProgress, read_texts
from scd_trt.distill.plan import prepare
from scd_trt.evaluate import samples
from scd_trt.evaluate.low_rank import JointPca, Kvtc, LowRank, Pca, rank_for
from scd_trt.evaluate.samples import joint_groups, joint_moments
from scd_trt.models import load_model, trace

NUM_LAYERS, WIDTH, NUM_TOKENS = 4, 8, 500


def correlated_rows(seed: int) -> list[Tensor]:
    """Rows of four layers that all see the same six latent numbers, and a little noise."""
    mixing = torch.randn(6, NUM_LAYERS * WIDTH, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(NUM_TOKENS, 6, generator=generator)
    joint = latent @ mixing + 0.05 * torch.randn(NUM_TOKENS, NUM_LAYERS * WIDTH, generator=generator) + 1.5
    return [*joint.chunk(NUM_LAYERS, dim=1)]


def pca_of(rows: Tensor) -> Pca:
    centred = (rows - rows.mean(0)).double()
    return Pca.of(rows.double().mean(0), centred.T @ centred / len(rows))


def low_rank(rank: int) -> LowRank:
    keys, values = correlated_rows(0), correlated_rows(1)
    return LowRank(tuple(map(pca_of, keys)), tuple(map(pca_of, values)), rank)


def joint(groups: tuple[tuple[int, int], ...] = ((0, NUM_LAYERS),)) -> JointPca:
    keys, values = correlated_rows(0), correlated_rows(1)
    return JointPca(groups, *(tuple(pca_of(torch.cat(rows[a:b], 1)) for a, b in groups) for rows in (keys, values)))


def error(found: list[Tensor], given: list[Tensor], first: int = 4) -> float:
    pairs = zip(found, given, strict=True)
    return float(sum((a[first:] - b[first:]).square().mean() for a, b in pairs))


def test_low_rank_is_the_plain_projection() -> None:
    keys, values = correlated_rows(2), correlated_rows(3)
    coder = low_rank(3)
    coded = coder(keys, values)
    _, _, right = torch.linalg.svd((correlated_rows(0)[2] - correlated_rows(0)[2].mean(0)).double())
    projector = (right[:3].T @ right[:3]).float()
    mean = correlated_rows(0)[2].mean(0)
    # coefficients of size ten in float16: 2^-11 of them
    torch.testing.assert_close(coded.keys[2], (keys[2] - mean) @ projector + mean, atol=2e-2, rtol=0)
    assert coded.num_bytes == NUM_TOKENS * 2 * NUM_LAYERS * 3 * 2
    errors = [error([*low_rank(rank)(keys, values).keys], keys, 0) for rank in (1, 3, 6, 8)]
    assert errors == sorted(errors, reverse=True)
    # the whole width: only float16 is left
    assert errors[-1] < 1e-4


def test_rank_takes_at_least_the_bytes() -> None:
    assert rank_for(2304, num_layers=30, width=192) == 20  # 19.2
    assert rank_for(2400, num_layers=30, width=192) == 20
    assert rank_for(10, num_layers=30, width=192) == 1
    assert rank_for(1e9, num_layers=30, width=192) == 192


def test_kvtc_keeps_its_rate_and_its_sinks() -> None:
    keys, values = correlated_rows(2), correlated_rows(3)
    coder = Kvtc.of_size(joint(), code_bytes=6, itemsize=2)
    coded = coder(keys, values)
    assert coder.code_bytes <= 6
    assert coded.num_bytes == (NUM_TOKENS - 4) * coder.code_bytes + 4 * 2 * NUM_LAYERS * WIDTH * 2
    for given, found in ((keys, coded.keys), (values, coded.values)):
        for x, y in zip(given, found, strict=True):
            assert torch.equal(x[:4], y[:4])
            assert not torch.equal(x[4:8], y[4:8])
    errors = [
        error([*Kvtc.of_size(joint(), code_bytes=size, itemsize=2)(keys, values).keys], keys) for size in (2, 6, 12, 64)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 1000


def test_kvtc_gains_from_all_layers_at_once() -> None:
    keys, values = correlated_rows(2), correlated_rows(3)
    alone = tuple((layer, layer + 1) for layer in range(NUM_LAYERS))
    whole, split = (Kvtc.of_size(joint(groups), code_bytes=8, itemsize=2) for groups in (((0, NUM_LAYERS),), alone))
    assert error([*whole(keys, values).keys], keys) < error([*split(keys, values).keys], keys) / 4


def test_joint_groups_cover_all_layers_within_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joint_groups(30, 192) == ((0, 30),)
    monkeypatch.setattr(samples, "MAX_JOINT_WIDTH", 100)
    assert joint_groups(10, 32) == ((0, 2), (2, 5), (5, 7), (7, 10))
    assert joint_groups(2, 500) == ((0, 1), (1, 2))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("low_rank"), policy="rd")


def test_joint_moments_are_those_of_all_rows_and_resume(pair: TinyPair, tmp_path: Path) -> None:
    job = prepare(pair.config)
    texts = read_texts(job)
    producer = load_model(job.producer_path)
    found = joint_moments(producer, texts, tmp_path, SilentProgress())
    rows = torch.cat([torch.cat(trace(producer, ids).k_TF, dim=1)[4:] for ids in texts.calibration]).double()
    centred = rows - rows.mean(0)
    torch.testing.assert_close(found[0, "group_k"].covariance(), centred.T @ centred / len(rows))
    again = joint_moments(producer, texts, tmp_path, SilentProgress())
    assert torch.equal(again[0, "group_v"].cross_nn, found[0, "group_v"].cross_nn)
    assert again.num_sequences == len(texts.calibration)
