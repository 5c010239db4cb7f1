"""What the connector's scheduler and worker halves share in one process: translator, code session, and who holds what.

Built once per process, from a pair file and a role. The embedded engine builds it and hands it to both halves; inside
TensorRT-LLM both halves ask `runtime_from_environment`, because the engine constructs them with its own arguments only and
passes no variables but `TLLM*` and `TRTLLM*` to its ranks:

    TLLM_SCD_CONFIG   path of the disaggregated file with an scd section, or of a pair file
    TLLM_SCD_ROLE     prefill or decode
    TLLM_SCD_WORKER   index of this worker's url, where its role has several

With tensor parallelism every rank has a runtime, but only that of rank 0 has a session (`ranks`): the others follow what its
metadata say.

Ownership: `unfinished_pushes` holds every push between its plan and its `finish` or `abort`; `promises` holds the pins of
promised blocks between the scheduler's promise and the worker's load. Both are used by the engine's thread only.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from scd_trt import kv_cache
from scd_trt import translator as translators
from scd_trt.config import ScdError, ServedPair
from scd_trt.deploy.scd_section import CONFIG_VARIABLE, ROLE_VARIABLE
from scd_trt.deploy.served_pair import chosen_worker, load_served_pair
from scd_trt.kv_cache import KvLayout
from scd_trt.model_spec import ModelSpec
from scd_trt.serving.connector_api import ConnectorRequest
from scd_trt.serving.pool_layout import view_pool
from scd_trt.serving.ranks import RankGroup, SingleRank, heads_of_rank
from scd_trt.transfer.session import Consumer, PinnedBlocks, Producer, Push, open_transport
from scd_trt.transfer.store import CodeStore
from scd_trt.transfer.wire import CodeLayout
from scd_trt.translator import Translator

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]
_process_lock = threading.Lock()
_process_runtime: list[ConnectorRuntime] = []


class ConnectorError(ScdError):
    """The connector cannot be built as asked; the message names the setting."""


class ConnectorOrderError(RuntimeError):
    """The engine called the connector in an order that would corrupt the cache: a bug, not a peer's fault."""


