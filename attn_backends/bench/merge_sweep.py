"""Launch shapes of our merge kernels against each other and FlashInfer's: a part of ``merge``.

Words in names: ``spec`` loads vectors before the weights are known, ``skip`` afterwards and only
those of weight above 0; ``pdl`` lets a kernel start while the one ahead still runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from ..merge import cuda_merge, triton_merge
from .merge import DTYPES, Case, Maker, make_states, oracle
from .merge_peers import PEERS, PairInputs, flashinfer_states
from .runner import Call

ALWAYS, NEVER = 1 << 62, -1
_WORDS = {True: "spec", False: "skip"}


def _cuda_tunings(states: int) -> dict[str, cuda_merge.Tuning]:
    found = {}
    for threads, unroll, spec, pdl in itertools.product((64, 128, 256), (1, 2), _WORDS, _WORDS):
        if unroll > 1 and (states > 2 or threads != 128):
            continue
        name = f"cuda[{threads}x{unroll} {_WORDS[spec]}{' pdl' if pdl else ''}"
        shape = cuda_merge.Tuning(
            threads, unroll, ALWAYS if spec else NEVER, pdl=pdl, large_from=ALWAYS
        )
        if states <= cuda_merge.MOST_BATCH:
            found[name + "]"] = shape
            continue
        for split in (1, 4, 8):
            found[f"{name} split{split}]"] = shape._replace(split=split, split_limit=ALWAYS)
    return found


def _triton_tunings() -> dict[str, triton_merge.Tuning]:
    found = {}
    for warps, vectors, spec, pdl in itertools.product((4, 8), (1, 2), _WORDS, _WORDS):
        if warps == 8 and vectors == 2:
            continue
        name = f"triton[{warps} warps x{vectors} {_WORDS[spec]}{' pdl' if pdl else ''}]"
        found[name] = triton_merge.Tuning(warps, vectors, ALWAYS if spec else NEVER, pdl)
    return found


def shipped_pair(size: int) -> dict[str, str]:
    """Names in the sweep of the launch shapes that merge an output of ``size`` bytes, by path."""
    cuda, triton = cuda_merge.TUNING, triton_merge.TUNING
    when = _WORDS[size <= cuda.small_limit] + " pdl" * cuda.pdl
    then = _WORDS[size <= triton.small_limit] + " pdl" * triton.pdl
    return {
        f"cuda[{cuda.pair_threads(size)}x{cuda.unroll} {when}]": "cuda",
        f"triton[{triton.warps} warps x{triton.vectors} {then}]": "triton",
    }


def pair_sweep(case: Case) -> tuple[dict[str, Maker], torch.Tensor]:
    """Launch shapes of the two-way kernels."""
    o, lse = make_states(case)
    out_o, out_lse = torch.empty_like(o[0]), torch.empty_like(lse[0])
    six = (o[0, 0], lse[0, 0], o[1, 0], lse[1, 0], out_o[0], out_lse[0])
    dtype = DTYPES[case.dtype]

    def through(run: Callable[..., Any]) -> Call:
        def call(i: int) -> Any:
            tensors = (o[0, i], lse[0, i], o[1, i], lse[1, i], out_o[i], out_lse[i])
            run(*(x.data_ptr() for x in tensors), -1, None, False)
            return out_o[i], out_lse[i]

        return call

    makers: dict[str, Maker] = {}
    for name, shape in _cuda_tunings(2).items():
        makers[name] = lambda s=shape: through(cuda_merge.prepare_pair(*six, dtype, s))  # type: ignore
    for name, form in _triton_tunings().items():
        makers[name] = lambda s=form: through(triton_merge.prepare_pair(*six, dtype, True, s))  # type: ignore
    makers["flashinfer"] = lambda: PEERS["flashinfer"](
        PairInputs(o[0], lse[0], o[1], lse[1], out_o, out_lse)
    )
    return makers, oracle([(o[0, 0], lse[0, 0]), (o[1, 0], lse[1, 0])])


def many_sweep(case: Case) -> tuple[dict[str, Maker], torch.Tensor]:
    """Launch shapes of the n-way kernels, on stacked states."""
    o, lse = make_states(case)
    o, lse = o.transpose(0, 1).contiguous(), lse.transpose(0, 1).contiguous()
    out_o, out_lse = torch.empty_like(o[:, 0]), torch.empty_like(lse[:, 0])
    layouts = (o[0], lse[0], None, out_o[0], out_lse[0], DTYPES[case.dtype])

    def through(run: Callable[..., Any]) -> Call:
        def call(i: int) -> Any:
            run(o[i], lse[i], None, out_o[i], out_lse[i])
            return out_o[i], out_lse[i]

        return call

    makers: dict[str, Maker] = {}
    for name, shape in _cuda_tunings(case.states).items():
        makers[name] = lambda s=shape: through(cuda_merge.prepare_stacked(*layouts, s))  # type: ignore
    for pdl in (True, False):
        form = triton_merge.Tuning(pdl=pdl)
        makers[f"triton[{'pdl' if pdl else ''}]"] = lambda s=form: (  # type: ignore
            through(triton_merge.prepare_stacked(*layouts, True, s))
        )
    makers["flashinfer"] = lambda: flashinfer_states(o, lse)
    return makers, oracle(list(zip(o[0], lse[0])))


__all__ = ["many_sweep", "pair_sweep"]
