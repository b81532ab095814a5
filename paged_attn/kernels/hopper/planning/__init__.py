"""The host's part of the Hopper kernels: which calls they cover, and the warpgroups, tiles and programs of launches.

The folder imports the portable plans and records but no kernel, so the folder works without Gluon.
A new refusal is a line of CONDITIONS in coverage.py, and a new rule for launches a row of regimes.py.
"""
