"""The argument table of paged_attention: a row for each argument, in the order of the signature.

The rows generate the records of a call, the form under which a call is kept, the operators, most checks, and the
options of the command whose rows have a help text.  Signatures that people read are written by hand.
tests/arguments/test_arguments.py and test_arguments_told.py compare each signature with the rows, and name the
arguments that the signature lacks.
"""

from __future__ import annotations

import json
from collections import namedtuple
from typing import Any, NamedTuple

REQUIRED: Any = object()
# The smallest normal float32 number.  Scales on the host are at least this; a smaller |softmax_scale| counts as 0.
TINY = 2.0**-126
# Kinds of arguments.
TENSOR = "tensor"
PART = "part"  # a tensor or None that callers pass within another argument (WITHIN)
SCALE = "scale"  # a tensor, a number on the host, or None
SEVERAL = "several"  # a tuple or list of tensors and numbers
RESULT = "result"  # a tensor; if None, the call allocates it
OPTION = "option"  # a value on the host
CHECK = "check"  # a value on the host that changes no plan, kernel or result

# Kinds of scales that prepare() and the command tell apart.
SCALES = ("number", "tensor", "per_head", "per_seq", "per_token", "per_token_float16")

# Reasons why prepare() has no keyword for an argument.
LENGTHS = "the batches that prepare() goes through have all lengths"
ALWAYS_SO = "prepare() takes its default"
NOTHING = "no kernel depends on it"


class Argument(NamedTuple):
    """A row of the argument table."""

    name: str
    kind: str
    default: Any
    schema: str | None  # type in torch's operator schemas; None: operators do not have the argument
    check: tuple[Any, ...]  # of an option: (name of a rule in checks/options.py, *its limits); (): checked elsewhere
    plan: tuple[str, ...]  # fields of Problem that the argument may change
    model: tuple[str, ...] | str  # fields of Model (keywords of prepare()) that describe it, or why there are none
    asked: tuple[str, ...]  # keywords of explain's question_of (options of the command) that describe it
    others: tuple[Any, ...] = ()  # of an option: values besides the default that tests try everywhere
    # Names of a tensor's axes, if the tensor is checked by its row.  Axes of one name have one size in a call.
    axes: tuple[str, ...] = ()
    dtypes: str = ""  # if `axes` are given: a key of KINDS in checks/argument_rows.py, or "beside scores"
    mods: tuple[str, ...] = ()  # fields of kernels/common/records.Modifiers that carry the argument
    bounds_left: bool = False  # whether the argument can move the lower bound of the keys that a query sees
    help: str = ""  # help text of the command's option; "": the option is defined by hand, or there is none


