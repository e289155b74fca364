"""A transformers model in blocks: taken apart, run on one chunk, checked against the whole."""
