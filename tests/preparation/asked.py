"""The least that a host may ask for."""

from __future__ import annotations

from paged_attn.launching.platform import Device
from paged_attn.preparation.engine_steps import Served
from paged_attn.preparation.manifest import Asked
from paged_attn.preparation.model import Model
from tests.preparation.models import LLAMA

H200 = Device("sm90", 132)
TINY = Served(
    Model(**LLAMA | dict(heads=1, kv_heads=1, head_dim=16)), max_seqs=1, max_tokens=1, max_seqlen=16, decodes=True
)
ASKED = Asked((TINY,), H200, local=False)
