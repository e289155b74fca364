"""Weights of a model with an adapter beside it, from the base's folder and the adapter's."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from penstock.engine.data.text.tokenizer import has_tokenizer, load_tokenizer
from penstock.engine.generate.sources import FolderSource
from penstock.engine.hf.adapter_folder import StoredAdapter, open_start
from penstock.engine.model.adapters import is_adapter
from penstock.storage.files.errors import UserError


class AdapterSource(FolderSource):
    """The base tensor by tensor as a folder's, the adapter held in memory."""

    def __init__(self, folder: Path, base: Path | None = None) -> None:
        """`base`: the model's folder; None: where the adapter says that it is. Raises UserError as for any adapter to
        go on from, and where there is no base."""
        stored = StoredAdapter.open(folder)
        folder_of_base = Path(stored.base or "").expanduser() if base is None else base
        if base is None and (stored.base is None or not folder_of_base.is_dir()):
            raise UserError(f"{folder}: the adapter's base model {stored.base} is missing; copy or download it there")
        super().__init__(folder_of_base, stored.section)
        if has_tokenizer(folder):
            self.tokenizer = load_tokenizer(folder)
        self._values = open_start(folder, self.spec, None).values()

    def stored_bytes(self, buffer: str) -> int:
        return 0 if self._is_adapter(buffer) else super().stored_bytes(buffer)

    def read(self, buffer: str, out: Tensor) -> None:
        if not self._is_adapter(buffer):
            super().read(buffer, out)
            return
        for name, view in self._flat[buffer].views(out).items():
            view.copy_(self._values[name])

    def _is_adapter(self, buffer: str) -> bool:
        return all(is_adapter(param.name) for param in self.spec.buffers[buffer])
