"""The formats of sources: what a row of a file, or a file as a whole, says as a sample; one module per format."""
