"""One call from its arguments to its launches: attention, writes, merges, and the cache of earlier calls.

The folder imports checks, planning and the folders below these.  From dialects, it imports only write_kv's kernel.
A new public function is a function here; its specification goes to api.py, its steps to kernels/.
"""
