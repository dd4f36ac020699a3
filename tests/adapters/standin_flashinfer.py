"""A stand-in of FlashInfer: wrappers that plan and run, base-2 LSE, and both ways of "no keys"."""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace

import torch
from standin_kernel import attend, take

LOG2_E = math.log2(math.e)
SENTINEL = -5e4


class _Wrapper:
    """What all wrappers share: fixed buffers, and checks of the host arrays."""

    release: tuple[int, int]

    def _begin(self, use_cuda_graph: bool, batch_size: int | None) -> None:
        self.graph, self.fixed_batch, self.max_rows = use_cuda_graph, batch_size, None
        self.planned = None

    def _check_rows(self, qo_indptr: torch.Tensor) -> None:
        assert qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu"
        assert len(qo_indptr) > 1, "max() of an empty batch"
        if self.graph:
            assert len(qo_indptr) - 1 == self.fixed_batch, "the batch size should be fixed"
            rows = int(qo_indptr[-1])
            self.max_rows = rows if self.max_rows is None else self.max_rows
            assert rows <= self.max_rows

    def _attend(self, q, keys, values, options, scale):
        left = options["window_left"]
        o, lse = attend(
            q, keys, values,
            scale=scale, left=None if left < 0 else left,
            right=0 if options["causal"] else None, softcap=options["logits_soft_cap"],
        )  # fmt: skip
        lse = lse * LOG2_E
        if self.release < (0, 7):
            lse = torch.where(lse == float("-inf"), SENTINEL, lse)
        return o, lse


def _check_options(options: dict) -> None:
    dims = (options["head_dim_qk"], options["head_dim_vo"])
    assert dims in ((64, 64), (128, 128), (256, 256), (192, 128)), dims
    if options["window_left"] >= 0 and not options["causal"]:
        assert options["disable_split_kv"], "splits are sized for keys up to the diagonal"


def _outputs(q, o, lse, options):
    """Outputs as given, or new ones."""
    if o is None:
        o = torch.empty(*q.shape[:2], options["head_dim_vo"], dtype=options["o_data_type"])
    return o, torch.empty(q.shape[:2]) if lse is None else lse


def _check_run(q, o, lse, options, rows) -> None:
    assert q.shape[0] == rows, f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({rows})"
    assert q.dtype == options["q_data_type"] and q.shape[1] == options["num_qo_heads"]
    assert q.shape[2] == options["head_dim_qk"]
    assert o.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    assert o.dtype == options["o_data_type"] and o.shape == (*q.shape[:2], options["head_dim_vo"])


def _prefill_options(
    num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False, sm_scale=None,
    window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
    o_data_type=None, disable_split_kv=False,
):  # fmt: skip
    found = dict(locals())
    _check_options(found)
    return found


