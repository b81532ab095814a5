"""What may come in: each argument's shape, dtype, device and memory, and the words for what may not.

It may import what planning may, but neither planning nor calls: a check knows nothing of what follows.
A new argument is a line in argument_rows.py; a new kind of question to all of them is a file of its own.
"""