CACHE = ("page_size", "kv_heads", "compute", "cache", "packed", "pairable", "boxable", "rows_per_page", "adjacent")
ARGUMENTS = (
    Argument(
        "q", TENSOR, REQUIRED, "Tensor", (),
        ("tokens", "heads", "head_dim", "max_seqlen_q", "max_seqlen_k", "query", "compute", "pairable", "query_box",
         "value_dim"),
        ("heads", "head_dim", "dtype"), ("heads", "head_dim", "dtype", "queries"),
    ),
    Argument(
        "k_cache", TENSOR, REQUIRED, "Tensor", (), (*CACHE, "new_box", "max_seqlen_k"),
        ("kv_heads", "page_size", "cache_dtype", "side_by_side", "page_stride"),
        ("kv_heads", "page_size", "kv_dtype", "side_by_side"),
    ),
    Argument(
        "v_cache", TENSOR, REQUIRED, "Tensor", (),
        ("pairable", "boxable", "rows_per_page", "adjacent", "value_dim", "latent"),
        ("kv_heads", "page_size", "cache_dtype", "value_dim", "latent", "side_by_side", "page_stride"),
        ("kv_heads", "page_size", "kv_dtype", "value_dim", "latent", "side_by_side"),
    ),
    Argument(
        "page_table", TENSOR, REQUIRED, "Tensor", (), ("max_seqlen_k",), ("integers", "page_indices"), ("max_keys",)
    ),
    Argument("seq_lens", TENSOR, REQUIRED, "Tensor", (), ("seqs",), ("integers",), ("keys", "batch")),
    Argument("cu_seqlens_q", TENSOR, None, "Tensor?", (), ("ragged",), ("integers",), ("queries",)),
    Argument(
        "kv_layout", OPTION, "NHD", "str", ("choice", ("NHD", "HND")),
        ("page_size", "kv_heads", "pairable", "rows_per_page", "adjacent", "max_seqlen_k"), ("kv_layout",), ("layout",),
        others=("HND",),
    ),
    Argument(
        "max_seqlen_q", OPTION, None, "SymInt?", ("integer", 0), ("max_seqlen_q",), LENGTHS, ("max_queries",),
        others=(1,),
    ),
    Argument(
        "max_seqlen_k", OPTION, None, "SymInt?", ("integer", 0), ("max_seqlen_k",), LENGTHS, ("max_keys",), others=(7,)
    ),
    Argument(
        "shard", OPTION, None, "int[]?", ("shard",), ("max_seqlen_k", "window_left", "stripes"), ("shard",), ("shard",),
        others=((1, 2, 3), (0, 4, 16)), mods=("shard_rank",), bounds_left=True,
        help="Keys over ranks: this one, how many there are, positions of a stripe.",
    ),
    Argument("page_starts", PART, None, "Tensor?", (), ("max_seqlen_k",), ("page_indices",), ()),
    Argument(
        "k_new", TENSOR, None, "Tensor?", (), ("new", "new_box", "compute", "pairable", "max_seqlen_k"),
        ("new",), ("new",),
    ),
    Argument("v_new", TENSOR, None, "Tensor?", (), ("new_box", "latent"), ("new", "latent"), ("new", "latent")),
    Argument(
        "softmax_scale", OPTION, None, "float?", ("number", "a finite number or None"), ("positive",), ALWAYS_SO, (),
        others=(-0.5, 0.0, 0.5),
    ),
    Argument(
        "causal", OPTION, True, "bool", ("boolean", "True, False or a bool tensor"), (), ("causal",), ("causal",),
        others=(False,),
        mods=("right", "position_right"),
    ),
    Argument(
        "causal_seqs", PART, None, "Tensor?", (), (), ("causal_seqs",), ("causal_seqs",), axes=("seqs",), dtypes="bool",
        mods=("causal",),
    ),
    Argument(
        "window_size", OPTION, (-1, -1), "int[]", ("window",), ("window_left",), ("window_size",), ("window",),
        others=((5, -1), (-1, 5)),
        mods=("left",), bounds_left=True,
    ),
    Argument(
        "head_windows", PART, None, "Tensor?", (), ("head_windows",), ("head_windows",), ("head_windows",),
        axes=("heads", "2"), dtypes="integer",
        mods=("head_windows", "head_windows_stride", "BY_HEAD_TO_THE_RIGHT"), bounds_left=True,
    ),
    Argument(
        "prefix_lens", TENSOR, None, "Tensor?", (), ("prefix",), ("prefix_lens",), ("prefix_lens",),
        axes=("seqs",), dtypes="integer",
        mods=("prefix_lens",), bounds_left=True,
    ),
    Argument(
        "spans", TENSOR, None, "Tensor?", (), ("spans",), ("spans",), ("spans",),
        axes=("seqs", "R", "2"), dtypes="integer",
        mods=("spans", "spans_count", "spans_stride", "spans_step"), bounds_left=True,
    ),
    Argument(
        "clip_spans", OPTION, False, "bool", ("boolean",), (), ("clip_spans",), ("clip_spans",),
        others=(True,), help="The window and the chunk bound spans, too.",
        mods=("CLIP_SPANS", "spans_right"), bounds_left=True,
    ),
    Argument(
        "chunk", OPTION, None, "int?", ("integer", 1), ("window_left",), ("chunk",), ("chunk",),
        others=(100, 5), help="Chunked attention: positions of a chunk.",
        mods=("chunk",), bounds_left=True,
    ),
    Argument(
        "softcap", OPTION, 0.0, "float", ("number", "a finite number >= 0", 0), ("softcap",), ("softcap",),
        ("softcap",), others=(3.0,), help="Scores become N tanh(score / N); 0: off.",
        mods=("softcap",),
    ),
    Argument(
        "alibi_slopes", TENSOR, None, "Tensor?", (), ("alibi",), ("alibi",), ("alibi",),
        axes=("heads",), dtypes="float32",  # or [seqs, heads]
        mods=("alibi_slopes", "alibi_stride_seq"),
    ),
    Argument(
        "alibi_symmetric", OPTION, False, "bool", ("boolean",), (), ("alibi_symmetric",), ("alibi_symmetric",),
        others=(True,), mods=("ALIBI_SYMMETRIC",), help="ALiBi lowers scores of keys after a query, too.",
    ),
    Argument(
        "sinks", TENSOR, None, "Tensor?", (), (), ("sinks",), ("sinks",), axes=("heads",), dtypes="beside scores",
        mods=("sinks",),
    ),
    Argument(
        "qq_bias", TENSOR, None, "Tensor?", (), ("qq_bias",), ("qq_bias",), ("qq_bias",),
        axes=("n", "n"), dtypes="beside scores",  # or [seqs, n, n]
        mods=("qq_bias", "qq_bias_stride", "qq_bias_size", "qq_bias_stride_seq"),
    ),
    Argument(
        "qq_mask", TENSOR, None, "Tensor?", (), (), ("qq_mask",), ("qq_mask",),
        axes=("tokens", "words"), dtypes="int32", mods=("qq_mask", "qq_mask_stride", "qq_words"),
    ),
    Argument(
        "query_positions", TENSOR, None, "Tensor?", (), (), ("query_positions",), ("query_positions",),
        axes=("tokens",), dtypes="integer",
        mods=("query_positions",), bounds_left=True,
    ),
    Argument("score_mod", OPTION, None, None, (), ("score_mod",), ("score_mod",), ("score_mod",)),
    Argument(
        "score_mod_args", SEVERAL, (), None, (), ("score_mod",), ("score_mod",), ("score_mod_args",),
        mods=("score_mod_args",),
    ),
    Argument(
        "q_scale", SCALE, None, "Tensor?", (), ("token_scales",), ("scales", "token_scales"), ("token_scales",)
    ),
    Argument("k_scale", SCALE, None, "Tensor?", (), ("slot_scales",), ("scales",), ("scales",)),
    Argument("v_scale", SCALE, None, "Tensor?", (), ("slot_scales",), ("scales",), ("scales",)),
    Argument(
        "gate", TENSOR, None, "Tensor?", (), (), ("gate",), ("gate",),
        axes=("tokens", "heads", "value_dim"), dtypes="beside scores",
    ),
    Argument("out", RESULT, None, "Tensor(a!)", (), (), ("out_dtype",), ()),
    Argument("out_scale", SCALE, None, "Tensor?", (), (), ("scales",), ()),
    Argument("return_lse", OPTION, False, None, ("boolean",), ("lse",), ("return_lse",), ("lse",), others=(True,)),
    Argument(
        "only", OPTION, None, "str?", ("choice", (None, "decode", "prefill")), ("only",), ALWAYS_SO, (),
        others=("decode",),
    ),
    Argument(
        "batch_invariant", OPTION, False, "bool", ("boolean",), ("batch_invariant",), ("batch_invariant",),
        ("batch_invariant",), others=(True,), help="Results do not depend on the rest of the batch.",
    ),
    Argument("check", CHECK, None, "bool?", (), (), NOTHING, ()),
)  # fmt: skip

