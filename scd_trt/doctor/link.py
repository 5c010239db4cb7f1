"""Runs the two ends (`ends`) and judges what they measured: on this machine, or between this one and a peer.

On one machine both ends are processes here. With lane `auto` UCX's shortcuts inside a host are then switched off, so that
what is seen is the network lane that codes will take between hosts. Between two machines nothing is switched off.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from scd_trt import __version__
from scd_trt.config import ScdError, ServedPair, TransportConfig
from scd_trt.doctor.ends import NUM_PIECES, ROLE, Dialled, EndOptions
from scd_trt.doctor.findings import Finding
from scd_trt.doctor.host import Host
from scd_trt.translator import Manifest

DIAL_TIMEOUT_S = 300.0
SLOW_CLOCK_MS = 100.0
_SHORTCUTS_OFF = "^shm"
_SHORTCUTS = ("cma", "posix", "sysv", "xpmem", "knem")


class LinkError(ScdError):
    """An end could not be run."""


def end_options(pair: ServedPair | None, manifest: Manifest | None, address: str) -> EndOptions:
    """What an end is told of a pair; without artifact the fingerprints are not compared."""
    transport = pair.transport if pair else TransportConfig()
    options = EndOptions(address=address, transport=transport.model_copy(update={"backend": "nixl"}))
    if pair is not None:
        options = options.model_copy(update={"control": pair.control, "tokens_per_block": pair.engine.tokens_per_block})
    if manifest is not None:
        told = {"fingerprint": manifest.fingerprint, "bytes_per_token": manifest.bytes_per_token}
        options = options.model_copy(update=told)
    return options


def examine_lane(pair: ServedPair | None, host: Host) -> Iterator[Finding]:
    """Move bytes between two processes of this machine."""
    options = end_options(pair, None, "127.0.0.1:0")
    # between children of one parent on loopback there is nobody to keep out
    options = options.model_copy(update={"control": options.control.model_copy(update={"secret_file": None})})
    environment = dict(host.environment)
    if options.transport.lane == "auto":
        environment.setdefault("UCX_TLS", _SHORTCUTS_OFF)
    try:
        with listening(options, environment) as address:
            dialled = dial(options.model_copy(update={"address": address}), environment)
    except LinkError as error:
        yield Finding("lane", "fail", str(error), "no codes can move until this works; see the lines above about nixl")
        return
    if dialled.ucx_version:
        yield Finding("ucx", "ok", f"{dialled.ucx_version} from {dialled.ucx_library}")
    yield judge_lane(dialled, options.transport, host, name="lane")


def examine_peer(options: EndOptions, host: Host) -> Iterator[Finding]:
    """Move bytes from a peer's listener to this machine, and compare the two."""
    try:
        dialled = dial(options, host.environment)
    except LinkError as error:
        yield Finding("peer", "fail", str(error), "see the lines above about nixl")
        return
    yield from judge_peer(dialled, options, host)


def judge_peer(dialled: Dialled, options: EndOptions, host: Host) -> Iterator[Finding]:
    """What a test of a peer means."""
    details = tuple(asdict(dialled).items())
    if not dialled.role:
        cure = "start `scd-trt doctor PAIR.yaml --listen` there, and open the port between the hosts"
        yield Finding("peer", "fail", dialled.error, cure, details)
        return
    what = f"{dialled.software or dialled.role + ' worker'}, {dialled.transport}"
    yield Finding(
        "peer", "ok", f"{options.address}: {what}; round trip {dialled.round_trip_ms:.2f} ms", details=details
    )
    yield _authentication(options)
    yield from _versions(dialled)
    yield _fingerprint(dialled, options)
    if dialled.clock_offset_ms is not None:
        yield _clock(dialled.clock_offset_ms, dialled.round_trip_ms)
    if dialled.role != ROLE:
        cure = "for that, stop the worker and start `scd-trt doctor PAIR.yaml --listen` in its place"
        yield Finding("peer lane", "skip", f"a {dialled.role} worker is running there; no bytes were moved", cure)
    else:
        yield judge_lane(dialled, options.transport, host, name="peer lane")


def judge_lane(dialled: Dialled, transport: TransportConfig, host: Host, *, name: str) -> Finding:
    """Whether all bytes arrived, and over the lane that was meant."""
    details = tuple(asdict(dialled).items())
    if dialled.error:
        return Finding(name, "fail", dialled.error, _cure_of(dialled.error), details)
    if dialled.num_wrong_pieces:
        text = f"{dialled.num_wrong_pieces} of {NUM_PIECES} pieces did not arrive as they were sent"
        return Finding(
            name, "fail", text, "try another transport.device; a lane that corrupts must not be used", details
        )
    rate = dialled.sent_bytes / max(dialled.seconds, 1e-9) / 1e9
    moved = f"{dialled.sent_bytes >> 20} MiB at {8 * rate:.2f} Gbit/s"
    if not dialled.lanes:
        cure = "this UCX writes its log differently: look at it with UCX_LOG_LEVEL=info UCX_PROTO_INFO=y"
        return Finding(name, "warn", f"{moved}; which transport was chosen could not be read", cure, details)
    text, wrong = f"{moved} over {', '.join(dialled.lanes)}", _wrong_lane(dialled.lanes, transport, host)
    return Finding(
        name, "fail" if wrong else "ok", f"{text}{wrong and ': '}{wrong}", _LANE_CURE if wrong else "", details
    )


