"""One of two processes that share a cache through vLLM's own group, on a CPU: RANK PORT FOLDER.

Prints the largest error of its heads for every batch. vLLM's kernel runs in Triton's interpreter.
"""

from __future__ import annotations

import sys
from typing import Any

BATCHES = [([17, 9, 30], [1, 1, 1]), ([17, 6, 5, 1], [4, 6, 1, 1]), ([3, 2], [3, 1])]
RANKS = 2


def pretend() -> None:
    """A CPU platform, and a Triton that vLLM takes for usable."""
    from triton.backends import backends

    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform()
    vllm.platforms._current_platform = platform


def main(rank: int, port: str, folder: str) -> None:
    pretend()
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    sys.path.insert(0, folder)
    import test_vllm_context as made

    from attn_backends.engines.vllm.context_parallel import ContextParallel

    with set_current_vllm_config(VllmConfig()):
        where = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(RANKS, rank, where, rank, "gloo")
        parallel_state.initialize_model_parallel(RANKS, 1, 1, RANKS)
        assert parallel_state.get_dcp_group().rank_in_group == rank
        for interleave in (1, 4):
            for lens, new in BATCHES:
                shards = made.Shards(lens, new, interleave)
                device = torch.device("cpu")
                parallel = ContextParallel.of(made.SPEC, RANKS, rank, interleave, device)
                out = torch.full_like(shards.q[rank], float("nan"))
                parallel.plan(shards.requests(), None).run(
                    (shards.q[rank], shards.own(shards.k), shards.own(shards.v)),
                    shards.caches[rank],
                    out,
                    sinks=None,
                    alibi_slopes=None,
                    k_scale=None,
                    v_scale=None,
                )
                error = (out.double() - shards.expected(rank, None)).abs().max().item()
                print("error", error, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
