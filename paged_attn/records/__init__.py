"""Records that stages hand to each other: problems, plans, calls and layouts.

The folder imports kernels.common (records that travel to the device), launching and arguments.py, but no stage and no
dialect.  Facts that the planner needs about a call are fields of Problem.  A new cache layout is strides in layout.py.
"""
