"""Benchmarks that compare in one run and print the ratio: one module per `penstock bench` command, and their parts."""
