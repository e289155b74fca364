import os

# cuBLAS reads it at the process's first product, which another test may make before a deterministic run does.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
