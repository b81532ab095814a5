"""What a call will do and cost at best, in words, for lengths that are known.

It imports planning, preparation and records, and asks a dialect about its launches through planning/dialects.py.
A new line is one in explain.py; what only a dialect can say is a function of the interface.
"""
