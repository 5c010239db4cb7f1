"""Control channel: authentication, limits, heartbeats, and that no bad peer stops the server from serving others."""

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scd_trt.config import ControlConfig
from scd_trt.transfer import messages
from scd_trt.transfer.connection import (
    MAX_CONCURRENT_REQUESTS,
    Address,
    ControlError,
    RefusedError,
    SecretError,
    UnreachableError,
    VersionError,
    connect,
)
from scd_trt.transfer.control import MAX_CONNECTIONS, ControlClient, ControlServer
from scd_trt.transfer.messages import Envelope, Expect, Expected, Heartbeat, Wait, Waited
from scd_trt.transfer.wire import new_transfer_id

FAST = ControlConfig(heartbeat_s=0.1, peer_timeout_s=0.5, max_frame_bytes=4096)
KEY = b"k" * 16


class Worker:
    """A handler that answers a few things and remembers who left."""

    def __init__(self):
        self.gone = []
        self.release = asyncio.Event()

    async def handle(self, connection, body):
        match body:
            case Expect(producer="bug"):
                raise KeyError("a bug in the handler")
            case Expect(producer="refuse"):
                raise RefusedError("arena_full", "no room for you")
            case Expect():
                return Expected(num_stored=len(body.block_keys), num_granted=0)
            case Wait():
                await asyncio.sleep(body.timeout_s)
                return Waited("waiting")
        raise ControlError(f"{type(body).__name__} is not for me")

    def closed(self, connection, why):
        self.gone.append(why)


@contextlib.contextmanager
def serving(config=FAST, listen="127.0.0.1:0"):
    worker = Worker()
    server = ControlServer(config, listen=listen, handler=worker)
    server.start()
    server.worker = worker
    try:
        yield server
    finally:
        server.close()


def client_run(server, work, config=FAST):
    """Run `work(client)` with a client of that server."""

    async def run():
        client = ControlClient(server.address, config)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def expect(client, producer="peer:1", keys=(KEY,)):
    return client.expect(new_transfer_id(), list(keys), producer=producer, timeout_s=5)


def still_serves(server):
    assert client_run(server, expect) == Expected(1, 0)


def raw(server):
    return socket.create_connection(("127.0.0.1", Address.parse(server.address).port), timeout=5)


def preamble(version=1, secured=0, magic=b"SCDC"):
    return struct.pack(">4sHBx32s", magic, version, secured, b"n" * 32)


