"""Control channel: authentication, limits, heartbeats, and that no bad peer stops the server from serving others."""

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
import time

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scd_trt.config import ControlConfig
from scd_trt.transfer import messages
from scd_trt.transfer.connection import (
    MAX_CONCURRENT_FRAMES,
    MAX_CONCURRENT_REQUESTS,
    Address,
    ControlError,
    RefusedError,
    SecretError,
    UnreachableError,
    VersionError,
    connect,
)
from scd_trt.transfer.control import MAX_CONNECTIONS, MAX_OPENING, ControlClient, ControlServer
from scd_trt.transfer.messages import Envelope, Expect, Expected, Heartbeat, Wait, Waited
from scd_trt.transfer.wire import new_transfer_id

FAST = ControlConfig(heartbeat_s=0.1, peer_timeout_s=0.5, max_frame_bytes=4096)
KEY = b"k" * 16


class Worker:
    """A handler that answers a few things and remembers who left."""

    def __init__(self):
        self.gone, self.handled = [], []
        self.release = asyncio.Event()

    async def handle(self, connection, body):
        self.handled.append(body)
        match body:
            case Expect(producer="bug"):
                raise KeyError("a bug in the handler")
            case Expect(producer="refuse"):
                raise RefusedError("arena_full", "no room for you")
            case Expect(producer="wait"):
                await asyncio.sleep(60)
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


def counts(server, **expected):
    """These refusals, soon, and no other."""
    asyncio.run(_until(lambda: server.statistics() == expected))
    assert server.statistics() == expected


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


def test_a_secret_is_changed_without_a_restart(tmp_path):
    """Each step of the change is made on one side after the other, and both orders talk at each of them."""
    old, new = b"0123456789abcdef", b"fedcba9876543210"
    here, there = with_secret(tmp_path, old, "here"), with_secret(tmp_path, old, "there")
    with serving(here) as server:
        for step in (b"\n".join([old, new]), b"\n".join([new, old]), new):
            for file in ("here", "there"):
                (tmp_path / file).write_bytes(step)
                assert client_run(server, expect, there) == Expected(1, 0)
        with pytest.raises(SecretError, match="another control secret"):
            client_run(server, expect, with_secret(tmp_path, old, "late"))
        counts(server, control_refused_secret=1)


def test_an_old_secret_alone_is_accepted_while_it_is_listed(tmp_path):
    old, new = b"0123456789abcdef", b"fedcba9876543210"
    with serving(with_secret(tmp_path, new + b"\n" + old)) as server:
        assert client_run(server, expect, with_secret(tmp_path, old, "old")) == Expected(1, 0)
        assert client_run(server, expect, with_secret(tmp_path, new, "new")) == Expected(1, 0)


def test_a_secret_file_that_vanishes_refuses_and_comes_back(tmp_path):
    config = with_secret(tmp_path)
    with serving(config) as server:
        (tmp_path / "secret").rename(tmp_path / "away")
        with raw(server) as peer:
            closes(peer)
        (tmp_path / "away").rename(tmp_path / "secret")
        assert client_run(server, expect, config) == Expected(1, 0)
        counts(server, control_refused_secret=1)


def test_a_server_must_prove_the_secret_too(tmp_path):
    """A listener that only repeats what it hears is not believed."""

    async def run():
        async def echo(reader, writer):
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(100):
                    writer.write(data)
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        with pytest.raises(SecretError, match="another control secret"):
            await connect(address, with_secret(tmp_path), Worker())
        server.close()

    asyncio.run(run())


def test_bad_secret_files(tmp_path):
    with pytest.raises(SecretError, match="at most 2"):
        ControlServer(with_secret(tmp_path, b"\n".join([b"k" * 16] * 3)), listen="127.0.0.1:0", handler=Worker())
    with pytest.raises(SecretError, match="0 bytes"):
        ControlServer(with_secret(tmp_path, b""), listen="127.0.0.1:0", handler=Worker())
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
        counts(server, control_forged_frames=2)
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


