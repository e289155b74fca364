"""Texts and chats as a model that is opened to be queried reads them, and what ends them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from penstock.engine.config import DataConfig
from penstock.engine.data.text.chat import ChatTemplate, find_template, load_template, trained_ends
from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.engine.hf.generation import stop_ids
from penstock.engine.runtime.sources import AdapterSource, RunSource, Source
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import remarks_on_weights


class Texts:
    """Attributes: `tokenizer` (None: there is none), `template` (for chats; None likewise), `stop_ids` (tokens that end
    a text)."""

    def __init__(self, source: Source, where: Path, data: DataConfig) -> None:
        """`where`: what the user has named. `data`: of the run, if it is one."""
        self._where, self._data, config = where, data, source.spec.config
        self.tokenizer: TextTokenizer | None = source.tokenizer
        self.template: ChatTemplate | None = None
        self.stop_ids = stop_ids(source.origin, config, self.tokenizer)
        if isinstance(source, AdapterSource):
            self.stop_ids |= stop_ids(where, config, self.tokenizer)
        if self.tokenizer is not None and isinstance(source, RunSource):
            self.template = load_template(data, self.tokenizer, where / "data")
            self.stop_ids |= trained_ends(data, self.template)
        elif self.tokenizer is not None:
            self.template = find_template(data, self.tokenizer)
        self._remarks = list[str]()
        if source.origin is not None and not isinstance(source, RunSource):
            self._remarks = remarks_on_weights(source.origin)

    def encode(self, text: str) -> list[int]:
        """A prompt's token ids, begun as the tokenizer begins a text, or the run's recipe. Raises UserError where there
        is no tokenizer."""
        tokenizer = self._tokenizer()
        ids = tokenizer.encode_batch([text])[0]
        if self._data.bos == "on" or (self._data.bos == "auto" and tokenizer.puts_bos):
            ids = [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *ids]
        if not ids:
            raise UserError(
                "an empty prompt: this tokenizer does not begin a text with a token; give at least one character"
            )
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation, each message with `role` and `content`, up to where the assistant is to write."""
        tokenizer = self._tokenizer()
        if self.template is None:
            raise UserError(
                f"{tokenizer.folder}: the tokenizer has no chat template; use --prompt, or a model that can chat"
            )
        return tokenizer.encode_batch([self.template.prompt(messages)])[0]

    @cached_property
    def chat_stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: `stop_ids`, and what ends a turn under the chat template."""
        return self.stop_ids if self.template is None else self.stop_ids | self.template.turn_ends

    def _tokenizer(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise UserError(f"{self._where}: it has no tokenizer, so no text can be read; give a model with one")
        return self.tokenizer
