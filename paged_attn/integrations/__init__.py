"""Adapters for hosts, programs that already run models.  An adapter imports its host only when asked."""

# Adapters round a bound on keys up to a multiple of BUCKET keys, so that successive steps make few kinds of calls.  A
# call of a new kind is checked and planned, which takes the host some hundred times as long.
BUCKET = 1024