def closes(connection):
    """Read until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(4096):
            received += chunk
    return received


def test_request_and_reply():
    with serving() as server:
        still_serves(server)


def test_requests_run_side_by_side():
    async def work(client):
        slow = asyncio.create_task(client.wait(new_transfer_id(), timeout_s=3))
        await expect(client)
        assert not slow.done()
        slow.cancel()

    with serving() as server:
        client_run(server, work)


def test_refusals_and_failures_keep_their_text():
    with serving() as server:
        with pytest.raises(RefusedError, match="no room") as caught:
            client_run(server, lambda client: expect(client, "refuse"))
        assert caught.value.reason == "arena_full"
        with pytest.raises(ControlError, match="StatusQuery is not for me"):
            client_run(server, lambda client: client.status())


def test_a_bug_in_a_handler_closes_that_connection_only(caplog):
    with serving() as server:
        with pytest.raises(UnreachableError):
            client_run(server, lambda client: expect(client, "bug"))
        still_serves(server)
    assert "a bug in the handler" in caplog.text


def test_port_in_use_names_port_and_cure():
    with (
        serving() as server,
        pytest.raises(ControlError, match=r"in use; stop the other process, or set another") as caught,
    ):
        ControlServer(FAST, listen=server.address, handler=Worker())
    assert str(Address.parse(server.address).port) in str(caught.value)


def test_a_host_that_is_not_ours_is_reported(tmp_path):
    with pytest.raises(ControlError, match=r"cannot listen on 192\.0\.2\.1:0"):
        ControlServer(with_secret(tmp_path), listen="192.0.2.1:0", handler=Worker())


def test_off_loopback_needs_a_secret(tmp_path):
    with pytest.raises(ControlError, match=r"0\.0\.0\.0:0 is reachable from other hosts and control\.secret_file"):
        ControlServer(FAST, listen="0.0.0.0:0", handler=Worker())
    with serving(with_secret(tmp_path), listen="0.0.0.0:0") as server:
        assert server.address.startswith("0.0.0.0:")


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:99999", "host:-1", "host:¹"])
def test_addresses_that_are_none(text):
    with pytest.raises(ControlError, match="no control address"):
        Address.parse(text)


def test_addresses():
    assert Address.parse("a.b:12") == Address("a.b", 12)
    assert str(Address.parse("[::1]:12")) == "[::1]:12"


def test_nobody_there_is_said_at_once():
    with serving() as server:
        address = server.address
    with pytest.raises(UnreachableError, match="is the server running"):
        asyncio.run(ControlClient(address, FAST).status())


def test_client_reconnects_after_a_restart():
    async def work():
        with serving() as first:
            client = ControlClient(first.address, FAST)
            await expect(client)
            await asyncio.to_thread(first.close)
        with pytest.raises(UnreachableError):
            await expect(client)
        second = await asyncio.to_thread(ControlServer, FAST, listen=first.address, handler=Worker())
        second.start()
        assert await expect(client) == Expected(1, 0)
        await client.close()
        await asyncio.to_thread(second.close)

    asyncio.run(work())


# -- secrets


def with_secret(tmp_path, text=b"0123456789abcdef", name="secret"):
    (tmp_path / name).write_bytes(text + b"\n")
    return FAST.model_copy(update={"secret_file": tmp_path / name})


def test_equal_secrets_talk(tmp_path):
    config = with_secret(tmp_path)
    with serving(config) as server:
        assert client_run(server, expect, config) == Expected(1, 0)
        assert client_run(server, lambda client: several(client, 5), config) == [Expected(1, 0)] * 5


async def several(client, count):
    return [await expect(client) for _ in range(count)]


def test_another_secret_is_refused(tmp_path):
    config = with_secret(tmp_path)
    other = with_secret(tmp_path, b"another secret of 26 bytes", "other")
    with serving(config) as server:
        with pytest.raises(SecretError, match="another control secret"):
            client_run(server, expect, other)
        assert client_run(server, expect, config) == Expected(1, 0)


def test_a_secret_on_one_side_only_is_refused(tmp_path):
    config = with_secret(tmp_path)
    with serving(config) as server, pytest.raises(SecretError, match="missing here and set on the other side"):
        client_run(server, expect)
    with serving() as server, pytest.raises(SecretError, match="set here and missing on the other side"):
        client_run(server, expect, config)


def test_bad_secret_files(tmp_path):
    with pytest.raises(SecretError, match="at least 16"):
        ControlServer(with_secret(tmp_path, b"short"), listen="127.0.0.1:0", handler=Worker())
    missing = FAST.model_copy(update={"secret_file": tmp_path / "nowhere"})
    with pytest.raises(SecretError, match="nowhere"):
        ControlServer(missing, listen="127.0.0.1:0", handler=Worker())


def secured_socket(server, secret):
    """A peer that knows the secret and then misbehaves; returns the socket and its frame key."""
    peer = raw(server)
    peer.sendall(preamble(secured=1))
    server_nonce = read(peer, 40)[8:]
    nonces = b"n" * 32 + server_nonce
    peer.sendall(hmac.digest(secret, b"client" + nonces, "sha256"))
    assert read(peer, 32) == hmac.digest(secret, b"server" + nonces, "sha256")
    return peer, hmac.digest(secret, b"frames client" + nonces, "sha256")


def read(peer, count):
    data = b""
    while len(data) < count:
        chunk = peer.recv(count - len(data))
        assert chunk, "closed early"
        data += chunk
    return data


def frame(key, sequence, envelope):
    data = messages.pack(envelope)
    mac = hmac.digest(key, struct.pack(">Q", sequence) + data, "sha256")
    return struct.pack(">I", len(data)) + data + mac


def test_replayed_and_altered_frames_close_the_connection(tmp_path, caplog):
    secret = b"0123456789abcdef"
    config = with_secret(tmp_path, secret)
    beat = Envelope(0, 0, Heartbeat())
    with serving(config) as server:
        for bad in ("replay", "alter"):
            peer, key = secured_socket(server, secret)
            good = frame(key, 0, beat)
            peer.sendall(good)
            peer.sendall(good if bad == "replay" else frame(key, 1, beat)[:-1] + b"\0")
            closes(peer)
            peer.close()
        assert client_run(server, expect, config) == Expected(1, 0)
    assert caplog.text.count("wrong MAC") == 2


# -- hostile peers


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64),
        secrets.token_bytes(4096),
        preamble(magic=b"XXXX"),
        preamble(version=2),
        preamble(secured=1),
        preamble() + struct.pack(">I", 0xFFFFFFFF),
        preamble() + struct.pack(">I", 4097) + bytes(4097),
        preamble() + struct.pack(">I", 0),
        preamble() + struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        preamble() + struct.pack(">I", 200) + b"\x93" * 200,
        preamble() + struct.pack(">I", 10) + msgspec.msgpack.encode([0, 0, {"type": "Nonsense"}])[:10],
    ],
    ids=["http", "random", "magic", "version", "secured", "huge", "large", "empty", "garbage", "nested", "unknown"],
)
def test_garbage_closes_the_connection_and_the_server_serves_on(data):
    with serving() as server:
        with raw(server) as peer, contextlib.suppress(ConnectionError):
            peer.sendall(data)
            closes(peer)
        still_serves(server)


@pytest.mark.parametrize("length", [0, 4097, 0xFFFFFFFF])
def test_a_length_out_of_range_closes_before_anything_is_read(length, caplog):
    with serving(FAST.model_copy(update={"peer_timeout_s": 60.0})) as server:
        with raw(server) as peer, contextlib.suppress(ConnectionError):
            peer.sendall(preamble() + struct.pack(">I", length))
            closes(peer)
        still_serves(server)
    assert f"frame of {length} bytes; the limit is 4096" in caplog.text


@pytest.mark.parametrize(
    "data", [b"", b"SCD", preamble(), preamble() + b"\0\0", preamble() + struct.pack(">I", 50) + b"half"]
)
def test_half_a_frame_times_out(data):
    with serving() as server:
        with raw(server) as peer:
            peer.sendall(data)
            closes(peer)  # within peer_timeout_s, else the socket's own timeout fails the test
        still_serves(server)


@pytest.mark.parametrize("data", [preamble()[:20], preamble(), preamble() + struct.pack(">I", 50) + b"half"])
def test_a_peer_that_leaves_in_the_middle(data):
    with serving() as server:
        with raw(server) as peer:
            peer.sendall(data)
        still_serves(server)


def test_version_mismatch_is_named():
    async def run():
        async def old_server(reader, writer):
            writer.write(preamble(version=7))
            await reader.read(100)
            writer.close()

        server = await asyncio.start_server(old_server, "127.0.0.1", 0)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        with pytest.raises(VersionError, match="version 1 here, 7 there"):
            await connect(address, FAST, Worker())
        server.close()

    asyncio.run(run())


def test_a_silent_server_is_given_up():
    async def run():
        left = asyncio.Event()

        async def silent(reader, writer):
            writer.write(preamble())
            await left.wait()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        client = ControlClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", FAST)
        with pytest.raises(UnreachableError, match="no sign of life"):
            await client.wait(new_transfer_id(), timeout_s=20)
        left.set()
        server.close()

    asyncio.run(asyncio.wait_for(run(), 5))


def test_a_closed_connection_is_told_to_the_handler():
    with serving() as server:
        still_serves(server)
        deadline = asyncio.run(_until(lambda: server.worker.gone))
        assert deadline


async def _until(condition):
    for _ in range(500):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


def test_too_many_connections_are_refused_and_the_others_live():
    config = FAST.model_copy(update={"peer_timeout_s": 5.0})
    with serving(config) as server, contextlib.ExitStack() as stack:
        peers = [stack.enter_context(raw(server)) for _ in range(MAX_CONNECTIONS)]
        for peer in peers:
            peer.sendall(preamble())
            read(peer, 40)
        with raw(server) as late:
            assert closes(late) == b""


def test_too_many_requests_close_the_connection():
    with serving() as server:
        with raw(server) as peer, contextlib.suppress(ConnectionError):
            peer.sendall(preamble())
            wait = Envelope(1, 0, Wait("0" * 32, 60.0))
            data = messages.pack(wait)
            peer.sendall((struct.pack(">I", len(data)) + data) * (MAX_CONCURRENT_REQUESTS + 1))
            closes(peer)
        still_serves(server)


def test_a_frame_that_is_too_large_to_send_is_refused_here():
    with serving() as server, pytest.raises(ControlError, match="max_frame_bytes 4096"):
        client_run(server, lambda client: expect(client, keys=[KEY] * 500))


@pytest.mark.parametrize(
    "body",
    [
        {"type": "Expect", "transfer_id": "x", "block_keys": [], "producer": "a:1"},
        {"type": "Expect", "transfer_id": "0" * 32, "block_keys": [b"short"], "producer": "a:1"},
        {"type": "Expect", "transfer_id": "0" * 32, "block_keys": [], "producer": "a" * 300},
        {"type": "Expect", "transfer_id": "0" * 32, "block_keys": [], "producer": "a:1", "extra": 1},
        {"type": "Wait", "transfer_id": "0" * 32, "timeout_s": 1e9},
        {"type": "Wait", "transfer_id": "0" * 32, "timeout_s": -1.0},
        {"type": "Revoke", "transfer_id": "0" * 31 + "G"},
        {"type": "Ended", "transfer_id": "0" * 32, "num_writes": 0, "reason": "because"},
    ],
)
def test_limits_of_messages(body):
    with pytest.raises(msgspec.ValidationError):
        messages.unpack(msgspec.msgpack.encode([0, 0, body]))


@given(st.binary(max_size=200))
def test_any_bytes_give_an_envelope_or_a_decode_error(data):
    with contextlib.suppress(msgspec.MsgspecError):
        messages.unpack(data)
