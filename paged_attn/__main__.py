"""`python -m paged_attn`: the `paged-attn` command."""

from paged_attn.cli import main

main(prog_name="paged-attn")
