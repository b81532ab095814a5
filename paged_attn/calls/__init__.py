"""One call from its arguments to its launches: attention, writes, merges, and the memo of calls made before.

It imports checks, planning and what lies below these; of dialects only the portable one's kernel that writes.
A new public function is a file here; its specification goes to api.py, its steps to kernels/.
"""
