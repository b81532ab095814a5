"""All kernels that a model's calls can reach, compiled ahead of time, with or without the device.

The folder imports api, arguments, calls, checks, launching, pages, planning and records.
A new argument that changes kernels is a field of Model and a kind of call in model.py.
"""
