"""What a call with known lengths will do, and its least cost, in words.

The folder imports planning, preparation and records, and asks dialects about launches through planning/dialects.py.
A new line belongs to launches.py or explain.py; facts that only a dialect knows are functions of Dialect.
"""
