"""Checks of arguments, of their shapes, dtypes, devices and memory, and the texts of errors.

This folder may import what planning may import, but neither planning nor calls: a check knows nothing of later stages.
A new argument is a row of arguments.py, the argument table.  A new question about all arguments is a new file.
"""
