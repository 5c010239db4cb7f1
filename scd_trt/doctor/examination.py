"""All checks in the order in which a person wants to read them, and the pair of machines on request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scd_trt import translator as translators
from scd_trt.config import ServedPair
from scd_trt.doctor.deployment import Role, examine_deployment
from scd_trt.doctor.ends import EndOptions
from scd_trt.doctor.findings import Finding
from scd_trt.doctor.host import Host
from scd_trt.doctor.link import end_options, examine_lane, examine_peer
from scd_trt.doctor.machine import examine_machine
from scd_trt.doctor.software import examine_software
from scd_trt.transfer.connection import Address
from scd_trt.translator import Manifest

DEFAULT_ADDRESS = "127.0.0.1:8101"


def examine(
    pair: ServedPair | None,
    file: Path | None,
    *,
    role: Role | None = None,
    peer: str | None = None,
    reads_models: bool = True,
    host: Host | None = None,
) -> Iterator[Finding]:
    """Findings one by one, as they are made: some take seconds.

    Args:
        pair, file: what is served, and the file that says so; None examines the machine alone.
        role: that this host will have.
        peer: HOST or HOST:PORT of a listener, the port else being the pair's.
    """
    machine = host or Host()
    yield from examine_software(pair, machine, file=file)
    yield from examine_machine(pair, machine)
    if pair is not None and file is not None:
        yield from examine_deployment(pair, file, role=role, reads_models=reads_models)
    yield from examine_lane(pair, machine)
    if peer is not None:
        yield from examine_peer(options_for(pair, peer), machine)


def options_for(pair: ServedPair | None, address: str | None) -> EndOptions:
    """How to listen on, or to dial, an address; without one, the prefill worker's control address."""
    return end_options(pair, _manifest(pair), peer_address(pair, address))


def peer_address(pair: ServedPair | None, address: str | None) -> str:
    """`address` with the port of the prefill worker's control channel, where it names none."""
    worker = pair.servers.prefill if pair else None
    usual = str(Address(worker.host, worker.control_port)) if worker else DEFAULT_ADDRESS
    if address is None:
        return usual
    has_port = address.endswith("]") is False and (address.count(":") == 1 or address.startswith("["))
    port = usual.rpartition(":")[2]
    return address if has_port else str(Address(address.strip("[]"), int(port)))


def _manifest(pair: ServedPair | None) -> Manifest | None:
    """The artifact's, where there is one; that it is missing or wrong is said elsewhere."""
    if pair is None:
        return None
    try:
        return translators.load_manifest(pair.translator_path())
    except translators.TranslatorError:
        return None
