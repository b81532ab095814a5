"""Adapters for hosts, which are programs that already run models.  Importing an adapter changes nothing in its host."""

# Adapters round max_seqlen_k up to a multiple of BUCKET, so that successive steps repeat kept calls.  A call of a new
# form is checked and planned, which takes the CPU about a hundred times as long as a kept call.
BUCKET = 1024
