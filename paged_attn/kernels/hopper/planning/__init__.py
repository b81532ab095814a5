"""The host's part of the Hopper kernels: which calls they cover, and each launch's warpgroups, tiles, slots, programs.

The folder imports the portable plans and records, and no kernel, so it works without Gluon.
To refuse a call, add a line to CONDITIONS in coverage.py.  To choose launches by a new rule, add a row to regimes.py.
"""
