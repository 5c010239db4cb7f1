"""What two workers must agree on before any memory is named, and the check, which both sides make.

Refused with a bounded reason and both values: another role, a transport library that does not interoperate, another
translator (fingerprint), another code layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from scd_trt.transfer.connection import RefusedError
from scd_trt.transfer.messages import SessionHello, SessionWelcome
from scd_trt.transfer.wire import CodeLayout

Role = Literal["producer", "consumer"]
_OLDEST_INTEROPERABLE = (1, 4)  # NIXL 1.4.1..1.5.1 were seen to interoperate; older ones failed or crashed


@dataclass(frozen=True)
class Terms:
    """One side's terms."""

    role: Role
    transport: str
    fingerprint: str
    layout: CodeLayout
    incarnation: str

    def hello(self) -> SessionHello:
        """As the consumer's opening message."""
        return SessionHello(self.role, self.transport, self.fingerprint, *self._sizes(), self.incarnation)

    def welcome(self) -> SessionWelcome:
        """As the producer's answer."""
        return SessionWelcome(self.role, self.transport, self.fingerprint, *self._sizes(), self.incarnation)

    def check(self, other: SessionHello) -> None:
        """Compare with the other side's.

        Raises:
            RefusedError: they do not fit; the text holds both values.
        """
        if other.role == self.role:
            raise RefusedError("aborted", f"both sides are {self.role}s; check which control address was given")
        if not _interoperate(self.transport, other.transport):
            raise RefusedError("version_mismatch", f"transport {self.transport} here, {other.transport} there")
        if other.fingerprint != self.fingerprint:
            raise RefusedError(
                "fingerprint_mismatch",
                f"translator {self.fingerprint} here, {other.fingerprint} there; give both workers the same artifact",
            )
        theirs = CodeLayout(other.tokens_per_block, tuple(other.bytes_per_token))
        if theirs != self.layout:
            raise RefusedError(
                "layout_mismatch", f"{self.layout} here, {theirs} there; set engine.tokens_per_block alike"
            )

    def _sizes(self) -> tuple[int, list[int]]:
        return self.layout.tokens_per_block, list(self.layout.bytes_per_token)


def _interoperate(here: str, there: str) -> bool:
    """Equal, or two releases of NIXL of one major version that are both new enough."""
    if here == there:
        return True
    versions = [re.fullmatch(r"nixl\w* (\d+)\.(\d+)\S*", text) for text in (here, there)]
    if not all(versions):
        return False
    mine, other = ((int(found[1]), int(found[2])) for found in versions if found)
    return mine[0] == other[0] and min(mine, other) >= _OLDEST_INTEROPERABLE
