"""What a call with known lengths will do, and its least cost, in words.

The folder imports arguments, calls, checks, kernels, launching, planning, preparation and records.
A new line of text belongs to launches.py or explain.py; facts that only a dialect knows are functions of Dialect.
"""
