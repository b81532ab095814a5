"""What stages hand to one another: problems, plans, calls, layouts; records of fields, and arithmetic over them.

It imports kernels.common, whose records travel to the device, launching, and arguments.py; no stage and no dialect.
What the planner has to know of a call is a field of Problem; a new cache layout is strides in layout.py.
"""
