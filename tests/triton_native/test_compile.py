"""Shipped configurations compile for every architecture, without a GPU, and do not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json, sys
import torch
from attn_backends.spec import AttentionSpec as S
from attn_backends.triton_native.offline import record, report

half, fp8, fp32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
decode, prefill = ([1] * 4, [8192] * 4), ([2048], [4096])
CASES = {
    "decode": (S(32, 8, 128, page_size=16), decode, False),
    "prefill": (S(32, 8, 128, page_size=16), prefill, False),
    "prefill-ragged": (S(32, 8, 128), prefill, False),
    "prefill-short": (S(32, 8, 128), ([512] * 64, [512] * 64), False),
    "prefill-window": (S(32, 8, 64, softcap=30.0, window=(99, 0)), prefill, False),
    "decode-tiny": (S(32, 8, 128, page_size=16), ([1], [1024]), False),
    "decode-few": (S(32, 8, 128, page_size=16), ([1], [4096]), False),
    "decode-256": (S(16, 8, 256, page_size=64), decode, False),
    "prefill-256": (S(16, 8, 256), prefill, False),
    "prefill-mask": (S(32, 8, 128, has_mask=True), prefill, False),
    "decode-fp8": (S(32, 8, 128, kv_dtype=fp8, page_size=16), decode, False),
    "decode-fp32": (S(32, 8, 128, dtype=fp32), decode, False),
    "invariant": (S(32, 8, 128, page_size=16, batch_invariant=True), decode, False),
    "mla-16": (S(16, 1, 576, head_dim_v=512, page_size=64), decode, True),
    "mla-128": (S(128, 1, 576, head_dim_v=512, page_size=64), decode, True),
    "mla-prefill": (S(16, 16, 192, head_dim_v=128), prefill, False),
}
arch = int(sys.argv[1])
found = {}
for name in sys.argv[2:]:
    spec, (q_lens, kv_lens), share = CASES[name]
    for launch in record(spec, q_lens, kv_lens, arch=arch, share_kv=share):
        kernel = launch.kernel.fn.__name__
        if name != "decode" and kernel in ("_schedule_kernel", "_merge_fwd_kernel"):
            continue  # the same for every case
        r = report(launch.compile(arch))
        found[name + " " + r.name] = vars(r)
print(json.dumps(found))
"""

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}


def compile_for(arch: int, *names: str) -> dict[str, dict[str, int]]:
    """Compile in a process of its own: here Triton may be interpreting."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(arch), *names],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def newer_than_3_6() -> bool:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        (80, ("decode", "prefill", "decode-fp8", "mla-16")),
        (
            90,
            (
                *("decode", "decode-tiny", "decode-few", "decode-256"),
                *("prefill", "prefill-ragged", "prefill-short", "prefill-window", "prefill-256"),
                *("prefill-mask", "decode-fp8", "decode-fp32", "invariant"),
                *("mla-16", "mla-128", "mla-prefill"),
            ),
        ),
        (100, ("decode", "prefill", "mla-16")),
    ],
)
def test_shipped_configurations_fit_and_do_not_spill(arch: int, names: tuple[str, ...]) -> None:
    reports = compile_for(arch, *names)
    assert {key.split()[0] for key in reports} == set(names)
    spilled = {key: r["spills"] for key, r in reports.items() if r["spills"]}
    if newer_than_3_6():
        # The table is made with Triton 3.6, where nothing spills. Triton 3.9 spills a little in the
        # one kernel that uses every register, and a word in the decode of sm_80.
        assert spilled.pop("mla-128 _split_fwd_kernel", 0) <= 512
        if arch == 80:
            assert spilled.pop("decode _split_fwd_kernel", 0) <= 8
    assert not spilled
    assert all(r["shared"] <= SHARED_MEMORY[arch] for r in reports.values())
    decode = reports["decode _split_fwd_kernel"]
    # Two tiles of keys and values in flight: the page table is read one turn ahead.
    assert decode["shared"] >= 2 * 64 * 256 * 2 and decode["cp_async"] >= 3 * 16
    if arch == 90:
        assert reports["prefill _prefill_fwd_kernel"]["wgmma"] > 0
        # Two programs of 128 rows on a multiprocessor, which compute while the other waits.
        ragged = reports["prefill-ragged _prefill_fwd_kernel"]
        assert ragged["registers"] <= 128 and ragged["shared"] <= 228 * 1024 // 2 - 1024
        assert ragged["wgmma"] > 0 and not ragged["serialized"]
        assert reports["mla-128 _split_fwd_kernel"]["wgmma"] > 0
