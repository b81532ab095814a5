"""The arguments of write_qkv, and their check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..arguments import scales_slots
from .axes import NO_VALUES, Axes, Door
from .contents import check_write_contents
from .kernel_tensors import FLOAT, FP8, INT4, INTEGER, SAME
from .options import boolean, integer, kind, number, refused
from .overlap import no_overlap, same_elements, writable, written_scale
from .page_table import first_true

PACKED = "[tokens, (heads + 2 * kv_heads) * head_dim]"


class Projections(NamedTuple):
    """Arguments of write_qkv that are or may be tensors, in the order of a launch's slots."""

    q: Any  # the packed tensor, if k and v are None
    k: Any
    v: Any  # with v_cache = None: the latent; k is then the part of the keys that is rotated
    k_cache: Any
    v_cache: Any  # None: k_cache is a latent cache
    slot_mapping: Any
    positions: Any
    cos_sin: Any
    q_norm: Any
    k_norm: Any
    k_scale: Any
    v_scale: Any
    q_scale: Any
    q_out: Any  # None in a call: a new tensor; None in a launch: q, in place

    @property
    def packed(self) -> bool:
        return self.k is None

    @property
    def latent(self) -> bool:
        return self.v_cache is None


class Rotation(NamedTuple):
    """Arguments of write_qkv on the host."""

    kv_layout: Any
    interleaved: Any
    mrope_sections: Any
    eps: Any
    norm_offset: Any


def check_projections(given: Projections, options: Rotation) -> Axes:
    """Check all that the host knows about a call of write_qkv; returns the sizes of its axes.

    Axes.head_dim is the dims of queries: with v_cache = None rope_dim, and not the width of a key.
    """
    door = Door()
    _check_heads(door, given, options.kv_layout)
    sizes, dtype, last = door.sizes, given.q.dtype, "rope_dim" if given.latent else "head_dim"
    heads, head_dim = sizes["heads"], sizes[last]
    door.tensor("slot_mapping", given.slot_mapping, ("tokens",), INTEGER)
    _check_rotation(door, given, options, head_dim)
    _check_norms(door, given, options)
    writable("k_cache", given.k_cache)
    door.cache_scale("k_scale", given.k_scale, "k_cache", given.k_cache.dtype)
    read = {name: x for name, x in given._asdict().items() if name not in ("k_scale", "v_scale", "q_out")}
    if scales_slots(given.k_scale):
        written_scale("k_scale", given.k_scale, **read, v_scale=given.v_scale)
    if given.latent:
        if given.v_scale is not None:
            raise ValueError("v_scale must be None with v_cache = None, for values are the first dims of keys")
    else:
        writable("v_cache", given.v_cache)
        no_overlap("v_cache", given.v_cache, k_cache=given.k_cache)
        door.cache_scale("v_scale", given.v_scale, "v_cache", given.v_cache.dtype)
        if scales_slots(given.v_scale):
            written_scale("v_scale", given.v_scale, **read, k_scale=given.k_scale)
    if given.q_out is not None:
        door.tensor(
            "q_out", given.q_out, ("tokens", "heads", last), (dtype, *FP8), "qkv" if given.packed else "q", dtype
        )
        _check_apart(given, heads, head_dim)
    door.scale("q_scale", given.q_scale, "q_out", dtype if given.q_out is None else given.q_out.dtype)
    return Axes(
        sizes["tokens"],
        heads=heads,
        kv_heads=sizes["kv_heads"],
        head_dim=head_dim,
        value_dim=sizes["value_dim"],
        pages=sizes["pages"],
        page_size=sizes["page_size"],
        x=sizes.get("x", 0),
    )


