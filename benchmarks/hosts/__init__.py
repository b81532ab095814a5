"""Hosts (vLLM, transformers) over this library and over their own attention.  Needs the host and a GPU."""
