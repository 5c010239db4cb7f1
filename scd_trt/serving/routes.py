"""What the router serves: one `Route` per model pair, the name that clients ask for, and its workers.

Owns `Route`, and how it is made of what a server reads of its pair (`route_of`). Pairs may share prefill workers by naming
them alike. The consumer's prefill speed is taken for the producer's only where both have the same shapes (`consumer_speed`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scd_trt import translator as translators
from scd_trt.config import ScdError, ServedPair, WorkerConfig
from scd_trt.model_spec import ModelSpec
from scd_trt.models import load_tokenizer, materialize
from scd_trt.serving.handover import CodeTerms
from scd_trt.serving.prompts import Tokenizer
from scd_trt.serving.rotation import Endpoint


class RouteError(ScdError):
    """Two pairs that one router cannot serve together."""


@dataclass(frozen=True)
class Route:
    """One pair.

    Attributes:
        terms: of the translator that its workers have loaded.
        tokenizer: the consumer's.
        consumer_speed: its prefill speed over the producer's on equal hardware; None where nobody knows.
    """

    config: ServedPair
    terms: CodeTerms
    tokenizer: Tokenizer
    consumer_speed: float | None = None

    @property
    def model(self) -> str:
        """What clients call it."""
        return self.config.name

    @property
    def prefill(self) -> tuple[Endpoint, ...]:
        """Prefill workers that the files name."""
        servers = self.config.servers
        return _endpoints(servers.router.prefill_workers or (servers.prefill,))

    @property
    def decode(self) -> tuple[Endpoint, ...]:
        """Decode workers that the files name."""
        servers = self.config.servers
        return _endpoints(servers.router.decode_workers or (servers.decode,))


def route_of(config: ServedPair) -> Route:
    """The route of a pair: reads its translator's manifest and its consumer's tokenizer.

    Raises:
        ScdError: either is missing or wrong.
    """
    manifest = translators.load_manifest(config.translator_path())
    consumer = materialize(config.consumer.model, adapter=config.consumer.adapter)
    terms = CodeTerms(manifest.fingerprint, sum(manifest.bytes_per_token), manifest.dense_bytes_per_token)
    speed = 1.0 if _compute_alike(manifest.producer, manifest.consumer) else None
    return Route(config, terms, load_tokenizer(consumer), speed)


def check_together(routes: Iterable[Route]) -> None:
    """Raise `RouteError` where two pairs have one name, or take their workers from one cluster."""
    seen: set[tuple[str, str]] = set()
    for route in routes:
        cluster = route.config.servers.router.cluster_name
        for what, name in (("are called", route.model), ("use the cluster_name", cluster)):
            if name is not None and (what, name) in seen:
                raise RouteError(f"two pairs {what} {name!r}; give each its own")
            seen.add((what, name or ""))


def worker_url(host: str, port: int) -> str:
    """URL of a worker's OpenAI endpoint."""
    return f"http://{_bracketed(host)}:{port}"


def endpoint(host: str, port: int, control_port: int) -> Endpoint:
    """A worker by its host and ports."""
    return Endpoint(worker_url(host, port), f"{_bracketed(host)}:{control_port}")


def _endpoints(workers: Iterable[WorkerConfig]) -> tuple[Endpoint, ...]:
    return tuple(endpoint(worker.host, worker.port, worker.control_port) for worker in workers)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _compute_alike(producer: ModelSpec, consumer: ModelSpec) -> bool:
    """Whether a token costs both models the same work, as far as their shapes tell."""
    shapes = ("family", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "sliding_windows")
    return all(getattr(producer, name) == getattr(consumer, name) for name in shapes)