def _check_heads(door: Door, given: Projections, kv_layout: Any) -> None:
    """Check queries, keys, values and caches against each other, and settle the sizes `heads` and `head_dim`."""
    sizes = door.sizes
    if given.packed:
        if given.latent:
            raise refused("qkv", "(q_rope, latent, k_rope) with v_cache = None", "one tensor")
        door.place("qkv", given.q, FLOAT)
        if given.q.ndim != 2:
            shape = f"{list(given.q.shape)}{': qkv.flatten(1)' if given.q.ndim == 3 else ''}"
            raise refused("qkv", f"{PACKED} or (q, k, v)", shape)
        door.tensor("qkv", given.q, ("tokens", "width"), FLOAT)
        if isinstance(given.k_cache, Tensor) and given.k_cache.ndim == 5:  # a 4-D cache settles head_dim
            sizes["head_dim"] = given.k_cache.shape[2] * given.k_cache.shape[4]
        door.caches(given.k_cache, given.v_cache, kv_layout, "qkv", given.q.dtype)
        sizes["heads"] = _heads_of(door)
        return
    q, k, v = ("q_rope", "k_rope", "latent") if given.latent else ("q", "k", "v")
    last = "rope_dim" if given.latent else "head_dim"
    door.tensor(q, given.q, ("tokens", "heads", last), FLOAT)
    dtype = given.q.dtype
    door.tensor(k, given.k, ("tokens", "kv_heads", last), SAME[dtype], q, dtype)
    door.tensor(v, given.v, ("tokens", "kv_heads", "value_dim"), SAME[dtype], q, dtype)
    if given.latent:
        if isinstance(given.k_cache, Tensor) and given.k_cache.ndim == 5:
            raise refused("k_cache", f"4-D with v_cache = None, in {kv_layout}", list(given.k_cache.shape))
        if isinstance(given.k_cache, Tensor) and given.k_cache.dtype == INT4:
            raise refused("v_cache", f"given over int4, {NO_VALUES}", None)
        sizes["head_dim"] = sizes["value_dim"] + sizes[last]
        door.latent(given.k_cache, None, kv_layout, q, dtype)
    else:
        door.caches(given.k_cache, given.v_cache, kv_layout, q, dtype)
    if sizes["heads"] < 1 or sizes["heads"] % sizes["kv_heads"]:
        raise door.wrong_heads(sizes["heads"])


def _heads_of(door: Door) -> int:
    """Number of query heads of a packed tensor: its width, less that of keys and values, divided by head_dim."""
    sizes = door.sizes
    kv_heads, head_dim, width = sizes["kv_heads"], sizes["head_dim"], sizes["width"]
    if sizes["value_dim"] != head_dim:
        raise refused("qkv", f"(q, k, v) with head_dim = {head_dim}, value_dim = {sizes['value_dim']}", "one tensor")
    heads, rest = divmod(width - 2 * kv_heads * head_dim, head_dim)
    if rest or heads < 1 or heads % kv_heads:
        wanted = f"heads a positive multiple of kv_heads = {kv_heads}, head_dim = {head_dim} from k_cache"
        shape = [sizes["tokens"], width]
        raise refused("qkv", f"{PACKED} with {wanted}", shape)
    return heads


