"""Whether transformers makes of a tokenizer's files, beside a model of some type, the tokenizer that a run trains with.

AutoTokenizer goes by the model's type as well as by the files: beside a qwen2, say, it puts Qwen's own way of cutting
text in the place of the one in tokenizer.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.engine.data.text.tokenizer import TextTokenizer, load_tokenizer, tokenizer_contents, write_tokenizer_files
from penstock.storage.files.errors import UserError

_TEXT = "It's 12345 o'clock:\n\n  the  naïve Ünicode\t“text” 한국어, and x_1 = f(2.50)\r\n  SHOUTED don'T\n"


def read_otherwise(tokenizer: TextTokenizer, model_type: str) -> str | None:
    """What is to be said where an export would be read with another tokenizer; None where it would be the same."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer_files(folder, tokenizer_contents(tokenizer.folder))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        try:
            result = load_tokenizer(folder)
            if result.encode_batch([_TEXT]) == tokenizer.encode_batch([_TEXT]):
                return None
            how = f"as a {result.kind}, which cuts text otherwise"
        except UserError:
            how = "in a way that fails, otherwise"
    return (
        f"data.tokenizer: beside a model of type '{model_type}' AutoTokenizer reads this tokenizer {how} than the run "
        "does; load an export's with PreTrainedTokenizerFast.from_pretrained, or train a model of another type"
    )
