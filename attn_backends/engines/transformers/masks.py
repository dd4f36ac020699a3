"""What each sequence may see, read from transformers' mask rules as lengths instead of a matrix.

transformers describes a mask by a rule (causal, sliding, bidirectional or anything composed of
them), offsets of the queries and keys, and a padding mask ``[B, columns]``. For the common rules
this is a question of lengths: which keys of a sequence are real, and where its queries end. A
``LazyMask`` carries those lengths to the attention function, and becomes the dense ``[B, 1, Sq,
Skv]`` mask of transformers itself as soon as anything else touches it, so that a model which cuts
or combines masks still gets what it expects. Rules that lengths cannot say are dense at once.

Rows of padding queries see no key, and give zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...batch import Batch
from ...errors import Reason, UnsupportedCallError
from ...spec import Window


@dataclass(frozen=True)
class Rule:
    """A mask rule that lengths can express.

    Attributes:
        causal: Keys after the query are hidden.
        left: Keys further back than this are hidden; None is unbounded.
        right: The same forwards.
    """

    causal: bool
    left: int | None = None
    right: int | None = None

    @property
    def window(self) -> Window | None:
        """The window in the form of ``AttentionSpec``."""
        right = 0 if self.causal else self.right
        return None if self.left is None and right in (None, 0) else (self.left, right)


@dataclass(frozen=True)
class Lengths:
    """The sequences of one attention call, in order of their query rows.

    Attributes:
        q_lens: Query rows of each sequence; they add up to B * Sq.
        kv_lens: Visible keys of each sequence.
        kv_begins: Batch entry and key column where they begin, ``(b, column)`` each.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    kv_begins: tuple[tuple[int, int], ...]

    @classmethod
    def full(cls, batch: int, q_len: int, kv_len: int) -> Lengths:
        """Every query row and every key is real."""
        begins = tuple((b, 0) for b in range(batch))
        return cls((q_len,) * batch, (kv_len,) * batch, begins)

    @property
    def max_q_len(self) -> int:
        """Query rows of the longest sequence."""
        return max(self.q_lens, default=0)

    @property
    def first_row(self) -> int:
        """Key row where the first sequence begins; a batch counts from there."""
        return self.kv_begins[0][1] if self.kv_begins else 0

    def batch(self, step: int, device: torch.device) -> Batch:
        """The batch, for key rows that lie ``step`` apart from one batch entry to the next."""
        begins = [b * step + column - self.first_row for b, column in self.kv_begins]
        starts = [*begins, begins[-1] + self.kv_lens[-1] if begins else 0]
        return Batch.from_lengths(self.q_lens, self.kv_lens, cu_seqlens_k=starts, device=device)


class LazyMask(torch.Tensor):
    """A bool mask ``[B, 1, Sq, Skv]`` that is only formed if something reads it.

    Once formed, it may have been changed through a view, so the lengths no longer speak for it.

    Attributes:
        rule: What hides keys beside padding.
        lengths: The lengths that replace the mask; None once it has been formed.
        padded: Whether padding hides a key or a query.
    """

    rule: Rule
    lengths: Lengths | None
    padded: bool
    _form: Callable[[], torch.Tensor]
    _formed: torch.Tensor | None

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        shape: tuple[int, ...],
        device: torch.device | str,
        rule: Rule,
        lengths: Lengths,
        padded: bool,
        form: Callable[[], torch.Tensor],
    ) -> LazyMask:
        where = torch.device(device)
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=where
        )
        mask.rule, mask.lengths, mask.padded = rule, lengths, padded
        mask._form, mask._formed = form, None
        return mask

    def __init__(self, *args: Any) -> None:
        super().__init__()

    # Python-level overrides are off: every operation arrives below, as an aten function.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
            return args[0]._moved(func, kwargs)
        args, kwargs = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs))
        return func(*args, **kwargs)

    def _moved(self, copy: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """A copy elsewhere, as layers on several devices ask for; it may stay unformed."""
        if self.lengths is None:
            moved: torch.Tensor = copy(self.dense(), **kwargs)
            return moved
        where = kwargs.get("device") or self.device
        form = lambda: copy(self._form(), **kwargs)  # noqa: E731
        return LazyMask(tuple(self.shape), where, self.rule, self.lengths, self.padded, form)

    def dense(self) -> torch.Tensor:
        """The mask itself, bool ``[B, 1, Sq, Skv]``, formed on the first call."""
        if self._formed is None:
            self._formed = self._form()
            self.lengths = None
        return self._formed

    def __repr__(self) -> str:  # type: ignore[override]
        what = "formed" if self.lengths is None else f"{self.rule}, {self.lengths}"
        return f"LazyMask({list(self.shape)}, {what})"


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor:
    """The mask function that is registered with transformers.

    Never None: a mask of None would leave a cache that is longer than its sequence without its
    true length. Reads the padding mask once (one sync per mask and step), as transformers does.

    Args:
        batch_size: B.
        q_length: Sq, query columns of this step.
        kv_length: Skv, key columns, including cache slots that are not filled yet.
        q_offset: Position of the first query.
        kv_offset: Position of the first key; above 0 for a cache that has dropped old keys.
        mask_function: transformers' rule ``(b, h, q, k) -> bool``; None is causal.
        attention_mask: Padding, bool ``[B, positions]``, True = real; missing columns are padding.
        allow_is_causal_skip: Not used: nothing is skipped.
        allow_is_bidirectional_skip: Not used.
        device: Where the mask is used.
        **kwargs: The rest, for the dense mask.

    Returns:
        A ``LazyMask`` where lengths can say it all, else a bool mask ``[B, 1, Sq, Skv]``.

    Raises:
        UnsupportedCallError: A sliding window of fewer than one token.
    """
    from transformers import masking_utils

    function = mask_function or masking_utils.causal_mask_function
    sdpa_mask: Callable[..., Any] = masking_utils.sdpa_mask

    def form() -> torch.Tensor:
        mask: torch.Tensor = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            device=device,
            **kwargs,
        )
        return mask

    rule = None if torch.compiler.is_compiling() else read_rule(function)
    if rule is None or (attention_mask is not None and attention_mask.dim() != 2):
        return form()
    spans = _real_spans(
        attention_mask, batch_size, int(q_offset) + q_length, kv_length, kv_offset, rule
    )
    if spans is None:
        return form()
    lengths = _lengths(spans, q_length, int(q_offset), kv_offset, rule)
    if lengths is None:
        return form()
    whole = Lengths.full(batch_size, q_length, lengths.kv_lens[0] if lengths.kv_lens else 0)
    shape = (batch_size, 1, q_length, kv_length)
    return LazyMask(shape, device, rule, lengths, lengths != whole, form)


