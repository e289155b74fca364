"""These tests run on the stand-in for CUDA only: `make standin`. Elsewhere nothing here is collected."""

import os

import standin

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the process's first product

if standin.running():
    standin.name_threads()
else:
    collect_ignore_glob = ["test_*.py"]
