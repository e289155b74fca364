"""The formats of sources: which files there are to read, and the documents in each; one module per format."""
