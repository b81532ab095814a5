"""One call from its arguments to its launches: attention, writes, merges, and the memo of calls made before."""