@dataclass
class ConnectorRuntime:
    """See the module's docstring.

    Attributes:
        translator: fitted maps; its fingerprint is part of every block key.
        layout: shape of codes.
        producer: the sending session (prefill role).
        consumer: the receiving session (decode role).
        store: codes by block key; on the decode side the same object as `consumer.store`.
        lane: what the codes travel over, in words.
        is_guarded: the prefill role refuses text that lies beyond calibration (`method.guard`).
        on_cut: is told of each prompt that the guard cuts: blocks kept, blocks refused.
        ranks: of this server.
        follows: the role of a rank without a session, None on rank 0.
        disabled: why no codes are sent or promised any more, None as long as they are.
    """

    translator: Translator
    layout: CodeLayout
    store: CodeStore
    producer: Producer | None = None
    consumer: Consumer | None = None
    lane: str = ""
    is_guarded: bool = False
    on_cut: Callable[[int, int], None] = lambda num_kept, num_refused: None
    ranks: RankGroup = field(default_factory=SingleRank)
    follows: Role | None = None
    disabled: str | None = None
    unfinished_pushes: dict[str, Push] = field(default_factory=dict)
    promises: dict[int, PinnedBlocks] = field(default_factory=dict)

    @property
    def role(self) -> Role:
        """Which half of the pair this process runs."""
        if self.follows is not None:
            return self.follows
        return "prefill" if self.producer is not None else "decode"

    @cached_property
    def fingerprint(self) -> str:
        """Of the translator; kept, because the manifest makes it anew each time."""
        return self.translator.manifest.fingerprint

    @property
    def tokens_per_block(self) -> int:
        """Tokens of one KV block."""
        return self.layout.tokens_per_block

    def require_producer(self) -> Producer:
        """The sending session.

        Raises:
            ConnectorError: this process is a decode server.
        """
        if self.producer is None:
            raise ConnectorError(f"the prefill connector was given a runtime of {self._words()}")
        return self.producer

    def require_consumer(self) -> Consumer:
        """The receiving session.

        Raises:
            ConnectorError: this process is a prefill server.
        """
        if self.consumer is None:
            raise ConnectorError(f"the decode connector was given a runtime of {self._words()}")
        return self.consumer

    @property
    def spec(self) -> ModelSpec:
        """The model that this process runs."""
        manifest = self.translator.manifest
        return manifest.producer if self.role == "prefill" else manifest.consumer

    @property
    def local_heads(self) -> range:
        """The kv heads that are in this rank's pool."""
        return heads_of_rank(self.spec.num_kv_heads, rank=self.ranks.rank, size=self.ranks.size)

    def view_pool(self, pool: Tensor) -> Tensor:
        """The engine's pool as `[N, L, 2, h, B, D]`: the model's shape, this rank's heads, our blocks, its own dtype.

        Raises:
            PoolError: it is not such a pool.
        """
        num_heads = len(self.local_heads)
        layout = KvLayout(self.spec.num_layers, num_heads, self.spec.head_dim, self.tokens_per_block, pool.dtype)
        return view_pool(pool, layout)

    def pool_dtype(self, llm_args: Any) -> torch.dtype:
        """Of keys and values, where the engine hands its pool over as bytes: its setting, else the model's."""
        named = str(getattr(getattr(llm_args, "kv_cache_config", None), "dtype", "auto"))
        return getattr(torch, self.spec.dtype if named == "auto" else named)  # type: ignore[no-any-return]

    def disable(self, reason: str) -> None:
        """Send and promise nothing from now on; the engine goes on without codes. The first reason is kept."""
        if self.disabled is None:
            self.disabled = reason
            logger.error("SCD is disabled on this %s server until it is restarted: %s", self.role, reason)

    def check_metadata(self, fingerprint: str) -> None:
        """Metadata come from rank 0, perhaps on another host, and name its translator.

        Raises:
            ConnectorError: this rank has loaded another one.
        """
        if fingerprint != self.fingerprint:
            raise ConnectorError(
                f"rank {self.ranks.rank} has translator {self.fingerprint}, rank 0 {fingerprint}; copy one artifact to all "
                "hosts"
            )

    def sent_block_keys(self, token_ids: list[int], salt: str) -> list[bytes]:
        """Keys of the blocks of a prompt that travel as codes: the full ones before its last token."""
        scope = kv_cache.scope(fingerprint=self.fingerprint, salt=salt)
        num_blocks = kv_cache.num_sent_blocks(len(token_ids), self.tokens_per_block)
        prefix = token_ids[: num_blocks * self.tokens_per_block]
        return kv_cache.block_keys(prefix, tokens_per_block=self.tokens_per_block, scope=scope)

    def _words(self) -> str:
        return f"role {self.role}" + (f", rank {self.ranks.rank}, which has no session" if self.follows else "")

    @classmethod
    def open(cls, config: ServedPair, role: Role, ranks: RankGroup | None = None) -> ConnectorRuntime:
        """Load the pair's translator and open the session of a role.

        Raises:
            TranslatorError, ControlError, LibraryError: see `translator.load`, `session`.
        """
        translator = translators.load(config.translator_path())
        return cls.open_with(translator, config, role, ranks=ranks)

    @classmethod
    def open_with(
        cls,
        translator: Translator,
        config: ServedPair,
        role: Role,
        *,
        listen: str | None = None,
        ranks: RankGroup | None = None,
    ) -> ConnectorRuntime:
        """The same with a translator that is loaded already, and perhaps another control address than the pair's."""
        ranks = ranks or SingleRank()
        layout = CodeLayout(config.engine.tokens_per_block, translator.manifest.bytes_per_token)
        store = CodeStore(config.store)
        if ranks.rank:
            return cls(translator, layout, store, ranks=ranks, follows=role)
        worker = config.servers.prefill if role == "prefill" else config.servers.decode
        session: dict[str, Any] = {
            "config": config.transport,
            "control": config.control,
            "listen": listen or f"{worker.host}:{worker.control_port}",
            "fingerprint": translator.manifest.fingerprint,
            "layout": layout,
        }
        is_guarded = role == "prefill" and config.method.guard == "cut"
        if is_guarded:
            translator.check_guard()
        transport = open_transport(config.transport)
        if role == "prefill":
            producer = Producer(transport, **session)
            return cls(
                translator, layout, store, producer=producer, lane=transport.lane, is_guarded=is_guarded, ranks=ranks
            )
        consumer = Consumer(transport, store=store, **session)
        return cls(translator, layout, store, consumer=consumer, lane=transport.lane, ranks=ranks)

    def close(self) -> None:
        """End the session; pending pushes fail, pins are released."""
        for push in self.unfinished_pushes.values():
            push.abort("aborted")
        for pinned in self.promises.values():
            pinned.release()
        self.unfinished_pushes.clear()
        self.promises.clear()
        for session in (self.producer, self.consumer):
            if session is not None:
                session.close()


def runtime_from_environment(ranks: RankGroup | None = None) -> ConnectorRuntime:
    """The runtime of this process, opened at the first call; scheduler and worker are built at the same time.

    Raises:
        ConnectorError: a variable is missing or wrong.
        ScdError: the pair file or the artifact is wrong, or the session cannot be opened.
    """
    with _process_lock:
        if not _process_runtime:
            _process_runtime.append(_open_from_environment(ranks or SingleRank()))
        return _process_runtime[0]


def role_from_environment() -> Role:
    """What this process is told to be.

    Raises:
        ConnectorError: the variable is missing or wrong.
    """
    given = os.environ.get(ROLE_VARIABLE)
    role: Role | None = next((role for role in get_args(Role) if role == given), None)
    if role is None:
        raise ConnectorError(f"{ROLE_VARIABLE} is {given!r}; it must be prefill or decode")
    return role


def _open_from_environment(ranks: RankGroup) -> ConnectorRuntime:
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise ConnectorError(f"{CONFIG_VARIABLE} is not set; it must name the disaggregated file with an scd section")
    role = role_from_environment()
    pair = load_served_pair(Path(path), role=role, worker=chosen_worker(os.environ))
    return ConnectorRuntime.open(pair, role, ranks)


def request_salt(request: ConnectorRequest) -> str:
    """The cache salt of a request as text: its `cache_salt` where the engine keeps it, else the salt's number."""
    salt = getattr(request, "cache_salt", None)
    if isinstance(salt, str):
        return salt
    return "" if request.cache_salt_id is None else str(request.cache_salt_id)
