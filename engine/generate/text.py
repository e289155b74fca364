"""Token ids as text while they come."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.data.text.tokenizer import TextTokenizer

_BEFORE = 8
"""Tokens of the prompt that the first new one is decoded behind: some tokenizers drop a text's first space."""


class TextStream:
    """What new tokens add to a text; half a character waits for its other half."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_BEFORE:])
        self._first, self._reported = 0, len(self._ids)
        self.text = ""
        """All of it so far."""

    def add(self, token: int) -> str:
        """The text that is certain with one token more."""
        self._ids.append(token)
        return self._more(final=False)

    def end(self) -> str:
        """The rest, when there are no more tokens."""
        return self._more(final=True)

    def _more(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._first : self._reported])
        now = self._tokenizer.decode(self._ids[self._first :])
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return ""
        more = now[len(before) :]
        self._first, self._reported = self._reported, len(self._ids)
        self.text += more
        return more


def text_behind(tokenizer: TextTokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What `ids` say behind a prompt."""
    stream = TextStream(tokenizer, prompt)
    for token in ids:
        stream.add(token)
    stream.end()
    return stream.text
