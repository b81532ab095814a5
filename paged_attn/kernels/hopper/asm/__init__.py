"""Inline assembly, with a module for each purpose; a module's docstring shows examples of its texts.

Modules of this folder import the shim and each other only.
A new instruction is a function in the module of its purpose, and a test in tests/kernels/hopper.
"""
