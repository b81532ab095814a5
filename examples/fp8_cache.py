"""A cache in e4m3: half the memory of bfloat16.  Each KV head has scales, computed from its keys and its values.

python examples/fp8_cache.py
"""

import torch
from torch import Tensor

import paged_attn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 8, 2, 64, 16, 16
FP8 = torch.float8_e4m3fn


def scales_of(x: Tensor) -> Tensor:
    """Return scales [kv_heads] float32 for x [tokens, kv_heads, dims]: value = stored number * scale.

    The largest value of a head is stored as the largest fp8 number.
    """
    return x.abs().amax(dim=(0, 2)).float() / torch.finfo(FP8).max


def relative_error(out: Tensor, wanted: Tensor) -> float:
    return float((out.double() - wanted.double()).norm() / wanted.double().norm())


def main() -> None:
    torch.manual_seed(0)
    # Heads differ in magnitude, as those of models do.
    magnitude = torch.tensor([0.5, 2000.0], device=DEVICE)[:, None]
    seq_lens = torch.tensor([40, 21], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 40, 61], dtype=torch.int32, device=DEVICE)
    q = torch.randn(61, HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    k = torch.randn(61, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    v = (torch.randn(61, KV_HEADS, HEAD_DIM, device=DEVICE) * magnitude).bfloat16()

    page_table = torch.randperm(PAGES, dtype=torch.int32)[:6].view(2, 3).to(DEVICE)
    positions = paged_attn.positions(seq_lens, starts, tokens=61)
    slot_mapping = paged_attn.slots(page_table, positions, PAGE_SIZE, starts)

    outs, sizes = [], []
    for dtype, scales in (
        (torch.bfloat16, {}),
        (FP8, dict(k_scale=scales_of(k), v_scale=scales_of(v))),  # a scale for each KV head
        (FP8, dict(k_scale=1.0, v_scale=1.0)),  # one number for all heads; values beyond 448 are clamped
    ):
        shape = (PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        k_cache, v_cache = (torch.zeros(shape, device=DEVICE).to(dtype) for _ in "kv")
        paged_attn.write_kv(k, v, k_cache, v_cache, slot_mapping, **scales)
        outs.append(paged_attn.paged_attention(q, k_cache, v_cache, page_table, seq_lens, starts, **scales))
        sizes.append(k_cache.nbytes + v_cache.nbytes)

    calibrated, plain = (relative_error(out, outs[0]) for out in outs[1:])
    assert 2 * sizes[1] == sizes[0]
    # Rounding to e4m3 changes a number by up to 2^-4 of itself; the weighted sum averages these errors out.
    assert calibrated < 0.05
    assert plain > 0.2
    print(
        f"{sizes[1] >> 10} instead of {sizes[0] >> 10} KiB; off from bfloat16 by {calibrated:.1%}, "
        f"with scales of 1 by {plain:.1%}"
    )

    # Queries may be fp8, too.  Prefills on Hopper then multiply twice as fast.  The output keeps its 16 bits.
    q_scale = scales_of(q.view(61, KV_HEADS, -1, HEAD_DIM).flatten(2))
    stored = (q.view(61, KV_HEADS, -1) / q_scale[:, None]).view(q.shape).to(FP8)
    scales = dict(k_scale=scales_of(k), v_scale=scales_of(v))
    k_cache, v_cache = (torch.zeros(shape, device=DEVICE).to(FP8) for _ in "kv")
    paged_attn.write_kv(k, v, k_cache, v_cache, slot_mapping, **scales)
    out = torch.empty_like(q)
    paged_attn.paged_attention(
        stored, k_cache, v_cache, page_table, seq_lens, starts, q_scale=q_scale, out=out, **scales
    )
    error = relative_error(out, outs[0])
    assert error < 0.06
    print(f"with e4m3 queries as well {error:.1%}")


if __name__ == "__main__":
    main()