def flashinfer(version: str = "0.6.8.post1") -> dict[str, ModuleType]:
    """The ``flashinfer`` module of a release."""
    release_ = tuple(int(x) for x in version.split(".")[:2])
    module, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    module.__version__, module.__path__, module.mla = version, [], mla
    module.made = []

    class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
        release = release_

        def __init__(
            self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False,
            qo_indptr_buf=None, paged_kv_indptr_buf=None, paged_kv_indices_buf=None,
            paged_kv_last_page_len_buf=None, *, backend="auto",
        ):  # fmt: skip
            module.made.append(self)
            self.indices_room = None if paged_kv_indices_buf is None else len(paged_kv_indices_buf)
            self._begin(use_cuda_graph, None if qo_indptr_buf is None else len(qo_indptr_buf) - 1)
            if use_cuda_graph:
                assert len(paged_kv_indptr_buf) == len(qo_indptr_buf)
                assert len(paged_kv_last_page_len_buf) == len(qo_indptr_buf) - 1

        def plan(
            self, *, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            page_size, **options,
        ):  # fmt: skip
            self._check_rows(qo_indptr)
            last, indptr = paged_kv_last_page_len, paged_kv_indptr
            assert len(indptr) == len(qo_indptr) and int(indptr[0]) == 0
            assert int(indptr[-1]) == len(paged_kv_indices)
            assert paged_kv_indices.dtype == indptr.dtype == last.dtype == torch.int32
            for n, length in zip(indptr.diff().tolist(), last.tolist()):
                assert length == 0 if n == 0 else 1 <= length <= page_size, (n, length)
            if self.graph:
                assert len(paged_kv_indices) <= self.indices_room
            options = _prefill_options(**options)
            lengths = [
                max(n - 1, 0) * page_size + m for n, m in zip(indptr.diff().tolist(), last.tolist())
            ]
            self.planned = (
                qo_indptr.clone(), indptr.clone(), paged_kv_indices.clone(), lengths, page_size,
                options,
            )  # fmt: skip

        def run(
            self, *, q, paged_kv_cache, k_scale=None, v_scale=None, out=None, lse=None, return_lse,
            window_left=None, sinks=None,
        ):  # fmt: skip
            qo, indptr, indices, lengths, page_size, options = self.planned
            assert sinks is None, "accepted and ignored"
            k, v = paged_kv_cache
            assert k.stride() == v.stride(), "k/v strides differ"
            assert k.shape[1] == page_size and k.dtype == options["kv_data_type"]
            out, lse = _outputs(q, out, lse, options)
            _check_run(q, out, lse, options, int(qo[-1]))
            scale = options["sm_scale"] * (1.0 if k_scale is None else k_scale)
            assert k_scale is None or isinstance(k_scale, float)
            for b, n in enumerate(lengths):
                ids = indices[int(indptr[b]) : int(indptr[b + 1])].long()
                rows = slice(int(qo[b]), int(qo[b + 1]))
                keys, values = (take(x, ids).flatten(0, 1)[:n] for x in (k, v))
                o, own = self._attend(q[rows], keys, values, options, scale)
                out[rows], lse[rows] = o.to(out.dtype), own
            return out, lse

    class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
        release = release_

        def __init__(
            self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False,
            qo_indptr_buf=None, kv_indptr_buf=None, *, backend="auto",
        ):  # fmt: skip
            module.made.append(self)
            self._begin(use_cuda_graph, None if qo_indptr_buf is None else len(qo_indptr_buf) - 1)

        def plan(self, *, qo_indptr, kv_indptr, **options):
            self._check_rows(qo_indptr)
            assert len(kv_indptr) == len(qo_indptr)
            options = _prefill_options(**options)
            self.planned = (qo_indptr.clone(), kv_indptr.clone(), options)

        def run(self, *, q, k, v, out=None, lse=None, return_lse):
            qo, kv, options = self.planned
            out, lse = _outputs(q, out, lse, options)
            _check_run(q, out, lse, options, int(qo[-1]))
            assert k.shape[0] >= int(kv[-1])
            for b in range(len(qo) - 1):
                rows, cols = slice(int(qo[b]), int(qo[b + 1])), slice(int(kv[b]), int(kv[b + 1]))
                o, own = self._attend(q[rows], k[cols], v[cols], options, options["sm_scale"])
                out[rows], lse[rows] = o.to(out.dtype), own
            return out, lse

    class BatchMLAPagedAttentionWrapper(_Wrapper):
        release = release_

        def __init__(
            self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None,
            kv_indices=None, kv_len_arr=None, backend="auto",
        ):  # fmt: skip
            module.made.append(self)
            self._begin(use_cuda_graph, None if qo_indptr is None else len(qo_indptr) - 1)

        def plan(
            self, *, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale,
            q_data_type, kv_data_type, **arrays,
        ):  # fmt: skip
            if release_ >= (0, 7):
                assert arrays.pop("lse_mode") == "base2"
                assert arrays.pop("query_layout") == arrays.pop("kv_cache_layout") == "split"
                arrays = vars(arrays.pop("metadata"))
            self._check_rows(arrays["qo_indptr"])
            assert (head_dim_ckv, head_dim_kpe) == (512, 64)
            self.planned = (arrays, page_size, causal, sm_scale)

        def run(self, *, out, lse, return_lse, **tensors):
            if release_ >= (0, 7):
                (q_nope, q_pe), (ckv, kpe) = tensors.pop("query"), tensors.pop("kv_cache")
            else:
                q_nope, q_pe = tensors.pop("q_nope"), tensors.pop("q_pe")
                ckv, kpe = tensors.pop("ckv_cache"), tensors.pop("kpe_cache")
            assert not tensors and ckv.dim() == 3 and kpe.shape[-1] == 64
            arrays, page_size, causal, scale = self.planned
            assert ckv.shape[1] == kpe.shape[1] == page_size
            qo, indptr = arrays["qo_indptr"], arrays["kv_indptr"]
            assert q_nope.shape[0] == int(qo[-1])
            options = {"window_left": -1, "causal": causal, "logits_soft_cap": 0.0}
            for b, n in enumerate(arrays["kv_len_arr"].tolist()):
                ids = arrays["kv_indices"][int(indptr[b]) : int(indptr[b + 1])].long()
                rows = slice(int(qo[b]), int(qo[b + 1]))
                latent, rope = (x[ids].flatten(0, 1)[:n, None] for x in (ckv, kpe))
                q = torch.cat([q_nope[rows], q_pe[rows]], dim=-1)
                keys = torch.cat([latent, rope], dim=-1)
                o, own = self._attend(q, keys, latent, options, scale)
                out[rows], lse[rows] = o.to(out.dtype), own
            return out, lse

    if release_ >= (0, 7):
        mla.MLAPlanMetadata = SimpleNamespace(csr=lambda **arrays: SimpleNamespace(**arrays))
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    module.BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper
    mla.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    return {"flashinfer": module, "flashinfer.mla": mla}
