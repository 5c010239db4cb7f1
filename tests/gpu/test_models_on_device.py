"""Models and taps on a CUDA device give what they give on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_model

from scd_trt.models import cache_layers, forward_with_cache, load_model, trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]


def test_traces_and_outside_caches_agree_with_the_cpu(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    ids = list(range(4, 68))
    on_cpu, on_device = load_model(path), load_model(path, device="cuda")
    expected, found = trace(on_cpu, ids), trace(on_device, ids)
    for name in ("k_TF", "v_TF", "x_TM"):
        for cpu, device in zip(getattr(expected, name), getattr(found, name), strict=True):
            # float32 products are summed in another order, and may use TF32's 10 bits of mantissa
            torch.testing.assert_close(device.cpu(), cpu, rtol=2e-2, atol=2e-2)
    tail = list(range(100, 110))
    logits = [
        forward_with_cache(m, tail, cache_layers(m, t), start_position=64)
        for m, t in ((on_cpu, expected), (on_device, found))
    ]
    torch.testing.assert_close(logits[1].cpu(), logits[0], rtol=5e-2, atol=5e-2)
