"""What the calls of a model have in common."""

from __future__ import annotations

import inspect

import paged_attn
from paged_attn.preparation.model import Model


def test_a_model_is_without_a_word_what_prepare_takes_it_for() -> None:
    parameters = inspect.signature(paged_attn.prepare).parameters
    defaults = {name: parameters[name].default for name in Model._fields}
    sizes = {"heads", "kv_heads", "head_dim", "page_size", "dtype", "cache_dtype", "out_dtype"}
    assert Model._fields[: len(sizes)] == tuple(x for x in Model._fields if x in sizes)
    assert Model._field_defaults == {name: x for name, x in defaults.items() if name not in sizes}
