"""FlashAttention-3's own tests, from a checkout of its repository."""

from tests.suites import flash_attention

flash_attention.load("hopper/test_flash_attn.py", globals())
