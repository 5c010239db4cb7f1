"""Session throughput against plain transport writes of the same bytes, in one run, two processes, NIXL over tcp or shm.

    python benchmarks/transfer_throughput.py [--lane tcp|shm|auto] [--megabytes 256] [--write-kilobytes 1024] [--window 8]

Plain: the same number of writes of the same size and window, posted and polled in a loop, no control channel, no digest, no
store. Session: expect -> plan -> send (copy into the send buffer, digest) -> land (copy, digest) -> published and waited for.
Prints both rates and their ratio, and the CPU time of this (the decode) process per GB. Wants two idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from scd_trt.config import ControlConfig, StoreConfig, TransportConfig
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.session import Consumer, Producer, open_transport
from scd_trt.transfer.store import CodeStore
from scd_trt.transfer.transport import Buffer, RemoteArena
from scd_trt.transfer.wire import CodeLayout, new_transfer_id

TOKENS_PER_BLOCK = 32
NUM_GROUPS = 16
ROUNDS = 5


def shape_of(options: argparse.Namespace) -> tuple[CodeLayout, int]:
    """Layout and number of blocks so that a group of the whole prompt is one write."""
    write_bytes = options.write_kilobytes << 10
    num_blocks = 32
    layout = CodeLayout(TOKENS_PER_BLOCK, (write_bytes // (num_blocks * TOKENS_PER_BLOCK),) * NUM_GROUPS)
    return layout, num_blocks


def prefill(options: argparse.Namespace, pipe: Connection) -> None:
    """The prefill process: plain writes first, then a producer."""
    config = transport_config(options)
    transport = open_transport(config)
    source = Buffer(options.megabytes << 20)
    source.array[:] = np.random.default_rng(0).integers(0, 256, source.num_bytes, dtype=np.uint8)
    sender = transport.open_sender("plain-sender", source, pipe.recv())
    for _ in range(ROUNDS):
        pipe.recv()
        write_plainly(sender, options)
        pipe.send("posted")
    sender.destroy()
    layout, num_blocks = shape_of(options)
    producer = Producer(
        transport, config=config, control=ControlConfig(), listen="127.0.0.1:0", fingerprint="benchmark", layout=layout
    )
    pipe.send(producer.address)
    codes = [
        source.array[: num_blocks * TOKENS_PER_BLOCK * width].reshape(-1, width) for width in layout.bytes_per_token
    ]
    while (prompts := pipe.recv()) is not None:
        for keys in prompts:
            push = producer.plan(keys)
            for group, rows in enumerate(codes):
                push.send(group, 0, rows)
            push.finish()
    producer.close()


def write_plainly(sender, options: argparse.Namespace) -> None:
    """All bytes in equal writes, `window` outstanding."""
    write_bytes, outstanding = options.write_kilobytes << 10, []
    for offset in range(0, options.megabytes << 20, write_bytes):
        while len(outstanding) >= options.window:
            outstanding = [handle for handle in outstanding if not finished(sender, handle)]
        outstanding.append(sender.write(offset, offset, write_bytes, notification=b"x" * 80))
    while outstanding:
        outstanding = [handle for handle in outstanding if not finished(sender, handle)]


def finished(sender, handle: int) -> bool:
    """Poll; release when done."""
    if not sender.poll(handle):
        return False
    sender.release(handle)
    return True


def transport_config(options: argparse.Namespace) -> TransportConfig:
    """The same for both processes."""
    size = options.megabytes << 20
    return TransportConfig(
        lane=options.lane, window=options.window, arena_bytes=2 * size, send_buffer_bytes=size, write_timeout_s=30
    )


def measure_plain(options: argparse.Namespace, transport, pipe: Connection) -> float:
    """Best bytes per second of plain writes."""
    arena = Buffer(options.megabytes << 20)
    receiver = transport.open_receiver("plain-receiver", arena)
    pipe.send(RemoteArena(receiver.metadata, arena.address, arena.num_bytes))
    num_writes, best_s = (options.megabytes << 10) // options.write_kilobytes, float("inf")
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        pipe.send("go")
        num_seen = 0
        while num_seen < num_writes:
            num_seen += len(receiver.drain())
            time.sleep(5e-4)
        best_s = min(best_s, time.perf_counter() - begin_s)
        pipe.recv()
    receiver.destroy()
    return (options.megabytes << 20) / best_s


async def measure_session(options: argparse.Namespace, transport, pipe: Connection) -> float:
    """Best bytes per second from the first send to the last transfer that has landed."""
    layout, num_blocks = shape_of(options)
    config = transport_config(options)
    store = CodeStore(StoreConfig(capacity_bytes=options.megabytes << 20))
    consumer = Consumer(
        transport,
        config=config,
        control=ControlConfig(),
        listen="127.0.0.1:0",
        fingerprint="benchmark",
        layout=layout,
        store=store,
    )
    client, producer = ControlClient(consumer.address, ControlConfig()), pipe.recv()
    num_prompts = (options.megabytes << 20) // (layout.block_bytes * num_blocks)
    best_s = float("inf")
    for turn in range(ROUNDS):
        prompts = [keys_of(f"{turn}.{index}", num_blocks) for index in range(num_prompts)]
        transfers = [new_transfer_id() for _ in prompts]
        for transfer_id, keys in zip(transfers, prompts, strict=True):
            expected = await client.expect(transfer_id, keys, producer=producer)
            if expected.reason:
                raise SystemExit(f"not granted: {expected.reason} {expected.text}")
        begin_s = time.perf_counter()
        pipe.send(prompts)
        for transfer_id in transfers:
            waited = await client.wait(transfer_id, timeout_s=60)
            if waited.state != "landed":
                raise SystemExit(f"transfer failed: {waited.reason}")
        best_s = min(best_s, time.perf_counter() - begin_s)
    pipe.send(None)
    await client.close()
    consumer.close()
    return num_prompts * num_blocks * layout.block_bytes / best_s


def keys_of(text: str, num_blocks: int) -> list[bytes]:
    """Distinct block keys."""
    return [hashlib.blake2b(f"{text}.{block}".encode(), digest_size=16).digest() for block in range(num_blocks)]


def main() -> None:
    """Run both measures and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=["auto", "tcp", "shm"], default="tcp")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--write-kilobytes", type=int, default=1024)
    parser.add_argument("--window", type=int, default=8)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=prefill, args=(options, there))
    process.start()
    transport = open_transport(transport_config(options))
    began_s = time.process_time()
    plain = measure_plain(options, transport, here)
    middle_s = time.process_time()
    session = asyncio.run(measure_session(options, transport, here))
    ended_s = time.process_time()
    process.join(30)
    print(
        f"lane {transport.lane}, {options.megabytes} MiB in writes of {options.write_kilobytes} KiB, window {options.window}"
    )
    gigabytes = ROUNDS * (options.megabytes << 20) / 1e9
    print(f"plain writes {plain / 1e6:8.0f} MB/s   {(middle_s - began_s) / gigabytes:5.2f} CPU s/GB")
    print(f"session      {session / 1e6:8.0f} MB/s   {(ended_s - middle_s) / gigabytes:5.2f} CPU s/GB")
    print(f"ratio        {session / plain:8.2f}")


if __name__ == "__main__":
    main()