def test_a_last_word_that_comes_with_the_end_is_handled():
    last = messages.pack(Envelope(0, 0, messages.Ended("0" * 32, 3)))
    with serving() as server:
        with raw(server) as peer:
            peer.sendall(preamble() + struct.pack(">I", len(last)) + last)
            peer.shutdown(socket.SHUT_WR)
            closes(peer)
        asyncio.run(_until(lambda: server.worker.gone))
        assert server.worker.handled == [messages.Ended("0" * 32, 3)]


def test_a_pause_of_our_own_is_not_the_silence_of_the_peer():
    """Both loops of a starved host stand still; the one that wakes first waits for the other's next heartbeat."""
    config = FAST.model_copy(update={"heartbeat_s": 0.4, "peer_timeout_s": 0.8})

    async def work(client):
        await expect(client)
        server.loop.call_soon_threadsafe(time.sleep, 1.3)
        time.sleep(1.25)
        waited = await client.wait(new_transfer_id(), timeout_s=0.8)
        assert waited == Waited("waiting")
        assert not server.worker.gone

    with serving(config) as server:
        client_run(server, work, config)


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
        for _ in range(MAX_CONNECTIONS):
            peer = stack.enter_context(raw(server))
            peer.sendall(preamble())
            read(peer, 41)  # preamble and the beginning of a heartbeat: it is accepted
        with raw(server) as late:
            assert closes(late) == b""
        counts(server, control_refused_full=1)


def test_strangers_do_not_take_the_places_of_all():
    config = FAST.model_copy(update={"peer_timeout_s": 5.0})
    with serving(config) as server, contextlib.ExitStack() as stack:
        friend = stack.enter_context(raw(server))
        friend.sendall(preamble())
        read(friend, 41)
        strangers = [stack.enter_context(raw(server)) for _ in range(MAX_OPENING + 1)]
        assert closes(strangers[-1]) == b""
        counts(server, control_refused_full=1)
        assert read(friend, 1)  # a heartbeat


def test_a_flood_of_refusals_does_not_fill_the_log(caplog):
    with serving() as server, caplog.at_level("WARNING"):
        for _ in range(100):
            with raw(server) as peer:
                peer.sendall(preamble(version=9))
                closes(peer)
        counts(server, control_refused_version=100)
    assert len(caplog.records) <= 10  # one a second


def test_too_many_requests_close_the_connection():
    with serving() as server:
        with raw(server) as peer, contextlib.suppress(ConnectionError):
            peer.sendall(preamble())
            wait = Envelope(1, 0, Wait("0" * 32, 60.0))
            data = messages.pack(wait)
            peer.sendall((struct.pack(">I", len(data)) + data) * (MAX_CONCURRENT_REQUESTS + 1))
            closes(peer)
        still_serves(server)


