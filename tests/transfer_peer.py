"""A prefill worker in a process of its own, for fault tests: JSON commands on stdin, one JSON answer per line on stdout.

python transfer_peer.py '{"listen": ..., "fingerprint": ..., "transport": {...}, "control": {...}}'
{"do": "plan", "keys": [hex, ...]}           -> {"blocks": [start, stop] | null}
{"do": "send", "groups": [...], "blocks": [first, num]}  -> {"sent": num_bytes}
{"do": "finish"} | {"do": "abort", "reason": ...}        -> {"done": true}
{"do": "events"}                             -> {"events": [[time_s, name, group], ...]}
"""

import json
import sys

import numpy as np

from scd_trt.config import ControlConfig, TransportConfig
from scd_trt.transfer.session import Producer, open_transport
from scd_trt.transfer.wire import CodeLayout

LAYOUT = CodeLayout(4, (64, 256, 32))


def codes_of(group, first_block, num_blocks, *, layout=LAYOUT):
    """The codes that every test expects for these blocks."""
    rows = np.arange(first_block * layout.tokens_per_block, (first_block + num_blocks) * layout.tokens_per_block)
    columns = np.arange(layout.bytes_per_token[group])
    return (rows * 31 % 251).astype(np.uint8)[:, None] + ((columns * 7 + group) % 241).astype(np.uint8)


class Peer:
    def __init__(self, options):
        self.layout = CodeLayout(
            options.get("tokens_per_block", 4), tuple(options.get("bytes_per_token", (64, 256, 32)))
        )
        config = TransportConfig(**options["transport"])
        self.producer = Producer(
            open_transport(config),
            config=config,
            control=ControlConfig(**options["control"]),
            listen=options["listen"],
            fingerprint=options["fingerprint"],
            layout=self.layout,
        )
        self.push = None

    def plan(self, keys):
        self.push = self.producer.plan([bytes.fromhex(key) for key in keys])
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

    def events(self):
        return {"events": [[event.time_s, event.name, event.group] for event in self.producer.trace.events()]}


def main():
    peer = Peer(json.loads(sys.argv[1]))
    print(json.dumps({"address": peer.producer.address}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(peer, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)
    peer.producer.close()


if __name__ == "__main__":
    main()
