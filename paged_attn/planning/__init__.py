"""Which dialect takes a call, its plan, and the steps of that plan.

It imports records and kernels, but no dialect: these are found by their names in dialects.py.
A new dialect is a name in DIALECTS; a new rule for tiles or cuts belongs to the dialect that it is for.
"""
