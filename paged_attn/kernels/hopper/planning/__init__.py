"""What the Hopper kernels cover, and the warpgroups, tiles, slots and programs of each launch: the host's part.

It imports the portable plans and records, and no kernel: it is there without Gluon, too.
A call that is not covered is a line of CONDITIONS in coverage.py; a new rule is a row of regimes.py.
"""
