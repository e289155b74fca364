"""From text to batches of token ids: corpora, tokenizers, the loader."""
