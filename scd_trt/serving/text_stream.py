"""From token ids to the text a client sees: incremental detokenisation, stop strings, and the text of single tokens.

Owns: `TextStream`, which is fed one token at a time and releases only text that will never be taken back. Two things are
held back: bytes that may be the beginning of a character (one character can be spread over several tokens), and text
that may be the beginning of a stop string. The released pieces, joined, are the text; no piece depends on how it was
cut. `close()` releases what is left. Tokens are reported with the pieces that hold their text, so that log
probabilities in a stream never run ahead of the text.

A token whose text begins at or after a stop string is dropped together with it. Special tokens have no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scd_trt.serving.prompts import Tokenizer

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, so at most three tokens can be waiting for its end.
MAX_OPEN_TOKENS = 3
# A window that never ends on a whole character (invalid bytes) is cut here: decoding stays linear in the text.
MAX_WINDOW_TOKENS = 16


@dataclass(frozen=True)
class TextToken:
    """One token of the answer: where its text begins in the whole text, and where it ends."""

    index: int
    start: int
    end: int


@dataclass(frozen=True)
class Piece:
    """Text that is released now, the tokens it completes, and whether a stop string ended the text."""

    text: str
    tokens: tuple[TextToken, ...] = ()
    stopped: bool = False


class Detokenizer:
    """Text of a growing list of token ids; `push` returns what each token adds for good."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoding starts one finished window back: tokenizers treat the first token of a text differently (spaces).
        self._context: list[int] = []
        self._window: list[int] = []
        self._released = 0

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is certain now, maybe empty."""
        self._window.append(token_id)
        text = self._window_text()
        num_open = len(text) - len(text.rstrip(REPLACEMENT))
        if num_open == 0:
            return self._cut(text, keep=0)
        if len(self._window) >= MAX_WINDOW_TOKENS:
            return self._cut(text, keep=self._open_tokens())
        certain = text[self._released : len(text) - min(num_open, MAX_OPEN_TOKENS)]
        self._released += len(certain)
        return certain

    def close(self) -> str:
        """The text still held back: an unfinished character shows as U+FFFD."""
        return self._window_text()[self._released :]

    def _cut(self, text: str, *, keep: int) -> str:
        """Start a new window with the last `keep` tokens; what comes before them is certain."""
        end = len(self._window) - keep
        boundary = len(text) - len(self._decode(self._window[end:]))
        certain = text[self._released : boundary]
        self._context, self._window = self._window[:end], self._window[end:]
        self._released = max(0, self._released - boundary)
        return certain

    def _open_tokens(self) -> int:
        """Tokens at the end that can be decoded apart from the rest: a character may begin there."""
        whole = self._decode(self._window)
        for keep in range(1, MAX_OPEN_TOKENS + 1):
            if self._decode(self._window[:-keep]) + self._decode(self._window[-keep:]) == whole:
                return keep
        return 0

    def _window_text(self) -> str:
        known = len(self._decode(self._context))
        return self._decode(self._context + self._window)[known:]

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        # The library's clean-up joins " ." to ".": text that was released would change afterwards.
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopStrings:
    """Finds the first stop string in text that arrives in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("an empty stop string would stop every text at once")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can be shown now, and whether a stop string was found (it and what follows is dropped)."""
        self._held += text
        found = [position for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        safe = len(self._held) - max((self._open_suffix(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown, False

    def close(self) -> str:
        """Text held back as the possible beginning of a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _open_suffix(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)


@dataclass
class TextStream:
    """Detokenisation and stop strings of one answer."""

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    _num_tokens: int = 0
    _decoded: int = 0
    _shown: int = 0
    _waiting: list[TextToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)
        self._stop_strings = StopStrings(self.stops)

    def push(self, token_id: int) -> Piece:
        """Add a token of the answer (never the end-of-text token)."""
        start = self._decoded
        fresh = self._detokenizer.push(token_id)
        self._decoded += len(fresh)
        self._waiting.append(TextToken(self._num_tokens, start, self._decoded))
        self._num_tokens += 1
        text, stopped = self._stop_strings.push(fresh)
        return self._piece(text, stopped)

    def close(self) -> Piece:
        """Release what is left once the last token was pushed; a stop string in it still counts."""
        fresh = self._detokenizer.close()
        self._decoded += len(fresh)
        text, stopped = self._stop_strings.push(fresh)
        if not stopped:
            text += self._stop_strings.close()
        return self._piece(text, stopped, closing=True)

    def _piece(self, text: str, stopped: bool, *, closing: bool = False) -> Piece:
        self._shown += len(text)
        if stopped:
            tokens = [token for token in self._waiting if token.start < self._shown]
            self._waiting = []
        elif closing:
            tokens, self._waiting = self._waiting, []
        else:
            # Tokens come out with text only: a token that adds none yet waits for the character it belongs to.
            tokens = [token for token in self._waiting if text and token.end <= self._shown]
            self._waiting = self._waiting[len(tokens) :]
        return Piece(text, tuple(tokens), stopped)


class TokenText:
    """The text of single tokens, as log probabilities show it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokenizers of the SentencePiece family drop the space of a first token: every token is read after another one.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self._decode(self._anchor)

    def text(self, token_id: int) -> str:
        """Text of one token; part of a character shows as U+FFFD, a special token by its name."""
        return self._decode([*self._anchor, token_id])[len(self._anchor_text) :]

    def utf8(self, token_id: int) -> list[int] | None:
        """UTF-8 bytes of the token's text, or None where it is only part of a character."""
        text = self.text(token_id)
        return None if REPLACEMENT in text else list(text.encode())

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
