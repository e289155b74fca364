"""What only we run: the measurements of docs/results, `make gpu-check` and the pictures of the documentation.

`python -m benchmarks NAME [OPTIONS]` from a checkout: one file a benchmark, `parts` is what several of them share.
"""
