"""Inline assembly, a module for each thing that it is for; each shows one text as its f-strings make it.

It may import the shim alone.
A new instruction goes where its kind is, with a test of its own beside those of the others.
"""
