"""One call from its arguments to its launches: attention, writes, merges, pages, and the cache of earlier calls.

The folder imports checks, planning and the folders below these, and from dialects only kernels of writes and pages.
A new public function is a function here; its specification goes to api.py, its steps to kernels/.
"""
