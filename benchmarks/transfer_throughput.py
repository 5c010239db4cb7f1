"""The session against plain transport writes of the same bytes, in one run, two processes, NIXL over tcp or shm.

    python benchmarks/transfer_throughput.py [--lane tcp|shm|auto] [--megabytes 256] [--write-kilobytes 1024] [--window 8]
    python benchmarks/transfer_throughput.py --gigabits 0.1 1 2.5      over shaped links; needs CAP_NET_ADMIN

Plain: the same number of writes of the same size and window, posted and polled in a loop, no control channel, no digest, no
store. Session: expect -> plan -> send (copy into the send buffer, digest) -> land (copy, digest) -> published and waited for.

- Without `--gigabits`: both rates on this machine, where nothing but the processors limits them, so that the session's own
  work shows (wants two idle cores); CPU time of the decode process per GB; and what one small request costs beyond its plain
  writes, from `expect` to landed, against the limit of one round trip and 2 ms.
- With `--gigabits`: both rates between two network namespaces whose link is shaped (`tc tbf`), as on a real network; the
  limit is 0.90 of plain.

Plain and session take turns, round by round and request by request, so that other work on the processors meets both alike.
All figures are medians; quartiles stand beside them, and say how quiet the machine was. Neither the best round nor the
fastest requests are reported: they would flatter the session, whose threads suffer more from a busy machine than one loop
does. Where the session comes out faster than the plain writes that it consists of (in throughput: by more than a tenth), the
machine was too busy to say anything: that counts as missed.
Exits with 1 where a limit is missed, and says so.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from scd_trt.config import ControlConfig, StoreConfig, TransportConfig
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.session import Consumer, Producer, open_transport
from scd_trt.transfer.store import CodeStore
from scd_trt.transfer.transport import Buffer, Receiver, RemoteArena
from scd_trt.transfer.wire import CodeLayout, new_transfer_id

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from network_link import Link, enter_namespace, why_not

TOKENS_PER_BLOCK = 32
NUM_BLOCKS = 32
NUM_GROUPS = 16
NUM_SMALL_REQUESTS = 100
MIN_SHAPED_RATIO = 0.90
MAX_CREDIBLE_RATIO = 1.1
NOT_MEASURABLE = "NOT MEASURABLE on so busy a machine"
MAX_OVERHEAD_S = 2e-3


@dataclass(frozen=True)
class Task:
    """What one pair of processes measures."""

    config: TransportConfig
    num_bytes: int
    write_bytes: int
    num_small_requests: int
    num_rounds: int
    namespaces: tuple[str | None, str | None] = (None, None)
    listen: str = "127.0.0.1:0"
    secret_file: Path | None = None

    @property
    def layout(self) -> CodeLayout:
        """A group of a whole prompt is one write."""
        return CodeLayout(TOKENS_PER_BLOCK, (self.write_bytes // (NUM_BLOCKS * TOKENS_PER_BLOCK),) * NUM_GROUPS)

    @property
    def num_prompts(self) -> int:
        """Prompts of one round."""
        return self.num_bytes // (self.write_bytes * NUM_GROUPS)

    @property
    def control(self) -> ControlConfig:
        """The control channel's settings; a shaped link is off loopback, so it needs a secret."""
        return ControlConfig(secret_file=self.secret_file)


