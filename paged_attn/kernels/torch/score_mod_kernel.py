"""The one kernel of this dialect, for functions under @triton.jit: it is interpreted, and imported by these alone."""

import triton.language as tl


def apply_score_mod(
    scores, query_pos, heads, key_pos, rows, keys, args, SCORE_MOD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Replace scores [rows, keys] by what a function makes of them, ROWS a program."""
    row, key = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS)
    live = (row < rows)[:, None] & (key < keys)[None, :]
    row, key = tl.minimum(row, rows - 1), tl.minimum(key, keys - 1)  # the function is asked of what is there only
    at = scores + row[:, None] * keys + key[None, :]
    query, head = tl.load(query_pos + row)[:, None], tl.load(heads + row)[:, None]
    new = SCORE_MOD(tl.load(at), query, tl.load(key_pos + key)[None, :], head, *args)
    tl.store(at, new.to(tl.float32), mask=live)
