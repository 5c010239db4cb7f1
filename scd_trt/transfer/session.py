"""The transfer's front door: the two ends of a session, and the transport they speak through.

    transport = open_transport(config)
    producer = Producer(transport, config=..., control=..., listen="127.0.0.1:8101", fingerprint=..., layout=...)
    consumer = Consumer(transport, config=..., control=..., listen="127.0.0.1:8102", fingerprint=..., layout=..., store=...)

README.md beside this file tells the life of a transfer; the router speaks to both through `control.ControlClient`.
"""

from __future__ import annotations

from scd_trt.config import TransportConfig
from scd_trt.transfer.consumer import Consumer, PinnedBlocks
from scd_trt.transfer.producer import Producer, Push
from scd_trt.transfer.transport import LoopbackTransport, Transport

__all__ = ["Consumer", "PinnedBlocks", "Producer", "Push", "open_transport"]


def open_transport(config: TransportConfig) -> Transport:
    """The transport that the configuration names.

    Raises:
        LibraryError: NIXL is missing or cannot be set up as configured.
    """
    if config.backend == "loopback":
        return LoopbackTransport()
    from scd_trt.transfer.nixl import NixlTransport  # loads UCX; a loopback process must not need it

    return NixlTransport(config)