@dataclass
class Figures:
    """What the decode process measured: seconds of each round and of each small request, CPU seconds of all rounds."""

    lane: str
    num_bytes: int
    plain_s: list[float] = field(default_factory=list)
    session_s: list[float] = field(default_factory=list)
    plain_cpu_s: float = 0.0
    session_cpu_s: float = 0.0
    plain_request_s: list[float] = field(default_factory=list)
    session_request_s: list[float] = field(default_factory=list)
    round_trip_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Rate of the session over that of plain writes."""
        return statistics.median(self.plain_s) / statistics.median(self.session_s)

    def rate(self, seconds: list[float]) -> str:
        """Median and quartiles in words."""
        low, middle, high = (self.num_bytes / each / 1e6 for each in reversed(quartiles(seconds)))
        return f"{middle:8.1f} MB/s ({low:.1f} to {high:.1f})"

    def cpu(self, seconds: float) -> str:
        """CPU time in words."""
        return f"{seconds / len(self.plain_s) / self.num_bytes * 1e9:5.2f} CPU s/GB"


# -- the prefill process


def prefill(task: Task, pipe: Connection) -> None:
    """Writes plainly, or pushes prompts, as the decode process asks."""
    if task.namespaces[0] is not None:
        enter_namespace(task.namespaces[0])
    transport = open_transport(task.config)
    source = Buffer(task.num_bytes)
    source.array[:] = np.random.default_rng(0).integers(0, 256, source.num_bytes, dtype=np.uint8)
    sender = transport.open_sender("plain-sender", source, pipe.recv())
    producer = Producer(
        transport,
        config=task.config,
        control=task.control,
        listen=task.listen,
        fingerprint="benchmark",
        layout=task.layout,
    )
    pipe.send(producer.address)
    while (order := pipe.recv()) is not None:
        match order:
            case int():
                write_plainly(sender, task, order)
                pipe.send("posted")
            case list():
                push_prompts(producer, task, source, order)
    sender.destroy()
    producer.close()


def push_prompts(producer: Producer, task: Task, source: Buffer, prompts: list[list[bytes]]) -> None:
    """Send the codes of prompts, given by their keys, group by group."""
    rows = NUM_BLOCKS * TOKENS_PER_BLOCK
    codes = [source.array[: rows * width].reshape(rows, width) for width in task.layout.bytes_per_token]
    for keys in prompts:
        push = producer.plan(keys)
        for group, group_codes in enumerate(codes):
            push.send(group, 0, group_codes[: len(keys) * TOKENS_PER_BLOCK])
        push.finish()


def write_plainly(sender, task: Task, num_bytes: int) -> None:
    """All bytes in equal writes, `window` outstanding."""
    write_bytes, outstanding = min(task.write_bytes, num_bytes // NUM_GROUPS), []
    for offset in range(0, num_bytes, write_bytes):
        while len(outstanding) >= task.config.window:
            outstanding = unfinished(sender, outstanding)
        outstanding.append(sender.write(offset, offset, write_bytes, notification=bytes(80)))
    while outstanding:
        outstanding = unfinished(sender, outstanding)


def unfinished(sender, handles: list[int]) -> list[int]:
    """Poll writes once, forget those that are done; rests a moment where none was."""
    done = [handle for handle in handles if sender.poll(handle)]
    for handle in done:
        sender.release(handle)
    if not done:
        time.sleep(1e-4)
    return [handle for handle in handles if handle not in done]


# -- the decode process


def decode(task: Task, pipe: Connection, results: Connection) -> None:
    """Ask for both kinds of transfers in turn and send the figures back."""
    if task.namespaces[1] is not None:
        enter_namespace(task.namespaces[1])
    results.send(asyncio.run(measure_both(task, pipe)))


async def measure_both(task: Task, pipe: Connection) -> Figures:
    """Rounds, then small requests; which kind comes first alternates."""
    transport = open_transport(task.config)
    arena = Buffer(task.num_bytes)
    receiver = transport.open_receiver("plain-receiver", arena)
    pipe.send(RemoteArena(receiver.metadata, arena.address, arena.num_bytes))
    consumer = Consumer(
        transport,
        config=task.config,
        control=task.control,
        listen="127.0.0.1:0",
        fingerprint="benchmark",
        layout=task.layout,
        store=CodeStore(StoreConfig(capacity_bytes=task.num_bytes)),
    )
    client = ControlClient(consumer.address, task.control)
    ends = Ends(task, pipe, receiver, client, producer=pipe.recv())
    figures = Figures(transport.lane, task.num_bytes)
    for name in ("warm-up", "warm"):
        await ends.plain(task.layout.block_bytes, NUM_GROUPS)
        await ends.small_session(name)
    for turn in range(task.num_rounds):
        await measure_round(ends, figures, turn)
    for index in range(task.num_small_requests):
        await measure_request(ends, figures, index)
    pipe.send(None)
    await client.close()
    consumer.close()
    receiver.destroy()
    return figures


async def measure_round(ends: Ends, figures: Figures, turn: int) -> None:
    """One round of each kind."""
    for is_plain in (True, False) if turn % 2 == 0 else (False, True):
        begin_s = time.process_time()
        if is_plain:
            figures.plain_s.append(await ends.plain(ends.task.num_bytes, ends.task.num_bytes // ends.task.write_bytes))
            figures.plain_cpu_s += time.process_time() - begin_s
        else:
            figures.session_s.append(await ends.session(f"{turn}"))
            figures.session_cpu_s += time.process_time() - begin_s


async def measure_request(ends: Ends, figures: Figures, index: int) -> None:
    """One small request of each kind, and a round trip of the control channel."""
    for is_plain in (True, False) if index % 2 == 0 else (False, True):
        if is_plain:
            figures.plain_request_s.append(await ends.plain(ends.task.layout.block_bytes, NUM_GROUPS))
        else:
            figures.session_request_s.append(await ends.small_session(f"small.{index}"))
    begin_s = time.perf_counter()
    await ends.client.status()
    figures.round_trip_s.append(time.perf_counter() - begin_s)


@dataclass(frozen=True)
class Ends:
    """The decode process's ends of both ways, and the pipe that tells the prefill process what to send."""

    task: Task
    pipe: Connection
    receiver: Receiver
    client: ControlClient
    producer: str

    async def plain(self, num_bytes: int, num_writes: int) -> float:
        """Seconds of plain writes; in a thread, so that the control channel's heart goes on beating."""
        return await asyncio.to_thread(self._plain, num_bytes, num_writes)

    def _plain(self, num_bytes: int, num_writes: int) -> float:
        begin_s, num_seen = time.perf_counter(), 0
        self.pipe.send(num_bytes)
        while num_seen < num_writes:
            num_seen += len(self.receiver.drain())
            time.sleep(2e-4)
        elapsed_s = time.perf_counter() - begin_s
        self.pipe.recv()
        return elapsed_s

    async def session(self, name: str) -> float:
        """Seconds from the first send to the last landing of one round."""
        prompts = [keys_of(f"{name}.{index}", NUM_BLOCKS) for index in range(self.task.num_prompts)]
        transfers = [await expect(self.client, keys, self.producer) for keys in prompts]
        begin_s = time.perf_counter()
        self.pipe.send(prompts)
        for transfer_id in transfers:
            await landed(self.client, transfer_id)
        return time.perf_counter() - begin_s

    async def small_session(self, name: str) -> float:
        """Seconds from `expect` to landed of one block."""
        keys, begin_s = keys_of(name, 1), time.perf_counter()
        transfer_id = await expect(self.client, keys, self.producer)
        self.pipe.send([keys])
        await landed(self.client, transfer_id)
        return time.perf_counter() - begin_s