BY_NAME = {x.name: x for x in ARGUMENTS}


class Refused(NamedTuple):
    """Two arguments, of which at least one must have its default in every call."""

    argument: str
    beside: str
    message: str  # text of the error; names of options in braces stand for their values


REFUSED = (
    # New keys begin a tile of their own, so the tiles of a sequence would depend on where its cache ends.
    Refused(
        "k_new",
        "batch_invariant",
        "k_new must be None with batch_invariant = True, for results would depend on where the cache ends",
    ),
    Refused(
        "head_windows",
        "window_size",
        "window_size must be (-1, -1) beside head_windows, got {window_size}",
    ),
    # A call with a shard returns the result over the keys of one rank.  The result over all ranks is made later.
    Refused(
        "sinks",
        "shard",
        "sinks must be None with shard: give them to distributed.merge, where all ranks' keys are joined",
    ),
    Refused("gate", "shard", "gate must be None with shard: multiply what distributed.merge returns by it"),
    Refused("out_scale", "shard", "out_scale must be None with shard: scale what distributed.merge returns"),
    Refused(
        "k_new",
        "shard",
        "k_new must be None with shard: write the call's own keys into the caches of their ranks first",
    ),
    Refused(
        "batch_invariant",
        "shard",
        "batch_invariant must be False with shard: how keys are cut would depend on the ranks",
    ),
)
# Options whose values Model holds unchanged, in fields of the same names.  Model's kv_layout may also be "x", so
# kv_layout is not in this list.
OF_MODELS = [x for x in ARGUMENTS if x.kind == OPTION and x.model == (x.name,) and x.check[:1] not in ((), ("choice",))]
BY_ROWS = [x for x in ARGUMENTS if x.axes]  # tensors that are checked by their rows
# Fields of Modifiers that carry the arguments with bounds_left.
LEFT = tuple(field for x in ARGUMENTS if x.bounds_left for field in x.mods)
# The argument in which callers pass each PART.
WITHIN = {"page_starts": "page_table", "causal_seqs": "causal", "head_windows": "window_size"}
INSTEAD: dict[str, Any] = {"causal_seqs": False, "head_windows": (-1, -1)}  # value of the option if the PART is given
PLACES = [x.name for x in ARGUMENTS[: list(BY_NAME).index("kv_layout")]]  # positional arguments


