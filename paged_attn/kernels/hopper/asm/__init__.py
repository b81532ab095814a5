"""Inline assembly (PTX), with a module for each purpose; a module's docstring shows examples of its PTX.

Modules of this folder import only the shim and each other.
A new instruction is a function in the module of its purpose, and a test in tests/kernels/hopper.
"""