def _check_rotation(door: Door, given: Projections, options: Rotation, head_dim: int) -> None:
    """Check interleaved, cos_sin, positions and mrope_sections."""
    boolean("interleaved", options.interleaved)
    positions, table, sections = given.positions, given.cos_sin, options.mrope_sections
    if table is None:
        for name, value in (("positions", positions), ("mrope_sections", sections)):
            if value is not None:
                raise ValueError(f"{name} must be None without cos_sin, for nothing is rotated")
        return
    door.tensor("cos_sin", table, ("tokens" if positions is None else "max_positions", "rotary_dim"), FLOAT)
    rotary_dim = door.sizes["rotary_dim"]
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        wanted = f"[max_positions, rotary_dim] with rotary_dim even and at most {head_dim}, the dims of q"
        raise refused("cos_sin", wanted, list(table.shape))
    if rotary_dim % 4 and given.k_cache.dtype == INT4 and not options.interleaved:
        wanted = "[max_positions, rotary_dim] with rotary_dim a multiple of 4 over int4, unless interleaved"
        raise refused("cos_sin", wanted, list(table.shape))
    if positions is not None:
        if sections is not None:
            door.sizes["sections"] = 3
        door.tensor("positions", positions, ("tokens",) if sections is None else ("sections", "tokens"), INTEGER)
        if not table.shape[0]:
            raise refused("cos_sin", "[max_positions, rotary_dim] with max_positions >= 1", list(table.shape))
    if sections is not None:
        _check_sections("mrope_sections", sections, rotary_dim // 2, positions)


def _check_sections(name: str, sections: Any, pairs: int, positions: Any) -> None:
    wanted = f"three ints >= 0 whose sum is rotary_dim / 2 = {pairs}"
    if not isinstance(sections, (tuple, list)):
        raise TypeError(f"{name} must be {wanted}, got {kind(sections)}")
    for i, size in enumerate(sections):
        integer(f"{name}[{i}]", size, 0, "an int")
    if len(sections) != 3 or sum(sections) != pairs:
        raise refused(name, wanted, list(sections))
    if positions is None:
        raise ValueError("mrope_sections needs positions [3, tokens]: without them, rows of cos_sin are of tokens")


def _check_norms(door: Door, given: Projections, options: Rotation) -> None:
    if given.latent and given.q_norm is not None:
        raise ValueError("q_norm must be None with v_cache = None: of latents k_norm is the only norm")
    for name, axis in (("q_norm", "head_dim"), ("k_norm", "value_dim" if given.latent else "head_dim")):
        if getattr(given, name) is not None:
            door.tensor(name, getattr(given, name), (axis,), FLOAT)
    number("eps", options.eps, "a finite number >= 0", 0)
    number("norm_offset", options.norm_offset, "a finite number")


def _check_apart(given: Projections, heads: int, head_dim: int) -> None:
    """Check that q_out is q itself, or shares no memory with any argument."""
    writable("q_out", given.q_out)
    own = given.q
    if given.packed:
        own = given.q[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    if not same_elements(given.q_out, own):
        no_overlap("q_out", given.q_out, **{"qkv" if given.packed else "q": given.q})
    others = {name: getattr(given, name) for name in Projections._fields if name not in ("q", "q_out")}
    no_overlap("q_out", given.q_out, **others)


def check_projection_contents(axes: Axes, given: Projections) -> None:
    """Check slots, and the positions of tokens that are written."""
    check_write_contents(axes, given.slot_mapping)
    if given.positions is None or not axes.tokens:
        return
    positions = given.positions.cpu().long().view(-1, axes.tokens)
    length = given.cos_sin.shape[0]
    wrong = (given.slot_mapping.cpu() >= 0) & ((positions < 0) | (positions >= length))
    for i in first_true(wrong.flatten()):
        section, token = divmod(i, axes.tokens)
        at = f"{token}" if given.positions.ndim == 1 else f"{section}, {token}"
        raise ValueError(f"positions[{at}] = {positions[section, token]}, but cos_sin has {length} rows")


def three(qkv: Sequence[Any]) -> Sequence[Any]:
    """Return a tuple or list of three tensors as it is.  None is refused, because in Projections None marks packing."""
    if len(qkv) != 3:
        raise refused("qkv", "one tensor or (q, k, v)", f"a tuple of {len(qkv)}")
    if qkv[0] is None or qkv[1] is None or qkv[2] is None:
        raise refused("qkv", "one tensor or (q, k, v)", "a tuple with None")
    return qkv


def packed_shape(qkv: Tensor, k_cache: Tensor, kv_layout: str) -> tuple[int, int, int]:
    """Shape of the queries of a packed tensor: [tokens, heads, head_dim].

    While torch traces a graph, no check has run yet, so tensors that give no shape are refused here.  Outside of a
    graph, the checks of the call say more.
    """
    packed = k_cache.ndim == 5
    if qkv.ndim != 2 or k_cache.ndim not in (4, 5):
        raise refused("qkv", f"{PACKED} beside a k_cache of 4 or 5 axes", f"{[*qkv.shape]}, {[*k_cache.shape]}")
    kv_heads = k_cache.shape[1] if packed or kv_layout == "HND" else k_cache.shape[2]
    head_dim = k_cache.shape[2] * k_cache.shape[4] if packed else k_cache.shape[3]
    if k_cache.dtype == INT4:
        head_dim *= 2
    heads = qkv.shape[1] // max(head_dim, 1) - 2 * kv_heads
    if heads < 1:
        raise refused("qkv", f"{PACKED} with kv_heads = {kv_heads}, head_dim = {head_dim}", [*qkv.shape])
    return qkv.shape[0], heads, head_dim


def unpacked(qkv: Tensor, k_cache: Tensor, kv_layout: str) -> Sequence[Tensor]:
    """Views of the queries, keys and values of a packed tensor, [tokens, heads or kv_heads, head_dim]."""
    _, heads, head_dim = packed_shape(qkv, k_cache, kv_layout)
    kv_heads = (qkv.shape[1] // head_dim - heads) // 2
    split: Sequence[Tensor] = qkv.unflatten(1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    return split
