"""From conversations and texts to token ids: chat templates, which of their tokens are trained, and tokenizers."""
