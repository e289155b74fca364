"""These tests run on the stand-in for CUDA whose kernels compute, `make gpu-emulated`; elsewhere none is collected."""

import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the process's first product

if "COMPUTES_LIBRARY" in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[1] / "standin"))
else:
    collect_ignore_glob = ["test_*.py"]
