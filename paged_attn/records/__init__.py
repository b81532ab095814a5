"""Records that stages hand to each other: problems, plans, calls and layouts.

The folder imports kernels.common (records for the device), launching, arguments.py and strides.py, but no stage and no
dialect.  A new fact for the planner is a field of Problem.  A new cache layout is a set of strides in layout.py.
"""