def _real_spans(
    padding: torch.Tensor | None,
    batch: int,
    q_end: int,
    kv_length: int,
    kv_offset: int,
    rule: Rule,
) -> list[tuple[int, int]] | None:
    """First and last + 1 position of each entry's real keys; None if some are not contiguous."""
    end = kv_offset + kv_length
    if rule.causal:  # what no query reaches need not be real: it may be unfilled cache
        end = min(end, q_end)
    if padding is None:
        return [(kv_offset, max(end, kv_offset))] * batch
    seen = padding[:, kv_offset:end].int()  # [B, columns]
    if seen.shape[1] == 0:
        return [(kv_offset, kv_offset)] * batch
    behind = seen.flip(1).argmax(1)
    facts = torch.stack([seen.argmax(1), behind, seen.sum(1)]).tolist()  # the only sync
    spans = []
    for first, after, count in zip(*facts):
        if count == 0:
            spans.append((kv_offset, kv_offset))
        elif first + count + after == seen.shape[1]:
            spans.append((kv_offset + first, kv_offset + first + count))
        else:
            return None
    if len(spans) == 1:
        return spans * batch
    return spans if len(spans) == batch else None


def _lengths(
    spans: list[tuple[int, int]], q_len: int, q_begin: int, kv_offset: int, rule: Rule
) -> Lengths | None:
    """Lengths whose bottom-right alignment puts every query at its position; None if none do."""
    if rule.causal or rule.window is not None:
        aligned: list[tuple[int, int, tuple[int, int]]] = []
        for b, (begin, end) in enumerate(spans):
            # The last real key and the last real query of an entry are the same token. Queries
            # after it are padding on the right: a sequence of their own, without keys.
            real = min(max(end - q_begin, 0), q_len)
            if end > q_begin + q_len:
                return None
            if real:
                aligned.append((real, end - begin, (b, begin - kv_offset)))
            if real < q_len:
                aligned.append((q_len - real, 0, (b, max(end, begin) - kv_offset)))
        q_lens, kv_lens, begins = zip(*aligned) if aligned else ((), (), ())
        return Lengths(q_lens, kv_lens, begins)
    return Lengths(
        (q_len,) * len(spans),
        tuple(end - begin for begin, end in spans),
        tuple((b, begin - kv_offset) for b, (begin, _) in enumerate(spans)),
    )


def read_rule(function: Callable[..., Any]) -> Rule | None:
    """Recognise one of transformers' own rules, or an intersection of them; else None.

    Raises:
        UnsupportedCallError: A sliding window of fewer than one token.
    """
    causal, left, right = False, None, None
    for part in _parts(function):
        bounds = _bounds(part)
        if bounds is None:
            return None
        causal |= bounds[0]
        left = _tighter(left, bounds[1])
        right = _tighter(right, bounds[2])
    return Rule(causal, left, right)


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _parts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The rules that ``function`` intersects, or itself."""
    from transformers import masking_utils as utils

    if _made_by(function, utils.and_masks, utils.causal_mask_function):
        for part in _cells(function)["mask_functions"]:
            yield from _parts(part)
    else:
        yield function


def _bounds(part: Callable[..., Any]) -> tuple[bool, int | None, int | None] | None:
    from transformers import masking_utils as utils

    if part is utils.causal_mask_function:
        return True, None, None
    if part is utils.bidirectional_mask_function:
        return False, None, None
    if _made_by(part, utils.sliding_window_overlay, 1):
        return False, check_sliding_window(_cells(part)["sliding_window"]) - 1, None
    if _made_by(part, utils.sliding_window_bidirectional_overlay, 1):
        reach = int(_cells(part)["sliding_window"])
        return False, reach, reach
    return None


def _made_by(function: Any, factory: Callable[..., Any], sample: Any) -> bool:
    """Whether ``function`` is a closure out of ``factory``: they share its code."""
    code = getattr(function, "__code__", None)
    return code is not None and code is factory(sample).__code__


def _cells(function: Any) -> dict[str, Any]:
    return dict(
        zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()))
    )


def check_sliding_window(tokens: Any) -> int:
    """A window of W tokens, the query's own included; W < 1 is refused."""
    if int(tokens) < 1:
        fix = "a window of W tokens holds the query's own; None means no window"
        reason = Reason("sliding_window", str(tokens), ">= 1", fix)
        raise UnsupportedCallError(f"attention mask: {reason}", reasons=[reason])
    return int(tokens)


__all__ = ["LazyMask", "Lengths", "Rule", "check_sliding_window", "mask_function", "read_rule"]
