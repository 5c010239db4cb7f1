"""The record of one handover, the journey of one prompt's codes from the prefill to the decode worker.

Owns `Handover`, which becomes `usage.scd` of the answer and the samples of the metrics, and the names of the reasons why a
decode worker prefilled by itself. Pure: who fills it in is `courier.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from scd_trt.serving.decision import Choice, Decision
from scd_trt.serving.metrics import TransferSample
from scd_trt.transfer.messages import TransferReport
from scd_trt.transfer.states import FALLBACK_REASONS
from scd_trt.transfer.wire import new_transfer_id

# Reasons of the router itself; those of a transfer are `transfer.states.FallbackReason`.
RouterReason = Literal[
    "too_short",
    "several_prompts",
    "prefill_down",
    "too_costly",
    "too_long",
    "control_unreachable",
    "control_error",
    "not_granted",
    "prefill_unreachable",
    "prefill_died",
    "prefill_timeout",
    "prefill_busy",
    "prefill_error",
    "prefill_refused",
    "landing_timeout",
    "not_matched",
]
REASONS: tuple[str, ...] = tuple(dict.fromkeys((*get_args(RouterReason), *FALLBACK_REASONS)))
Stage = Literal["expect", "prefill", "encode", "transfer", "wait", "decode_codes", "first_token"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class CodeTerms:
    """What the router knows of the pair's translator."""

    fingerprint: str
    bytes_per_token: int
    dense_bytes_per_token: int


@dataclass
class Handover:
    """What happened to one request's codes.

    Attributes:
        choice: `stored` where the decode worker had the prefix, or most of it, already.
        is_expected: the decode worker was told of the transfer, so it can report.
        prefill_url: the worker that was asked for the prompt; None where none was.
        fallback: why the decode worker prefilled by itself; None where it did not, or computed only what the guard cut off.
        prefill_computed_tokens: prompt tokens that the prefill worker did not have cached.
        own_prefill_s: from the request's forwarding to its first token.
        stages_s: what the router timed itself.
        report: what the decode worker knows of the transfer, fetched after its answer.
    """

    transfer_id: str = field(default_factory=new_transfer_id)
    start_s: float = field(default_factory=time.perf_counter)
    prompt_tokens: int = 0
    choice: Choice = "local"
    decision: Decision | None = None
    is_expected: bool = False
    prefill_url: str | None = None
    stored_blocks: int = 0
    granted_blocks: int = 0
    fallback: str | None = None
    prefill_computed_tokens: int = 0
    own_prefill_s: float | None = None
    stages_s: dict[Stage, float] = field(default_factory=dict)
    report: TransferReport | None = None

    def begin_again(self) -> None:
        """The next try is a transfer of its own."""
        self.transfer_id = new_transfer_id()
        self.choice, self.fallback, self.is_expected, self.prefill_url = "local", None, False, None
        self.stored_blocks = self.granted_blocks = 0
        self.stages_s.clear()

    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.start_s

    @property
    def guarded_blocks(self) -> int:
        """Blocks that the producer's guard refused; they were granted and did not come."""
        report = self.report
        return report.num_granted - report.num_landed if report is not None and report.reason == "guarded" else 0

    @property
    def is_partly_guarded(self) -> bool:
        """True where the guard cut the prompt and the decode worker used what came before the cut."""
        return self.fallback == "guarded" and self.report is not None and bool(self.report.matched_tokens)

    def is_unmatched(self, usage: Mapping[str, Any] | None, tokens_per_block: int) -> bool:
        """True where codes lay ready, or were thought to, and the engine used neither them nor blocks of its own.

        The router may have been wrong about what the worker has (it guessed, and nobody was asked), and the report of one
        that died after its answer is lost: then the answer's usage alone tells.
        """
        if usage is None or (self.report is not None and self.report.matched_tokens):
            return False
        return cached_tokens(usage) < tokens_per_block

    def sample(self, terms: CodeTerms, tokens_per_block: int) -> TransferSample:
        """The handover as metrics count it."""
        report = self.report
        failed = self.fallback is not None and self.fallback != "not_matched"
        return TransferSample(
            outcome="failed" if failed else "stored" if self.choice == "stored" else "landed",
            sent_bytes=report.bytes_received if report else 0,
            dense_bytes=self._dense_bytes(terms, tokens_per_block),
            encode_s=_seconds(report.encode_ms if report else None),
            transfer_s=_seconds(report.transfer_ms if report else None),
            decode_s=_seconds(report.decode_ms if report else None),
        )

    def as_usage(self, terms: CodeTerms, tokens_per_block: int) -> dict[str, Any]:
        """`usage.scd`. Values that nobody knows are null."""
        report, decision = self.report, self.decision
        sent_bytes = report.bytes_received if report else 0
        dense_bytes = self._dense_bytes(terms, tokens_per_block)
        return {
            "transfer_id": self.transfer_id,
            "decision": self.choice,
            "decision_reason": decision.reason if decision else None,
            "decision_inputs": None if decision is None else _shown(decision),
            "fallback": self.fallback,
            "prompt_tokens": self.prompt_tokens,
            "matched_tokens": report.matched_tokens if report else None,
            "stored_blocks": self.stored_blocks,
            "guarded_blocks": self.guarded_blocks,
            "bytes_sent": sent_bytes,
            "dense_bytes": dense_bytes,
            "ratio": round(dense_bytes / sent_bytes, 4) if sent_bytes else None,
            "ms": self._milliseconds(),
        }

    def _dense_bytes(self, terms: CodeTerms, tokens_per_block: int) -> int:
        num_landed = self.report.num_landed if self.report else 0
        return num_landed * tokens_per_block * terms.dense_bytes_per_token

    def _milliseconds(self) -> dict[Stage, float | None]:
        found: dict[Stage, float | None] = dict.fromkeys(STAGES)
        found |= {stage: 1000 * seconds for stage, seconds in self.stages_s.items()}
        if self.report is not None:
            found |= {
                "encode": self.report.encode_ms,
                "transfer": self.report.transfer_ms,
                "decode_codes": self.report.decode_ms,
            }
        return {stage: None if value is None else round(value, 3) for stage, value in found.items()}


def _shown(decision: Decision) -> dict[str, Any]:
    """The numbers that a decision rests on; null where nothing was measured or nothing needed."""
    inputs, rates = decision.inputs, decision.inputs.rates
    values = {
        "sent_tokens": inputs.sent_tokens,
        "sent_bytes": inputs.sent_bytes,
        "stored_tokens": inputs.stored_tokens,
        "prefill_cached_tokens": inputs.prefill_cached_tokens,
        "link_bytes_per_s": rates.link_bytes_per_s,
        "prefill_tokens_per_s": rates.prefill_tokens_per_s,
        "local_tokens_per_s": rates.local_tokens_per_s,
        "reconstruct_s_per_token": rates.reconstruct_s_per_token,
        "send_s": decision.send_s,
        "local_s": decision.local_s,
    }
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()} | {
        "local_source": decision.local_source
    }


def cached_tokens(usage: Mapping[str, Any] | None) -> int:
    """Prompt tokens that a worker did not compute, by its usage; 0 where it does not say."""
    details = usage.get("prompt_tokens_details") if usage else None
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return cached if isinstance(cached, int) else 0


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
