"""Text from streamed weights: decoding, keys and values of what has been read, and models opened to be asked."""
