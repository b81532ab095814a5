"""The host's part of the Hopper kernels: which calls they cover, and each launch's warpgroups, tiles, slots, programs.

The folder imports the portable plans and records, and no kernel, so it works without Gluon.
A new refusal is a line of CONDITIONS in coverage.py, and a new rule for launches a row of regimes.py.
"""
