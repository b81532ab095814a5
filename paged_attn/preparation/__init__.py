"""All kernels that a model's calls can reach, compiled ahead of time, with or without the device.

The folder imports arguments, api, calls, checks, launching, pages and records, and dialects by planning/dialects.py.
A new argument that changes kernels is a field of Model and a kind of call in model.py.
"""
