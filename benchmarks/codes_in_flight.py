"""When do codes travel, and when does prefill compute? Timestamps of one real prompt, layer group by layer group.

    python benchmarks/codes_in_flight.py [PAIR.yaml]     default: engine_configs/smollm2-qa/pair.yaml, distilled already

Starts the pair's three servers, asks one held-out question, and prints when each group was encoded (its last layer had just
been computed), posted to NIXL, and landed on the decode server, in milliseconds from the first. A group that lands before the
last one is encoded has crossed the wire while prefill was still computing. One host, one clock (`transfer.trace`).
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import httpx

from scd_trt.config import PairConfig, load_pair
from scd_trt.evaluate.tasks import prompt
from scd_trt.serving.demo import demo_questions, log_directory
from scd_trt.serving.launcher import serving_group
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.trace import TraceEvent

DEFAULT = Path(__file__).parents[1] / "engine_configs" / "smollm2-qa" / "pair.yaml"


def main() -> None:
    """Run, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", type=Path, default=DEFAULT)
    pair = parser.parse_args().pair
    config = load_pair(pair)
    with serving_group(pair, config, log_directory=log_directory(config)) as children:
        body = {"model": config.name, "messages": list(prompt(demo_questions()[1]).messages), "max_tokens": 4}
        answer = httpx.post(f"{children['router'].url}/v1/chat/completions", json=body, timeout=300).json()
        scd = answer["usage"]["scd"]
        events = asyncio.run(_events(config, scd["transfer_id"]))
    times = {name: _first(events, name) for name in ("encoded", "posted", "landed")}
    start, last = min(times["encoded"].values()), max(times["encoded"].values())
    print(f"{scd['prompt_tokens']} prompt tokens, {scd['bytes_sent']} bytes of codes; milliseconds")
    print("group  encoded   posted   landed")
    for group in sorted(times["encoded"]):
        row = [1000 * (times[name][group] - start) for name in times]
        print(f"{group:5d} " + " ".join(f"{value:8.1f}" for value in row))
    early = sum(landed < last for landed in times["landed"].values())
    print(f"{early} of {len(times['landed'])} groups had landed before the last one was encoded")


async def _events(config: PairConfig, transfer_id: str) -> list[TraceEvent]:
    found = []
    for worker in (config.servers.prefill, config.servers.decode):
        client = ControlClient(f"{worker.host}:{worker.control_port}", config.control)
        found += await client.trace(transfer_id)
        await client.close()
    return found


def _first(events: list[TraceEvent], name: str) -> dict[int, float]:
    times: dict[int, float] = {}
    for event in events:
        if event.name == name:
            times.setdefault(event.group, event.time_s)
    return times


if __name__ == "__main__":
    main()
