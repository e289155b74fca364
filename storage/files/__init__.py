"""Ordinary files: durable writes, links and JSON that anybody may have made, safetensors, checksums, units."""
