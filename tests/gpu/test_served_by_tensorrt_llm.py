"""One pair on TensorRT-LLM, on one GPU: two `trtllm-serve` from rendered files and our router.

Producer and consumer are one model, and the translator sends its cache as it is (`exact`). So what is served over codes has
to be what the decode worker computes by itself, and every mistake in layout, positions, heads or order shows as other text.
No distillation is needed. SCD_GPU_MODEL names the directory of a small model with real weights (Llama or Qwen2 shape, head
size 64 or 128); without it a tiny random model is made, which shows the same mistakes.

A prompt is first put to the decode worker directly: no codes are there yet, so that is its own prefill.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gpu_host import MODEL_VARIABLE, missing_for_servers, router_python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(missing_for_servers()), reason=missing_for_servers()),
    pytest.mark.filterwarnings("ignore"),
    # a worker takes minutes to start; the first test waits for both
    pytest.mark.timeout(2400),
]
START_TIMEOUT_S = 900.0
TOKENS_PER_BLOCK = 32
NUM_COMPARED = 16
SIZES = {"max_batch_size": 8, "max_num_tokens": 2048, "max_seq_len": 2048}


@dataclass
class Server:
    """One process and what it writes."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def tail(self) -> str:
        return f"{self.name}, end of {self.log}:\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def kill(self) -> None:
        """End the server and the ranks that it has started: they share its session."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def started(
    name: str, command: list[str], *, url: str, directory: Path, environment: dict[str, str]
) -> Iterator[Server]:
    log = directory / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | environment,
        )
    server = Server(name, url, log, process)
    try:
        yield server
    finally:
        server.kill()


def await_health(servers: list[Server]) -> None:
    import httpx

    deadline_s = time.monotonic() + START_TIMEOUT_S
    for server in servers:
        while True:
            assert server.process.poll() is None, f"ended with {server.process.returncode}: {server.tail()}"
            assert time.monotonic() < deadline_s, f"not ready after {START_TIMEOUT_S:g} s: {server.tail()}"
            try:
                if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(1)


def model_directory(root: Path) -> Path:
    if given := os.environ.get(MODEL_VARIABLE):
        return Path(given).resolve()
    from tiny_models import save_tiny_model

    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    more = {"head_dim": 64, "num_hidden_layers": 4, "max_position_embeddings": 4096, "attention_bias": False}
    return save_tiny_model(root / "model", **shape, **more, rope_theta=10000.0, initializer_range=0.05)


def write_exact_translator(model: Path, directory: Path) -> None:
    from scd_trt import translator as translators
    from scd_trt.model_spec import ModelSpec

    spec = ModelSpec.from_directory(model)
    manifest = {
        "name": "gpu-exact",
        "policy": "exact",
        "code_dtype": "bfloat16",
        "raw_dtype": "bfloat16",
        "producer": spec,
        "consumer": spec,
        "groups": tuple((layer, layer + 1) for layer in range(spec.num_layers)),
    }
    translators.save(translators.build(manifest, (translators.RawLayer(),) * spec.num_layers), directory)


def write_files(root: Path, model: Path) -> Path:
    """Pair file and artifact; then prefill.yaml, decode.yaml, disagg.yaml as an operator renders them, made smaller."""
    import yaml
    from live_servers import free_port

    from scd_trt.deploy.check import check_files
    from scd_trt.deploy.render import render, write

    ports = [free_port() for _ in range(5)]
    pair = {
        "name": "gpu-exact",
        "producer": {"model": str(model), "dtype": "bfloat16"},
        "consumer": {"model": str(model), "dtype": "bfloat16"},
        "translator": str(root / "translator"),
        "method": {"policy": "exact", "guard": "off"},
        "calibration": {"source": "unused.txt"},
        "heldout": {"source": "unused.txt"},
        "engine": {"tokens_per_block": TOKENS_PER_BLOCK},
        "servers": {
            "router": {"port": ports[0]},
            "prefill": {"port": ports[1], "control_port": ports[2]},
            "decode": {"port": ports[3], "control_port": ports[4]},
        },
    }
    (root / "pair.yaml").write_text(yaml.safe_dump(pair))
    write(render(root / "pair.yaml", "tcp", root))
    for role, share in (("prefill", 0.2), ("decode", 0.25)):  # of what is free: the second finds less
        file = root / f"{role}.yaml"
        options = yaml.safe_load(file.read_text()) | SIZES
        options["kv_cache_config"]["free_gpu_memory_fraction"] = share
        if options.get("cuda_graph_config"):
            options["cuda_graph_config"]["max_batch_size"] = SIZES["max_batch_size"]
        file.write_text(yaml.safe_dump(options))
    reports = check_files([root / f"{name}.yaml" for name in ("prefill", "decode", "disagg")])
    assert all(report.ok for report in reports), reports
    return root / "disagg.yaml"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    from scd_trt.deploy.served_pair import load_served_pair

    root = tmp_path_factory.mktemp("served")
    model = model_directory(root)
    write_exact_translator(model, root / "translator")
    disagg = write_files(root, model)
    servers = load_served_pair(disagg).servers
    with ExitStack() as stack:
        found: dict[str, Server] = {}
        for role, worker in (("prefill", servers.prefill), ("decode", servers.decode)):
            serve = ["trtllm-serve", str(model), "--host", worker.host, "--port", str(worker.port)]
            variables = {"TLLM_SCD_CONFIG": str(disagg), "TLLM_SCD_ROLE": role}
            start = started(
                role,
                [*serve, "--extra_llm_api_options", str(root / f"{role}.yaml")],
                url=f"http://{worker.host}:{worker.port}",
                directory=root,
                environment=variables,
            )
            found[role] = stack.enter_context(start)
            # one after the other: each takes its share of the memory that is free when it starts
            await_health([found[role]])
        start = started(
            "router",
            [router_python(), "-m", "scd_trt.cli", "serve", "router", str(disagg)],
            url=f"http://{servers.router.host}:{servers.router.port}",
            directory=root,
            environment={"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        found["router"] = stack.enter_context(start)
        await_health([found["router"]])
        yield found


def ask(server: Server, prompt: list[int], *, model: str = "gpu-exact") -> dict[str, Any]:
    import httpx

    body = {"model": model, "prompt": prompt, "max_tokens": NUM_COMPARED, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300, trust_env=False)
    assert response.status_code == 200, f"{response.text}\n{server.tail()}"
    answer: dict[str, Any] = response.json()
    return answer


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Token ids that every model has, different from the first block on for each seed."""
    return [4 + (7 * seed + 13 * index + index * index) % 240 for index in range(num_tokens)]


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def assert_same_text(found: str, expected: str) -> None:
    """Equal where they begin.

    The decode worker computes the tail of the prompt in another batch shape over the same cache, so sums of bfloat16 products
    may differ in the last bit and a later token that is nearly a tie may turn; the first quarter of 16 tokens does not.
    """
    num_compared = max(1, len(expected) // 4)
    assert found[:num_compared] == expected[:num_compared], f"{found!r} over codes, {expected!r} without"


@pytest.mark.parametrize("num_tokens", [TOKENS_PER_BLOCK + 1, 5 * TOKENS_PER_BLOCK, 700])
def test_over_codes_the_answer_is_the_decode_workers_own(group: dict[str, Server], num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens)
    own = ask(group["decode"], prompt)
    over_codes = ask(group["router"], prompt)
    scd = over_codes["usage"]["scd"]
    assert scd["fallback"] is None, (scd, group["prefill"].tail(), group["decode"].tail())
    assert scd["bytes_sent"] > 0
    assert scd["matched_tokens"] == (num_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert_same_text(text_of(over_codes), text_of(own))


def test_a_prompt_in_several_chunks(group: dict[str, Server]) -> None:
    prompt = prompt_of(SIZES["max_seq_len"] - 2 * NUM_COMPARED, seed=3)
    own = ask(group["decode"], prompt)
    over_codes = ask(group["router"], prompt)
    assert over_codes["usage"]["scd"]["fallback"] is None, over_codes["usage"]["scd"]
    assert_same_text(text_of(over_codes), text_of(own))


def test_a_repeated_prompt_comes_from_the_store(group: dict[str, Server]) -> None:
    prompt = prompt_of(400, seed=5)
    first, second = (ask(group["router"], prompt) for _ in range(2))
    assert second["usage"]["scd"]["decision"] == "stored", second["usage"]["scd"]
    assert second["usage"]["scd"]["bytes_sent"] == 0
    assert_same_text(text_of(second), text_of(first))


def test_a_short_prompt_is_not_sent(group: dict[str, Server]) -> None:
    prompt = prompt_of(TOKENS_PER_BLOCK, seed=6)
    own = ask(group["decode"], prompt)
    answer = ask(group["router"], prompt)
    assert answer["usage"]["scd"]["fallback"] == "too_short"
    assert_same_text(text_of(answer), text_of(own))


def test_blocks_are_given_back(group: dict[str, Server]) -> None:
    """Blocks that leak with a connector fill the pool after a while (reported for 1.3.0rc11)."""
    for seed in range(100, 140):
        answer = ask(group["router"], prompt_of(600, seed=seed))
        assert answer["usage"]["scd"]["fallback"] is None, (seed, answer["usage"]["scd"])


def test_last_a_killed_prefill_worker_costs_time_and_no_answer(group: dict[str, Server]) -> None:
    """Last in the file: there is no prefill worker after it."""
    prompt = prompt_of(500, seed=7)
    own = ask(group["decode"], prompt)
    group["prefill"].kill()
    answer = ask(group["router"], prompt)
    assert answer["usage"]["scd"]["fallback"] is not None
    assert text_of(answer) == text_of(own), "both are the decode worker's own prefill of the same prompt"
    assert group["decode"].process.poll() is None
