"""Compiling ahead."""
