"""Prefill and decode workers for the transfer's tests, in this process or in one of their own (`transfer_peer.py`)."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from scd_trt.config import ControlConfig, StoreConfig, TransportConfig
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.session import Consumer, Producer, open_transport
from scd_trt.transfer.store import CodeStore
from scd_trt.transfer.transport import Buffer, LoopbackTransport, RemoteArena
from scd_trt.transfer.wire import CodeLayout, new_transfer_id

FAST = ControlConfig(heartbeat_s=0.1, peer_timeout_s=2.0, lease_s=20.0)
MIB = 1 << 20
FINGERPRINT = "fingerprint of a translator"
LAYOUT = CodeLayout(4, (64, 256, 32))


def transport_config(backend, **changes):
    fields = {"backend": backend, "arena_bytes": MIB, "send_buffer_bytes": MIB, "window": 4, "write_timeout_s": 2.0}
    if backend == "nixl":
        fields |= {"lane": "tcp", "device": "lo"}
    return TransportConfig(**(fields | changes))


def keys_of(text, num_blocks):
    keys, key = [], text.encode()
    for _ in range(num_blocks):
        key = hashlib.blake2b(key, digest_size=16).digest()
        keys.append(key)
    return keys


def codes_of(group, first_block, num_blocks, *, layout=LAYOUT):
    """The codes that every test expects for these blocks."""
    rows = np.arange(first_block * layout.tokens_per_block, (first_block + num_blocks) * layout.tokens_per_block)
    columns = np.arange(layout.bytes_per_token[group])
    return (rows * 31 % 251).astype(np.uint8)[:, None] + ((columns * 7 + group) % 241).astype(np.uint8)


def until(condition, what, timeout_s=10.0):
    """Poll for a state of another thread or process that tells nobody."""
    deadline_s = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s until {what}"
        time.sleep(2e-3)
    return result


class DecodeWorker:
    """A decode worker in this process, and a router's client of it in a loop of its own."""

    def __init__(self, *, config, control, layout, store_bytes, transport=None, listen="127.0.0.1:0", fingerprint=None):
        self.config, self.control = config, control
        self.transport = transport or open_transport(config)
        self.store = CodeStore(StoreConfig(capacity_bytes=store_bytes))
        self.consumer = Consumer(
            self.transport,
            config=config,
            control=control,
            listen=listen,
            fingerprint=fingerprint or FINGERPRINT,
            layout=layout,
            store=self.store,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.client = self._run(self._make_client())

    async def _make_client(self):
        return ControlClient(self.consumer.address.replace("0.0.0.0", "127.0.0.1"), self.control)

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def expect(self, keys, producer):
        transfer_id = new_transfer_id()
        return transfer_id, self._run(self.client.expect(transfer_id, keys, producer=producer))

    def wait(self, transfer_id, timeout_s=10.0):
        return self._run(self.client.wait(transfer_id, timeout_s=timeout_s))

    def cancel(self, transfer_id):
        return self._run(self.client.cancel(transfer_id))

    def cancel_all(self, transfer_ids):
        async def burst():
            return await asyncio.gather(*(self.client.cancel(transfer_id) for transfer_id in transfer_ids))

        return self._run(burst())

    def report(self, transfer_id):
        return self._run(self.client.report(transfer_id))

    def trace(self, transfer_id):
        return self._run(self.client.trace(transfer_id))

    def status(self):
        return self._run(self.client.status())

    def counters(self):
        return self.consumer.statistics()

    def arena_is_whole(self):
        found = self.counters()
        return found["arena_free_bytes"] == self.config.arena_bytes and not found["arena_quarantined_bytes"]

    def close(self):
        self._run(self.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()
        self.consumer.close()


class Decode(DecodeWorker):
    """The same, by backend and with small sizes."""

    def __init__(
        self, backend, *, control=FAST, store_bytes=16 * MIB, hub=None, transport=None, layout=LAYOUT, **changes
    ):
        if hub is not None:
            transport = LoopbackTransport(hub)
        config = transport_config(backend, **changes)
        super().__init__(config=config, control=control, layout=layout, store_bytes=store_bytes, transport=transport)


def make_producer(decode, *, control=FAST, fingerprint=FINGERPRINT, layout=LAYOUT, listen="127.0.0.1:0", **changes):
    return Producer(
        decode.transport,
        config=decode.config.model_copy(update=changes),
        control=control,
        listen=listen,
        fingerprint=fingerprint,
        layout=layout,
    )


@contextlib.contextmanager
def pair_of(backend, *, producer=None, **options):
    decode = Decode(backend, **options)
    prefill = make_producer(decode, **(producer or {}))
    try:
        yield decode, prefill
    finally:
        prefill.close()
        decode.close()


def push_all(push, layout=LAYOUT):
    for group in range(layout.num_groups):
        push.send(group, push.blocks.start, codes_of(group, push.blocks.start, len(push.blocks), layout=layout))
    push.finish(encode_ms=3.5)


def assert_landed(decode, keys, layout=LAYOUT):
    with decode.consumer.pin(keys) as blocks:
        assert blocks.num_blocks == len(keys)
        for group in range(layout.num_groups):
            assert (blocks.codes(group) == codes_of(group, 0, len(keys), layout=layout)).all()


def landed_groups(decode, transfer_id):
    return sum(event.name == "landed" for event in decode.consumer.trace.events(transfer_id))


class Liar:
    """A prefill worker of our making: speaks the control protocol by the book, and writes what a test wants."""

    def __init__(self, prefill, transport):
        self.prefill, self.transport = prefill, transport
        self.arena, self.grants = None, []
        self._connect_arena = self.prefill._connect_arena
        self.prefill._connect_arena = self.spy_arena
        self._grant = self.prefill._grant
        self.prefill._grant = self.spy_grant

    async def spy_arena(self, connection, arena):
        self.arena = arena
        return await self._connect_arena(connection, arena)

    def spy_grant(self, connection, grant):
        self.grants.append(grant)
        return self._grant(connection, grant)

    def write(self, note, payload, remote_offset):
        with self.sender() as write:
            write(note, payload, remote_offset)

    @contextlib.contextmanager
    def sender(self):
        """A connected writer of its own, which no end of a session stops."""
        source = Buffer(MIB)
        remote = RemoteArena(self.arena.metadata, self.arena.address, self.arena.num_bytes)
        sender = self.transport.open_sender(f"liar-{new_transfer_id()}", source, remote)

        def write(note, payload, remote_offset):
            source.array[: len(payload)] = payload
            data = note if isinstance(note, bytes) else note.pack()
            handle = sender.write(0, remote_offset, len(payload), notification=data)
            until(lambda: sender.poll(handle), "the lie is told")

        yield write
        sender.destroy()


class WorkerProcess:
    """`transfer_peer.py` over NIXL on tcp; each command is a call of `ask`."""

    def __init__(
        self,
        role,
        *,
        listen="127.0.0.1:0",
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        control=FAST,
        store_bytes=16 * MIB,
        namespace=None,
        versions=None,
        **changes,
    ):
        options = {
            "role": role,
            "listen": listen,
            "fingerprint": fingerprint,
            "tokens_per_block": layout.tokens_per_block,
            "bytes_per_token": layout.bytes_per_token,
            "transport": transport_config("nixl", **changes).model_dump(),
            "control": control.model_dump(mode="json"),
            "store_bytes": store_bytes,
            "namespace": namespace,
            "versions": versions or {},
        }
        script = Path(__file__).with_name("transfer_peer.py")
        command = [sys.executable, str(script), json.dumps(options)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._num_unread = 1
        self.address = self._answer()["address"]

    def ask(self, do, **arguments):
        self.tell(do, **arguments)
        while self._num_unread > 1:
            self._answer()
        return self._answer()

    def tell(self, do, **arguments):
        """A command whose answer nobody waits for."""
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        self._num_unread += 1

    def signal(self, number):
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)  # until then some of its threads still run

    def close(self):
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        with contextlib.suppress(BrokenPipeError):  # a command that it never read
            self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _answer(self):
        while not (line := self.process.stdout.readline()).startswith("{"):  # UCX logs to stdout
            assert line, f"the process ended with {self.process.wait(5)}"
        self._num_unread -= 1
        return json.loads(line)


class PrefillProcess(WorkerProcess):
    def __init__(self, **options):
        super().__init__("prefill", **options)

    def plan(self, keys):
        return self.ask("plan", keys=[key.hex() for key in keys])["blocks"]

    def push_all(self, keys):
        first, stop = self.plan(keys)
        self.ask("send", groups=list(range(3)), blocks=[first, stop - first])
        self.ask("finish")


class DecodeProcess(WorkerProcess):
    def __init__(self, **options):
        super().__init__("decode", **options)

    def expect(self, keys, producer):
        return self.ask("expect", keys=[key.hex() for key in keys], producer=producer)

    def wait(self, transfer_id, timeout_s=10.0):
        return self.ask("wait", transfer_id=transfer_id, timeout_s=timeout_s)

    def assert_landed(self, keys):
        assert self.ask("check", keys=[key.hex() for key in keys]) == {"intact": True}
