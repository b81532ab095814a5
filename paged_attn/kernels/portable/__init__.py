"""Portable Triton: every GPU, and the interpreter."""
