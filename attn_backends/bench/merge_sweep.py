"""Launch shapes of our merge kernels against each other and FlashInfer's: a part of ``merge``.

Words in names: ``pdl`` lets a kernel start while the one ahead still runs, ``fetch`` lets it bring
to L2 meanwhile what the LSEs call for, ``ahead`` brings LSEs there for later blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..merge import cuda_merge, triton_merge
from .merge import DTYPES, Case, Maker, make_states, oracle
from .merge_peers import PEERS, PairInputs, flashinfer_states
from .runner import Call

ALWAYS = 1 << 62


def cuda_name(shape: cuda_merge.Tuning, size: int) -> str:
    """What the sweep calls a shape for outputs of ``size`` bytes."""
    name = f"cuda[{shape.pair_threads(size)}x{shape.unroll}" + " ahead" * shape.ahead
    return name + " pdl" * shape.pdl + " fetch" * (shape.pdl and shape.fetch) + "]"


def triton_name(shape: triton_merge.Tuning, size: int) -> str:
    """The same of a Triton shape."""
    shape = shape.pair(size)
    name = f"triton[{shape.warps} warps x{shape.vectors}" + " pdl" * shape.pdl
    return name + " fetch" * (shape.pdl and shape.fetch) + "]"


def _cuda_pairs() -> list[cuda_merge.Tuning]:
    found = []
    for threads in (128, 256, 512):
        one = cuda_merge.Tuning(threads, large_from=ALWAYS)
        found += [one, one._replace(fetch=False), one._replace(ahead=False)]
        found += [one._replace(pdl=False), one._replace(unroll=2)]
    return found


def _cuda_many(states: int) -> dict[str, cuda_merge.Tuning]:
    found = {}
    for threads in (64, 128, 256):
        for fetch in (True, False):
            name, shape = (
                f"cuda[{threads}{' fetch' * fetch}",
                cuda_merge.Tuning(threads, fetch=fetch),
            )
            if states <= cuda_merge.MOST_BATCH:
                found[name + "]"] = shape
                continue
            for split in (1, 2, 4, 8):
                found[f"{name} split{split}]"] = shape._replace(split=split, split_limit=ALWAYS)
    return found


def _triton_pairs() -> list[triton_merge.Tuning]:
    found = []
    for warps, vectors in ((2, 1), (4, 1), (4, 2), (8, 1)):
        shape = triton_merge.Tuning(warps, vectors, large_sizes=(0, 0))
        found += [shape, shape._replace(fetch=False), shape._replace(pdl=False)]
    return found


def shipped_pair(size: int) -> dict[str, str]:
    """Names in the sweep of the launch shapes that merge an output of ``size`` bytes, by path."""
    return {
        cuda_name(cuda_merge.TUNING, size): "cuda",
        triton_name(triton_merge.TUNING, size): "triton",
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
    size = six[0].numel() * six[0].element_size()
    for shape in _cuda_pairs():
        makers[cuda_name(shape, size)] = lambda s=shape: (  # type: ignore
            through(cuda_merge.prepare_pair(*six, dtype, s))
        )
    for form in _triton_pairs():
        makers[triton_name(form, size)] = lambda s=form: (  # type: ignore
            through(triton_merge.prepare_pair(*six, dtype, True, s))
        )
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
    for name, shape in _cuda_many(case.states).items():
        makers[name] = lambda s=shape: through(cuda_merge.prepare_stacked(*layouts, s))  # type: ignore
    for warps, vectors, pdl in ((4, 1, False), (4, 1, True), (8, 1, True), (2, 1, True)):
        form = triton_merge.Tuning(warps, vectors, pdl=pdl)
        name = f"triton[{warps} warps x{vectors}{' pdl' * pdl}]"
        makers[name] = lambda s=form: (  # type: ignore
            through(triton_merge.prepare_stacked(*layouts, True, s))
        )
    makers["flashinfer"] = lambda: flashinfer_states(o, lse)
    return makers, oracle(list(zip(o[0], lse[0])))


__all__ = ["cuda_name", "many_sweep", "pair_sweep", "shipped_pair", "triton_name"]
