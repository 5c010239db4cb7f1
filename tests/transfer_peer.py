"""A prefill or decode worker in a process of its own, for fault tests: JSON commands on stdin, JSON answers on stdout.

python transfer_peer.py '{"role": "prefill", "listen": ..., "fingerprint": ..., "transport": {...}, "control": {...}}'
Its first line is {"address": ...}. SIGTERM closes it in order, as it does a server. `versions` says what it claims to speak.
Each public method of `Prefill` and `Decode` below is a command: {"do": "plan", "keys": [hex, ...]} -> {"blocks": [0, 4]}.
"""

import json
import signal
import sys

import numpy as np
from network_link import enter_namespace
from transfer_workers import DecodeWorker, Liar, assert_landed, codes_of

from scd_trt.config import ControlConfig, TransportConfig
from scd_trt.transfer import connection, wire
from scd_trt.transfer.session import Producer, open_transport
from scd_trt.transfer.transport import TransportError
from scd_trt.transfer.wire import CodeLayout


class Prefill:
    def __init__(self, options):
        self.layout = layout_of(options)
        config = TransportConfig(**options["transport"])
        self.producer = Producer(
            open_transport(config),
            config=config,
            control=ControlConfig(**options["control"]),
            listen=options["listen"],
            fingerprint=options["fingerprint"],
            layout=self.layout,
        )
        self.address, self.push = self.producer.address, None
        self.liar = Liar(self.producer, self.producer._transport)
        self.sender = self.write_on = None

    def close(self):
        self.producer.close()

    def plan(self, keys):
        self.push = self.producer.plan(from_hex(keys))
        return {"blocks": [self.push.blocks.start, self.push.blocks.stop] if self.push else None}

    def send(self, groups, blocks):
        num_bytes = 0
        for group in groups:
            codes = codes_of(group, *blocks, layout=self.layout)
            self.push.send(group, blocks[0], codes)
            num_bytes += codes.size
        return {"sent": num_bytes}

    def finish(self):
        self.push.finish(encode_ms=1.0)
        return {"done": True}

    def abort(self, reason):
        self.push.abort(reason)
        return {"done": True}

    def reason(self):
        return {"reason": self.push.reason}

    def write_on_your_own(self, offset, num_bytes):
        """Write past all that the producer knows: from the second time on, over a connection that is open."""
        if self.write_on is None:
            self.sender = self.liar.sender()
            self.write_on = self.sender.__enter__()
        try:
            self.write_on(b"not yours any more", np.full(num_bytes, 0xDD, dtype=np.uint8), offset)
        except TransportError as error:
            return {"written": False, "error": str(error)}
        return {"written": True}

    def events(self):
        return {"events": [[event.time_s, event.name, event.group] for event in self.producer.trace.events()]}

    def counters(self):
        return self.producer.statistics()


class Decode:
    def __init__(self, options):
        self.layout = layout_of(options)
        self.worker = DecodeWorker(
            config=TransportConfig(**options["transport"]),
            control=ControlConfig(**options["control"]),
            listen=options["listen"],
            fingerprint=options["fingerprint"],
            layout=self.layout,
            store_bytes=options["store_bytes"],
        )
        self.address = self.worker.consumer.address

    def close(self):
        self.worker.close()

    def expect(self, keys, producer):
        transfer_id, expected = self.worker.expect(from_hex(keys), producer)
        return {"transfer_id": transfer_id, "num_granted": expected.num_granted, "reason": expected.reason}

    def wait(self, transfer_id, timeout_s):
        waited = self.worker.wait(transfer_id, timeout_s)
        return {"state": waited.state, "reason": waited.reason}

    def check(self, keys):
        assert_landed(self.worker, from_hex(keys), self.layout)
        return {"intact": True}

    def counters(self):
        return self.worker.counters()


def layout_of(options):
    return CodeLayout(options["tokens_per_block"], tuple(options["bytes_per_token"]))


def from_hex(keys):
    return [bytes.fromhex(key) for key in keys]


def claim(versions):
    """Speak another version than this release does."""
    connection.PROTOCOL_VERSION = versions.get("control", connection.PROTOCOL_VERSION)
    wire.WIRE_VERSION = versions.get("wire", wire.WIRE_VERSION)


def main():
    options = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if options["namespace"]:
        enter_namespace(options["namespace"])
    claim(options["versions"])
    peer = {"prefill": Prefill, "decode": Decode}[options["role"]](options)
    try:
        print(json.dumps({"address": peer.address}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(peer, command.pop("do"))(**command)
            print(json.dumps(answer), flush=True)
    finally:
        peer.close()


if __name__ == "__main__":
    main()