def quartiles(times_s: list[float]) -> list[float]:
    """Lower quartile, median and upper quartile."""
    return statistics.quantiles(times_s, n=4, method="inclusive")


async def expect(client: ControlClient, keys: list[bytes], producer: str) -> str:
    """Have a prompt granted."""
    transfer_id = new_transfer_id()
    expected = await client.expect(transfer_id, keys, producer=producer)
    if expected.reason:
        raise SystemExit(f"not granted: {expected.reason} {expected.text}")
    return transfer_id


async def landed(client: ControlClient, transfer_id: str) -> None:
    """Wait until all codes are here."""
    waited = await client.wait(transfer_id, timeout_s=60)
    if waited.state != "landed":
        raise SystemExit(f"transfer failed: {waited.reason}")


def keys_of(text: str, num_blocks: int) -> list[bytes]:
    """Distinct block keys."""
    return [hashlib.blake2b(f"{text}.{block}".encode(), digest_size=16).digest() for block in range(num_blocks)]


# -- this process


def measure(task: Task) -> Figures:
    """Run a pair of processes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    results, sent = context.Pipe(duplex=False)
    processes = [
        context.Process(target=prefill, args=(task, there)),
        context.Process(target=decode, args=(task, here, sent)),
    ]
    for process in processes:
        process.start()
    sent.close()
    try:
        figures: Figures = results.recv()
    except EOFError as error:
        raise SystemExit("a process of the benchmark failed; its message is above") from error
    finally:
        for process in processes:
            process.join(30)
    return figures


def task_of(options: argparse.Namespace, *, num_bytes: int, **changes) -> Task:
    """The transport as configured, with room for one round."""
    config = TransportConfig(
        lane=changes.pop("lane", options.lane),
        device=changes.pop("device", None),
        window=options.window,
        arena_bytes=2 * num_bytes,
        send_buffer_bytes=num_bytes,
        write_timeout_s=30,
        transfer_timeout_s=60,
    )
    return Task(config, num_bytes, **changes)


def unshaped(options: argparse.Namespace) -> bool:
    """On this machine: prints rates, CPU time and the overhead of a request; True where the limit holds."""
    task = task_of(
        options,
        num_bytes=options.megabytes << 20,
        write_bytes=options.write_kilobytes << 10,
        num_small_requests=NUM_SMALL_REQUESTS,
        num_rounds=options.rounds,
    )
    found = measure(task)
    size = f"{options.megabytes} MiB in writes of {options.write_kilobytes} KiB, window {options.window}"
    print(f"lane {found.lane}, {size}")
    print(f"plain writes {found.rate(found.plain_s)}   {found.cpu(found.plain_cpu_s)}")
    print(f"session      {found.rate(found.session_s)}   {found.cpu(found.session_cpu_s)}")
    print(f"ratio        {found.ratio:8.2f}   (no limit: the processors are shared)")
    print(f"one request of {NUM_GROUPS} x {task.layout.group_bytes(0) >> 10} KiB: ", end="")
    print(f"plain {in_ms(found.plain_request_s)}, expect to landed {in_ms(found.session_request_s)}")
    return judge_overhead(found)


def judge_overhead(found: Figures) -> bool:
    """Prints what a request costs beyond its plain writes; True where the limit holds."""
    session_s, plain_s, round_trip_s = (
        statistics.median(times_s) for times_s in (found.session_request_s, found.plain_request_s, found.round_trip_s)
    )
    overhead_s, limit_s = session_s - plain_s, round_trip_s + MAX_OVERHEAD_S
    is_kept = 0 < overhead_s <= limit_s
    print(
        f"overhead {overhead_s * 1e3:.2f} ms; one round trip of the control channel {in_ms(found.round_trip_s)}, "
        f"limit {limit_s * 1e3:.2f} ms: {verdict(is_kept) if overhead_s > 0 else NOT_MEASURABLE}"
    )
    return is_kept


def in_ms(times_s: list[float]) -> str:
    """Median and quartiles in words."""
    low, middle, high = (1e3 * each for each in quartiles(times_s))
    return f"{middle:.2f} ms ({low:.2f} to {high:.2f})"


def shaped(options: argparse.Namespace, gigabits: float) -> bool:
    """Over a link of that rate; True where the limit holds."""
    write_bytes = (options.write_kilobytes << 10) if gigabits > 0.5 else 256 << 10
    round_bytes = write_bytes * NUM_GROUPS
    num_bytes = max(1, int(gigabits * 1e9 / 8 * options.seconds) // round_bytes) * round_bytes
    with Link() as link, tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text("benchmark secret, of no use elsewhere\n")
        link.shape(gigabits)
        task = task_of(
            options,
            num_bytes=num_bytes,
            write_bytes=write_bytes,
            num_small_requests=0,
            num_rounds=options.rounds,
            lane="tcp",
            device=link.device,
            namespaces=link.names,
            listen=f"{link.addresses[0]}:0",
            secret_file=secret,
        )
        found = measure(task)
    print(
        f"{gigabits:g} Gbit/s, {num_bytes >> 20} MiB in writes of {write_bytes >> 10} KiB: "
        f"plain {found.rate(found.plain_s)}, session {found.rate(found.session_s)}, "
        f"ratio {found.ratio:.3f}, limit {MIN_SHAPED_RATIO}: "
        + (verdict(found.ratio >= MIN_SHAPED_RATIO) if found.ratio <= MAX_CREDIBLE_RATIO else NOT_MEASURABLE)
    )
    return MIN_SHAPED_RATIO <= found.ratio <= MAX_CREDIBLE_RATIO


def verdict(is_kept: bool) -> str:
    """In words."""
    return "kept" if is_kept else "MISSED"


def main() -> None:
    """Run the measures and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=["auto", "tcp", "shm"], default="tcp")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--write-kilobytes", type=int, default=1024)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[], help="rates of shaped links")
    parser.add_argument(
        "--seconds", type=float, default=0.25, help="length of one round on a shaped link, if it holds a prompt"
    )
    options = parser.parse_args()
    if options.gigabits and (reason := why_not()):
        raise SystemExit(f"shaped links cannot be made here: {reason}")
    kept = [shaped(options, gigabits) for gigabits in options.gigabits] or [unshaped(options)]
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
