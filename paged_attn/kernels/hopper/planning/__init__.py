"""The host's part of the Hopper kernels: calls that they cover, and warpgroups, tiles, slots, programs of launches.

The folder imports the portable plans and records, and no kernel, so it works without Gluon.
A new refusal is a line of CONDITIONS in coverage.py, and a new rule for launches a row of regimes.py.
"""
