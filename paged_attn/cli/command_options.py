"""Options that several verbs share: dtypes, devices, models, and JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from paged_attn.arguments import OF_MODELS, SCALES, Argument
from paged_attn.launching import gpus

if TYPE_CHECKING:
    import torch

HALF = ("float32", "float16", "bfloat16")
FP8 = ("e4m3", "e5m2")
LAYOUTS = ("NHD", "HND", "x-packed")
ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "e4m3"}
ALIASES |= {f"{prefix}{name}": name for prefix in ("fp8_", "float8_") for name in FP8} | {"float8_e4m3fn": "e4m3"}


class Dtype(click.Choice[str]):
    """A choice of dtypes, which also takes names that torch and engines have for them (ALIASES)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(ALIASES.get(value, value), param, ctx)


class DeviceName(click.ParamType):
    """Name of a device: one that gpus.py knows, or one of `others`.  This machine need not have the device."""

    name = "device"

    def __init__(self, *others: str) -> None:
        self.others = others

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            if value.lower() not in self.others:
                gpus.named(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        names = [*gpus.GPUS, *gpus.ARCHES, *self.others]
        return [CompletionItem(x) for x in names if x.startswith(incomplete)]


Decorated = Callable[[Callable[..., Any]], Callable[..., Any]]
positive = click.IntRange(1)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on standard output.")


def device(help: str, *others: str) -> Decorated:
    """The option --device NAME.  others: further names that are accepted."""
    names = ", ".join(["h200", "b200", "sm90", "sm90:132", *others])
    return click.option("--device", type=DeviceName(*others), metavar="NAME", help=f"{help}  {names} ...")


def option_of(argument: Argument) -> Decorated:
    """The option for a row of the table of arguments.  The check in this row decides the type of the option."""
    rule, *limits = argument.check
    name = f"--{argument.name.replace('_', '-')}"
    if rule == "boolean":
        return click.option(name, is_flag=True, default=argument.default, help=argument.help)
    if rule == "shard":
        ranges = (click.IntRange(0), click.IntRange(1), click.IntRange(1))
        return click.option(name, type=ranges, metavar="RANK WORLD STRIPE", help=argument.help)
    kind = click.IntRange(limits[0]) if rule == "integer" else click.FloatRange(limits[1])
    return click.option(name, type=kind, default=argument.default, help=argument.help)


# Options that describe the calls of a model, for all verbs that ask for a model.
MODEL: tuple[Decorated, ...] = (
    click.option("--heads", type=positive, default=32, show_default=True, help="Query heads."),
    click.option("--kv-heads", type=positive, default=8, show_default=True, help="Key and value heads."),
    click.option("--head-dim", type=click.IntRange(1, 576), default=128, show_default=True),
    click.option("--value-dim", type=click.IntRange(1, 512), help="Width of values and results.  [as --head-dim]"),
    click.option("--latent", is_flag=True, help="Values are the first dims of keys: v_cache is k_cache[..., :N]."),
    click.option("--page-size", type=positive, default=16, show_default=True, help="Tokens in a page."),
    click.option("--dtype", type=Dtype(HALF + FP8), default="bfloat16", show_default=True, help="Of queries."),
    click.option("--kv-dtype", type=Dtype((*HALF, *FP8, "int8", "int4")), help="Of the cache.  [as --dtype]"),
    click.option("--side-by-side", is_flag=True, help="Caches are cache[..., :HEAD_DIM] and cache[..., HEAD_DIM:]."),
    click.option("--layout", type=click.Choice(LAYOUTS), default="NHD", show_default=True, help="Of the cache."),
    click.option(
        "--window",
        type=(click.IntRange(-1), click.IntRange(-1)),
        default=(-1, -1),
        metavar="LEFT RIGHT",
        help='Keys seen before and after a query\'s own, -1 = all.  A "sliding window W" is W-1 -1.',
    ),
    click.option("--head-windows", is_flag=True, help="window_size is a tensor: a window for each query head."),
    click.option("--causal/--not-causal", default=True, show_default=True),
    click.option("--causal-seqs", is_flag=True, help="causal is a tensor: a flag for each sequence."),
    click.option("--prefix-lens", is_flag=True, help="prefix_lens are given."),
    click.option("--spans", type=click.IntRange(0), default=0, help="R of [seqs, R, 2] spans."),
    *(option_of(x) for x in OF_MODELS if x.help),
    click.option("--alibi", is_flag=True, help="alibi_slopes are given."),
    click.option("--qq-bias", type=click.IntRange(0), default=0, help="n of an [n, n] query-query bias."),
    click.option("--qq-mask", type=click.IntRange(0, 32), default=0, help="Words of 32 own keys of a qq_mask."),
    click.option("--query-positions", is_flag=True, help="query_positions are given."),
    click.option(
        "--scales", type=click.Choice(SCALES), default="number", show_default=True, help="Of fp8, int8 and int4."
    ),
    click.option("--token-scales", is_flag=True, help="q_scale is a tensor: a scale for each token."),
    click.option("--score-mod", help="A user's function: package.module:function."),
    click.option("--score-mod-args", default="", help="Its arguments: float32,37 is a tensor and a number."),
    click.option("--new", is_flag=True, help="k_new and v_new are given."),
    click.option("--lse", is_flag=True, help="return_lse."),
)


class OfModel(click.Command):
    """A verb with the options of `MODEL`.  If --window gets a single number, the error says which two to give."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            names = [getattr(error, "option_name", None), *getattr(getattr(error, "param", None), "opts", [])]
            left, right, *_ = [*given[given.index("--window") + 1 :], "", ""] if "--window" in given else ["", ""]
            if "--window" not in names or not left.isdecimal() or right.lstrip("-").isdecimal():
                raise
            told = f"{left}: --window {int(left) - 1} -1 is a sliding window of {left} keys"
            raise click.UsageError(f"--window must be LEFT RIGHT, two numbers, got {told}", ctx) from None


def of_model(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the options of `MODEL`, in their order."""
    for option in reversed(MODEL):
        verb = option(verb)
    return verb


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype for a name of `Dtype`; uint8 for int4."""
    import torch

    full = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "int4": "uint8"}.get(name, name)
    found: torch.dtype = getattr(torch, full)
    return found


def check_heads(heads: int, kv_heads: int) -> None:
    """Refuse a number of query heads that is no multiple of the number of KV heads."""
    if heads % kv_heads:
        raise click.UsageError(f"--heads must be a multiple of --kv-heads = {kv_heads}, got {heads}")


def check_packed(layout: str, head_dim: int, cache_dtype: torch.dtype) -> None:
    """Refuse x-packed caches whose heads are no multiple of 16 bytes."""
    x = 16 // cache_dtype.itemsize
    if layout == "x-packed" and head_dim % x:
        raise click.UsageError(f"x-packed {cache_dtype} wants a --head-dim divisible by {x}, got {head_dim}")