def of_kind(*kinds: str) -> list[str]:
    """Names of the arguments of these kinds, in the order of the table."""
    return [x.name for x in ARGUMENTS if x.kind in kinds]


def _record(name: str, fields: list[str]) -> Any:
    made: Any = namedtuple  # hidden from mypy, which does not know the field names
    return made(name, fields)


class Tensors(_record("Tensors", [*of_kind(TENSOR, PART, SCALE), *of_kind(SEVERAL, RESULT)])):  # type: ignore[misc]
    """Arguments of a call that are or may be tensors, in the order of a launch's slots.

    Each of score_mod_args has its own slot.  out is last, because the call may allocate it.  The slot of the
    log-sum-exp, which is no argument, follows.
    """

    __slots__ = ()

    @property
    def slots(self) -> tuple[Any, ...]:
        """One value for each slot, except that of the log-sum-exp."""
        return (*self[:BEHIND], *(self.score_mod_args or ()), self.out)

    @classmethod
    def of_slots(cls, held: list[Any]) -> Tensors:
        """Inverse of `slots`."""
        made: Tensors = cls._make((*held[:BEHIND], tuple(held[BEHIND:-1]), held[-1]))
        return made


class Options(_record("Options", of_kind(OPTION))):  # type: ignore[misc]
    """Arguments of a call that are values on the host.  `check` is none of them, because it changes no result."""

    __slots__ = ()


BEHIND = Tensors._fields.index("score_mod_args")  # number of fields before score_mod_args


def table_parts(given: Any) -> tuple[Any, Any]:
    """(page_table, page_starts) from the argument page_table: a tensor, or the pair (indptr, indices)."""
    if isinstance(given, (tuple, list)) and len(given) == 2 and given[0] is not None:
        return given[1], given[0]
    return given, None


def scales_tokens(q_scale: Any, q: Any) -> bool:
    """Whether q_scale has a number for each token.

    For queries that are not fp8, a q_scale with axes is always by token.  For fp8 queries, q_scale may also be a
    descale.  It is by token only if it is [tokens, 1] or [tokens, kv_heads] with tokens > 1, and the stride of its
    first axis is not 0.  Its rows then belong to tokens even if there are as many sequences as tokens.
    """
    if q_scale is None or isinstance(q_scale, (int, float)) or q_scale.ndim == 0:
        return False
    if q.dtype.itemsize > 1:
        return True
    return bool(q_scale.ndim == 2 and q_scale.shape[0] == q.shape[0] > 1 and q_scale.stride(0) != 0)


def scales_slots(scale: Any) -> bool:
    """Whether k_scale or v_scale has a number for each slot and KV head of the cache: it has three axes."""
    return getattr(scale, "ndim", 0) == 3


def bound(given: dict[str, Any]) -> tuple[Tensors, Options]:
    """(Tensors, Options) of a call from its keywords, with defaults for missing ones."""
    values = {x.name: x.default for x in ARGUMENTS if x.default is not REQUIRED} | given
    values["page_table"], values["page_starts"] = table_parts(values["page_table"])
    for part, option in INSTEAD.items():
        if hasattr(values[WITHIN[part]], "dtype"):
            values[WITHIN[part]], values[part] = option, values[WITHIN[part]]
    tensors = Tensors(**{name: values.pop(name) for name in Tensors._fields})
    for name in of_kind(CHECK):
        values.pop(name)
    return tensors, Options(**values)


def schema() -> str:
    """The arguments in an operator's schema.  An operator is always given `out`."""
    places = [f"{BY_NAME[name].schema} {name}" for name in (*PLACES, "out")]
    named = [
        f"{x.schema} {x.name}={_written(x.default)}"
        for x in ARGUMENTS
        if x.schema is not None and x.name not in (*PLACES, "out")
    ]
    return f"({', '.join([*places, '*', *named])})"


def _written(default: Any) -> str:
    """A default as text in a schema."""
    if isinstance(default, str):
        return json.dumps(default)
    return str(list(default) if isinstance(default, tuple) else default)
