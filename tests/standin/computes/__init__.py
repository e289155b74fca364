"""The stand-in's kernels with the arithmetic of a CPU: ../README.md."""
