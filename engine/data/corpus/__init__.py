"""A tokenised corpus: made once from a source, stored with checksums, cached for this user."""
