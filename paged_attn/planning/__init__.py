"""The choice of a dialect for a call, the call's plan, and the steps of the plan.

The folder imports launching, records and kernels/shared_steps.py, and finds dialects by the names in dialects.py.
A new dialect is a name in DIALECTS.  A new rule for tiles or cuts belongs to its dialect.
"""
