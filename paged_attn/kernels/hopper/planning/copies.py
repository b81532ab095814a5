"""Pages that cannot be cut into boxes: whether a call's keys are copied into whole ones first."""

from typing import Annotated

from ....records.copies import Copies, copies_of
from ....records.problem import Problem
from ....records.regime import Threshold
from .shapes import in_boxes, is_decode

_TIMES = "the portable kernels take twice as long for products as these"
MIN_SCORES_PER_COPIED_KEY: Annotated[
    int,
    Threshold(
        "scores of a KV head for each key that is copied",
        f"{_TIMES}, and 8 keys of 128 dims and their values are read and written in 2 ns",
        "4 x 128 at 8192 (512) over pages of 4 177 -> 165 us, 4 x 256 345 -> 249",
    ),
] = 512
MIN_SCORES_WORTH_A_COPY: Annotated[
    int,
    Threshold("scores of all heads", f"a launch more takes 2 to 3 us; {_TIMES}", "1 x 512 (8 x 2^20) 20.4 -> 18.9 us"),
] = 8 << 20
MAX_BYTES_OF_COPIES: Annotated[
    int,
    Threshold(
        "bytes of whole pages, for as many keys of each sequence as the bounds allow",
        "engines leave a tenth of a GPU's memory to what is no cache, 8 GB of the smallest, and a graph keeps its own; "
        "of 8 heads of 128 dims this is 262144 keys",
        "not measured",
    ),
] = 1 << 30


def copies(p: Problem) -> Copies | None:
    """Whole pages that a call's keys are worth copying to, where its own are none of boxes."""
    found = copies_of(p)
    return found if _can_be_copied(p) and _is_worth_a_copy(p) and found.bytes <= MAX_BYTES_OF_COPIES else None


def _can_be_copied(p: Problem) -> bool:
    """Whether nothing but the size of pages is in the way.

    What is worth it depends on the batch, which must not choose the kernels of a call of `batch_invariant`.  Copies are
    of all heads at once, from pages of which some may be gone where windows are by head.
    """
    return not (in_boxes(p) or p.packed or p.latent or p.batch_invariant or is_decode(p) or p.head_windows)


def _is_worth_a_copy(p: Problem) -> bool:
    """Whether scores are so many for each key that a copy takes less than they save.

    Where most sequences may be decodes, long queries are sure to see as many keys as they are, and no more.
    """
    most, copied = p.keys_seen(1), p.seqs * p.keys_seen(p.max_seqlen_q)
    seen = most if 2 * p.tokens >= p.seqs * p.max_seqlen_q else min(most, p.max_seqlen_q)
    scores = p.tokens * p.heads * seen
    return scores >= max(MIN_SCORES_WORTH_A_COPY, MIN_SCORES_PER_COPIED_KEY * copied * p.kv_heads)
