"""Adapters for hosts, programs that already run models.  An adapter imports its host only when asked."""
