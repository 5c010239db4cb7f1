"""NIXL on device memory, and the blocks of a pool that lies there: what a GPU host needs besides TensorRT-LLM.

The connectors gather rows of the pool to the host, code them there, and scatter decoded rows back; codes travel between host
buffers. Device memory in NIXL is not used by them yet: its tests say whether it could be on this host.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from gpu_host import missing_for_nixl, missing_for_torch

from scd_trt.codec import Decoder, Encoder, LayerInput
from scd_trt.config import ServedPair, TransportConfig
from scd_trt.kv_cache import KvLayout, gather_tokens, scatter_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing_for_torch()), reason=missing_for_torch())]
needs_nixl = pytest.mark.skipif(bool(missing_for_nixl()), reason=missing_for_nixl())

NUM_BYTES = 1 << 20
WRITE_TIMEOUT_S = 20.0


def segment(native: Any, memory: torch.Tensor) -> tuple[Any, int, int]:
    """Kind of memory, address and device of a tensor, as NIXL wants them."""
    if memory.is_cuda:
        return native.VRAM_SEG, memory.data_ptr(), memory.device.index
    return native.DRAM_SEG, memory.data_ptr(), 0


def open_agent(native: Any, name: str, memory: torch.Tensor) -> Any:
    config = native.nixlAgentConfig()
    config.useProgThread = True
    config.syncMode = native.NIXL_THREAD_SYNC_STRICT
    config.pthrDelay = 1000
    agent = native.nixlAgent(name, config)
    agent.createBackend("UCX", {})
    kind, address, device = segment(native, memory)
    agent.registerMem(native.nixlRegDList(kind, [(address, memory.nbytes, device, "")]), [])
    return agent


@needs_nixl
@pytest.mark.parametrize(("source", "target"), [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_nixl_writes_from_and_to_device_memory(source: str, target: str) -> None:
    from scd_trt.transfer.nixl import load_library

    native, _ = load_library(TransportConfig())
    sent = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(source)
    landed = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=target)
    torch.cuda.synchronize()
    names = [f"gpu-test-{source}-{target}-{end}" for end in ("from", "to")]
    sender, receiver = (open_agent(native, *end) for end in zip(names, (sent, landed), strict=True))
    sender.loadRemoteMD(receiver.getLocalMD())
    rows = []
    for memory in (sent, landed):
        kind, address, device = segment(native, memory)
        rows.append(native.nixlXferDList(kind, [(address, NUM_BYTES, device)]))
    handle = sender.createXferReq(native.NIXL_WRITE, *rows, names[1], b"done", [])
    sender.postXferReq(handle)
    deadline_s = time.monotonic() + WRITE_TIMEOUT_S
    while sender.getXferStatus(handle) == native.NIXL_IN_PROG:
        assert time.monotonic() < deadline_s, "the write did not end; UCX may lack CUDA support (ucx_info -d)"
        time.sleep(0.001)
    assert sender.getXferStatus(handle) == native.NIXL_SUCCESS
    sender.releaseXferReq(handle)
    torch.cuda.synchronize()
    assert torch.equal(landed.cpu(), sent.cpu())


@needs_nixl
def test_the_doctor_moves_bytes_between_processes_of_this_host() -> None:
    from scd_trt.doctor.findings import is_fit
    from scd_trt.doctor.host import Host
    from scd_trt.doctor.link import examine_lane

    pair = ServedPair.model_validate({"name": "gpu", "producer": {"model": "a"}, "consumer": {"model": "b"}})
    found = list(examine_lane(pair, Host()))
    assert is_fit(found), found


def test_a_pool_on_the_device_gives_and_takes_the_same_rows() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, tokens_per_block=4, dtype=torch.bfloat16)
    on_host = torch.randn(layout.allocate(6).shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    on_device = on_host.cuda()
    blocks, (start, stop) = [5, 0, 3], (2, 11)
    views = layout.view(on_host), layout.view(on_device)
    expected, found = (gather_tokens(view, 1, blocks, start, stop) for view in views)
    for host, device in zip(expected, found, strict=True):
        assert device.is_cuda
        assert torch.equal(device.cpu(), host)
    k_THD, v_THD = (rows.flip(0) for rows in expected)
    scatter_tokens(views[0], 0, blocks, start, k_THD=k_THD, v_THD=v_THD)
    scatter_tokens(views[1], 0, blocks, start, k_THD=k_THD.cuda(), v_THD=v_THD.cuda())
    assert torch.equal(on_device.cpu(), on_host)


def test_codes_of_a_device_pool_are_the_codes_of_a_host_pool() -> None:
    """The way of a block: gathered on the device, coded on the host, decoded there, scattered to the device."""
    from tiny_translators import HEAD_DIM, NUM_KV_HEADS, group_translator

    translator = group_translator()
    encoder, decoder = Encoder(translator), Decoder(translator)
    layout = KvLayout(translator.manifest.consumer.num_layers, NUM_KV_HEADS, HEAD_DIM, 4, torch.bfloat16)
    on_host = torch.randn(layout.allocate(3).shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    on_device, positions = on_host.cuda(), torch.arange(12)
    for group, (first, stop) in enumerate(translator.manifest.groups):
        codes = []
        for pool in (on_host, on_device):
            rows = [gather_tokens(layout.view(pool), layer, [2, 0, 1], 0, 12) for layer in range(first, stop)]
            codes.append(encoder.encode(group, [LayerInput(k.cpu(), v.cpu()) for k, v in rows], positions))
        assert torch.equal(*codes)
        decoded = decoder.decode(group, codes[1], positions)
        for layer, (k_THD, v_THD) in zip(range(first, stop), decoded, strict=True):
            for pool in (on_host, on_device):
                view = layout.view(pool)
                rows = {"k_THD": k_THD.to(pool.device), "v_THD": v_THD.to(pool.device)}
                scatter_tokens(view, layer, [2, 0, 1], 0, **rows)
    assert torch.equal(on_device.cpu(), on_host)
