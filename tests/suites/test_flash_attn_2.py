"""FlashAttention-2's own tests, from a checkout of its repository."""

from tests.suites import flash_attention

flash_attention.load("tests/test_flash_attn.py", globals())