_LANE_CURE = (
    "see memlock and device above; in a container RDMA needs /dev/infiniband and IPC_LOCK;\n"
    "where tcp is meant, say so: transport.lane: tcp"
)


def _wrong_lane(lanes: Sequence[str], transport: TransportConfig, host: Host) -> str:
    """Why these are not the lanes that were meant; empty where they are."""
    kinds, devices = {lane.partition("/")[0] for lane in lanes}, {lane.partition("/")[2] for lane in lanes}
    if transport.lane == "shm" and not kinds <= set(_SHORTCUTS):
        return "transport.lane is shm"
    if transport.lane == "tcp" and kinds != {"tcp"}:
        return "transport.lane is tcp"
    wanted = set(transport.device.split(",")) if transport.device else set()
    if wanted and transport.lane != "shm" and not devices <= wanted:
        return f"transport.device is {transport.device}"
    if transport.lane == "auto" and kinds == {"tcp"} and host.rdma_devices():
        return f"there is RDMA here ({', '.join(host.rdma_devices())}), and UCX does not use it"
    return ""


def _cure_of(error: str) -> str:
    if "fingerprint" in error or "translator" in error:
        return "copy the same artifact to both hosts"
    if "not done in" in error:
        return "a firewall drops what UCX sends: open UCX_TCP_PORT_RANGE between the hosts, both ways; name transport.device"
    return "see the log of the listening side"


def _authentication(options: EndOptions) -> Finding:
    if options.control.secret_file is not None:
        return Finding("peer secret", "ok", "both sides have proved the same secret")
    return Finding("peer secret", "skip", "no control.secret_file: only loopback can be tested so")


def _versions(dialled: Dialled) -> Iterator[Finding]:
    if dialled.software and f"scd-trt {__version__}," not in dialled.software:
        text = f"scd-trt {__version__} here, {dialled.software} there"
        yield Finding("peer version", "warn", text, "run equal releases; protocols are compared, behaviour is not")


def _fingerprint(dialled: Dialled, options: EndOptions) -> Finding:
    here, there = options.fingerprint, dialled.fingerprint
    if EndOptions.model_fields["fingerprint"].default in (here, there):
        return Finding("peer artifact", "skip", "one side has no artifact: fingerprints were not compared")
    if here != there:
        return Finding("peer artifact", "fail", f"fingerprint {here} here, {there} there", "copy one artifact to both")
    return Finding("peer artifact", "ok", f"same fingerprint {here}")


def _clock(offset_ms: float, round_trip_ms: float) -> Finding:
    text = (
        f"the peer's is {abs(offset_ms):.1f} ms {'ahead' if offset_ms > 0 else 'behind'} (+-{round_trip_ms / 2:.2f} ms)"
    )
    if abs(offset_ms) > SLOW_CLOCK_MS:
        cure = "synchronise both (chronyd); nothing fails, but logs and traces of the two cannot be compared"
        return Finding("peer clock", "warn", text, cure)
    return Finding("peer clock", "ok", text)


def dial(options: EndOptions, environment: Mapping[str, str]) -> Dialled:
    """Run the dialling end.

    Raises:
        LinkError: it ended without an answer.
    """
    try:
        done = subprocess.run(
            _command("dial", options),
            capture_output=True,
            text=True,
            timeout=DIAL_TIMEOUT_S,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise LinkError(f"the dialling end said nothing for {DIAL_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise LinkError(f"the dialling end {_how_it_ended(done.returncode)}: {_last_line(done.stderr)}")
    found = json.loads(done.stdout)
    return Dialled(**(found | {"lanes": tuple(found["lanes"])}))


@contextmanager
def listening(options: EndOptions, environment: Mapping[str, str]) -> Iterator[str]:
    """Run a listening end; yields its address.

    Raises:
        LinkError: it ended before it listened.
    """
    with subprocess.Popen(
        _command("listen", options),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(environment),
    ) as process:
        try:
            yield _announced(process)
        finally:
            process.kill()


def _announced(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        _, errors = process.communicate()
        raise LinkError(f"the listening end {_how_it_ended(process.returncode)}: {_last_line(errors)}")
    address: str = json.loads(line)["address"]
    return address


def _command(what: str, options: EndOptions) -> list[str]:
    return [sys.executable, "-m", "scd_trt.doctor.ends", what, options.model_dump_json()]


def _how_it_ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
