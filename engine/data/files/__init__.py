"""The containers that rows come in: JSON, JSONL, CSV, Parquet and Arrow; one module per container."""