def test_too_many_bytes_of_requests_close_the_connection(caplog):
    """The size of what is being answered is bounded, not only the number."""
    config = FAST.model_copy(update={"max_frame_bytes": 1 << 16, "peer_timeout_s": 5.0})
    waits = messages.pack(Envelope(1, 0, Expect("0" * 32, [KEY] * 3000, "wait")))
    with serving(config) as server:
        with raw(server) as peer, contextlib.suppress(ConnectionError):
            peer.sendall(preamble())
            for _ in range(MAX_CONCURRENT_FRAMES * config.max_frame_bytes // len(waits) + 1):
                peer.sendall(struct.pack(">I", len(waits)) + waits)
            closes(peer)
        counts(server, control_malformed_frames=1)
        still_serves(server)
    assert "bytes of requests at once" in caplog.text


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
        {"type": "Wait", "transfer_id": "0" * 32, "timeout_s": float("nan")},
        {"type": "Revoke", "transfer_id": "0" * 31 + "G"},
        {"type": "Revoke", "transfer_id": "0" * 32 + "\n"},
        {"type": "Ended", "transfer_id": "0" * 32, "num_writes": 0, "encode_ms": float("inf")},
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


@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
@pytest.mark.parametrize("tag_first", [True, False])
def test_values_nested_deeply_are_a_decode_error(depth, tag_first):
    tag, nest = b"\xa4type\xa9Heartbeat", b"\xa1a" + b"\x91" * depth + b"\xc0"
    with pytest.raises(msgspec.MsgspecError):
        messages.unpack(b"\x93\x00\x00\x82" + (tag + nest if tag_first else nest + tag))


# -- fuzzing: valid frames that were cut, changed and spliced

SAMPLES = [
    Envelope(0, 0, Heartbeat()),
    Envelope(1, 0, Expect("0" * 32, [KEY, KEY], "a:1")),
    Envelope(2, 0, Wait("0" * 32, 0.0)),
    Envelope(0, 7, Expected(1, 2, "arena_full", "text")),
    Envelope(3, 0, messages.SessionHello("consumer", "nixl_cu12 1.5.1", "f", 32, [64, 8], "a")),
    Envelope(4, 0, messages.SessionArena(KEY, b"metadata", 4096, 1 << 20)),
    Envelope(5, 0, messages.Grant("0" * 32, [KEY], 0, 0, 64, 1)),
    Envelope(0, 0, messages.Ended("0" * 32, 3, None, 1.5, 2.5)),
    Envelope(0, 9, messages.TraceReply([messages.TraceEvent(1.0, "landed", "0" * 32)])),
    Envelope(0, 9, messages.Status("consumer", "f", "a", "t", "l", 1, {"landed": 3})),
]
edits = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 2**16), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.integers(0, 2**16), st.integers(1, 64)),
        st.tuples(st.just("insert"), st.integers(0, 2**16), st.binary(min_size=1, max_size=16)),
    ),
    max_size=4,
)


def edited(data, changes):
    """Apply random edits; positions count modulo the length."""
    for kind, where, what in changes:
        at = where % (len(data) + 1)
        match kind:
            case "flip" if at < len(data):
                data = data[:at] + bytes([data[at] ^ what]) + data[at + 1 :]
            case "cut":
                data = data[:at] + data[at + what :]
            case "insert":
                data = data[:at] + what + data[at:]
    return data


@given(st.sampled_from(SAMPLES), edits)
def test_edited_messages_give_an_envelope_or_a_decode_error(sample, changes):
    try:
        envelope = messages.unpack(edited(messages.pack(sample), changes))
    except msgspec.MsgspecError:
        return
    assert messages.unpack(messages.pack(envelope)) == envelope


@pytest.fixture(scope="module")
def fuzzed():
    """One server for all examples, and what its loop had to report as unhandled."""
    unhandled = []
    with serving(FAST.model_copy(update={"peer_timeout_s": 5.0})) as server:
        server.loop.set_exception_handler(lambda loop, context: unhandled.append(context))
        yield server, unhandled


@given(
    opening=st.one_of(st.just(preamble()), st.binary(max_size=60), edits.map(lambda e: edited(preamble(), e))),
    frames=st.lists(st.tuples(st.sampled_from(SAMPLES), edits, st.integers(-3, 3)), max_size=4),
    tail=st.binary(max_size=60),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_stream_of_bytes_ends_in_a_closed_connection_and_nothing_else(fuzzed, caplog, opening, frames, tail):
    server, unhandled = fuzzed
    data = opening
    for sample, changes, error in frames:
        body = edited(messages.pack(sample), changes)
        data += struct.pack(">I", max(0, len(body) + error)) + body
    with raw(server) as peer, contextlib.suppress(ConnectionError):
        peer.sendall(data + tail)
        peer.shutdown(socket.SHUT_WR)
        closes(peer)
    assert not unhandled
    assert "a request failed" not in caplog.text
    assert len(server._connections) <= 2


def test_the_fuzzed_server_still_serves(fuzzed):
    server, unhandled = fuzzed
    still_serves(server)
    assert not unhandled
