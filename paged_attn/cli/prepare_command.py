"""`paged-attn prepare`: compile a model's kernels before the first request, also for another machine's GPU."""

from __future__ import annotations

from typing import Any

import click

from paged_attn.cli import command_options
from paged_attn.cli.command_options import FP8, HALF, positive, torch_dtype
from paged_attn.cli.printing import console, here, name_of, print_json
from paged_attn.launching import gpus


@click.command(cls=command_options.OfModel)
@command_options.of_model
@click.option("--out-dtype", type=command_options.Dtype(HALF + FP8), help="Of results.  [as --dtype; of fp8 bfloat16]")
@click.option("--sinks", type=command_options.Dtype(HALF), help="Of sinks, if there are any.")
@click.option("--gate", type=command_options.Dtype(HALF), help="Of the gate of results, if there is one.")
@click.option("--integers", type=click.Choice(["int32", "int64"]), default="int32", show_default=True)
@click.option("--page-stride", type=click.IntRange(0), default=0, help="Slots from page to page.  [as --page-size]")
@click.option("--page-indices", type=click.Choice(["int32", "int64"]), help="Indices of a ragged table.  [it is dense]")
@click.option("--qkv", type=click.Choice(["packed", "separate"]), help="Form of qkv in write_qkv.  [it is not called]")
@click.option("--rotary-dim", type=click.IntRange(0), help="Columns of cos_sin; 0: none.  [dims of q]")
@click.option("--interleaved", is_flag=True, help="Dims 2 i and 2 i + 1 are a pair of the rotary embedding (GPT-J).")
@click.option("--mrope-sections", type=(int, int, int), metavar="T H W", help="Pairs of dims of each section (mRoPE).")
@click.option("--cos-sin", type=command_options.Dtype(HALF), help="Of cosines and sines.  [as new keys]")
@click.option("--qk-norm", type=command_options.Dtype(HALF), help="Of weights of the norms, if there are any.")
@click.option("--pages", is_flag=True, help="Whole pages are copied, moved and gathered, too.")
@click.option("--max-seqs", type=positive, default=256, show_default=True, help="Sequences of a step, at most.")
@click.option("--max-tokens", type=positive, default=8192, show_default=True, help="Query tokens of a step.")
@click.option("--max-seqlen", type=positive, default=131072, show_default=True, help="Keys of a sequence.")
@click.option("--processes", type=positive, help="Processes that compile side by side.  [one a core]")
@click.option("--host", type=click.Choice(["vllm"]), help="Compile what this host's plug-in will ask for.")
@click.option("--drafts", type=click.IntRange(0), default=0, help="Draft tokens of a decode in that host.")
@command_options.device("GPU to compile for; this machine need not have it.  [this GPU]")
@command_options.as_json
def prepare(as_json: bool, **given: Any) -> None:
    """Compile all kernels that a model's calls can reach, side by side, into Triton's cache on disk."""
    command_options.check_heads(given["heads"], given["kv_heads"])
    if given["drafts"] and given["host"] is None:
        raise click.UsageError("--drafts are those of a host's decodes: name it by --host")
    import torch

    import paged_attn
    from paged_attn.checks.kernel_tensors import CACHE_FOR
    from paged_attn.checks.kernel_tensors import names as names_of
    from paged_attn.launching.platform import HAS_TRITON, INTERPRET, Device
    from paged_attn.preparation.score_mod_ref import named_by

    dtype = torch_dtype(given.pop("dtype"))
    names = {name: given.pop(name) for name in ("kv_dtype", "out_dtype", "sinks", "gate", "cos_sin", "qk_norm")}
    types = {name: None if value is None else torch_dtype(value) for name, value in names.items()}
    cache = types["kv_dtype"] or dtype
    if cache not in CACHE_FOR[dtype]:
        wanted = f"{names_of(CACHE_FOR[dtype])}, for --dtype is {names_of((dtype,))}"
        raise click.UsageError(f"--kv-dtype must be {wanted}, got {names_of((cache,))}")
    layout, name, indices = given.pop("layout"), given.pop("device"), given.pop("page_indices")
    command_options.check_packed(layout, given["head_dim"], cache)
    if not HAS_TRITON:
        raise click.UsageError("kernels are compiled by Triton, which is not installed here")
    if name is None and INTERPRET:
        raise click.UsageError("this machine has no GPU: name a --device to compile for, such as h200")
    try:
        score_mod = named_by(given.pop("score_mod"), given.pop("score_mod_args"))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    of_results = torch.float32 if given["shard"] else torch.bfloat16 if dtype.itemsize == 1 else dtype
    device = None if name is None else Device(*gpus.named(name))
    host, drafts = given.pop("host"), given.pop("drafts")
    told: dict[str, Any] = dict(
        dtype=dtype,
        cache_dtype=cache,
        out_dtype=types["out_dtype"] or of_results,
        sinks=types["sinks"],
        gate=types["gate"],
        cos_sin=types["cos_sin"],
        qk_norm=types["qk_norm"],
        kv_layout="x" if layout == "x-packed" else layout,
        score_mod=score_mod and score_mod.function,
        score_mod_args=score_mod.score_mod_args() if score_mod else (),
        window_size=given.pop("window"),
        return_lse=given.pop("lse"),
        integers=getattr(torch, given.pop("integers")),
        page_indices=getattr(torch, indices) if indices else None,
        **given,
    )
    if host is None:
        done = paged_attn.prepare(**told, device=device)
    else:
        from paged_attn.integrations.engine_kernels import prepare_for

        done = prepare_for(host, told, drafts, device)
    where = name_of(here()) if device is None else f"{device.arch}, {device.multiprocessors} multiprocessors"
    if as_json:
        print_json(dict(device=where, **done._asdict()))
    else:
        console(False).print(
            f"{done.kernels} kernels for {where}: {done.compiled} compiled now, in {done.seconds:.1f} s"
        )
