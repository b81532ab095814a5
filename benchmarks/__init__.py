"""Benchmarks of the library beside its peers."""
