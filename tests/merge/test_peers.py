"""The merge benchmark gives each other library its inputs in that library's form."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from attn_backends.bench.merge import Case, many_makers, pair_makers, run
from attn_backends.bench.merge_peers import PEERS
from attn_backends.bench.runner import EAGER

LN2 = 0.6931471805599453


def merged(os, lses, dim):
    """The merge by its definition: outputs and natural LSEs stacked along ``dim``."""
    lse = torch.logsumexp(lses.double(), dim)
    weights = torch.exp(lses.double() - lse.unsqueeze(dim))
    return (weights[..., None] * os.double()).sum(dim).to(os.dtype), lse.float()


def flashinfer_pair(v_a, s_a, v_b, s_b):
    o, lse = merged(torch.stack([v_a, v_b]), torch.stack([s_a, s_b]) * LN2, 0)
    return o, lse / LN2  # base 2


def flashinfer_many(v, s):
    o, lse = merged(v, s * LN2, 1)  # [T, n, H, D]
    return o, lse / LN2


def vllm(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse):
    assert prefix_lse.is_contiguous() and suffix_lse.is_contiguous()
    lses = torch.stack([prefix_lse.mT, suffix_lse.mT])  # it has [H, T]
    o, lse = merged(torch.stack([prefix_output, suffix_output]), lses, 0)
    output.copy_(o), output_lse.copy_(lse.mT)


def sglang(prefix_output, prefix_lse, suffix_output, suffix_lse, output, output_lse):
    assert prefix_lse.is_contiguous() and suffix_lse.is_contiguous()
    lses = torch.stack([prefix_lse, suffix_lse])
    o, lse = merged(torch.stack([prefix_output, suffix_output]), lses, 0)
    output.copy_(o), output_lse.copy_(lse)
    return output, output_lse


LIBRARIES = {
    "flashinfer": {"merge_state": flashinfer_pair, "merge_states": flashinfer_many},
    "vllm.v1.attention.ops.triton_merge_attn_states": {"merge_attn_states": vllm},
    "vllm._custom_ops": {"merge_attn_states": vllm},
    "sglang.kernels.ops.attention.merge_state": {"merge_state_triton": sglang},
    "sgl_kernel": {"merge_state_v2": sglang},
}


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins with the names, argument orders, layouts and bases of the real ones."""
    for name, members in LIBRARIES.items():
        parts = name.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("layout", ["token", "head"])
def test_every_peer_is_measured_beside_our_paths(libraries, layout):
    case = Case(5, 3, 64, "fp32", lse_layout=layout, device="cpu")
    makers, want = pair_makers(case, peers=True)
    found = run(case, makers, want, 3, (EAGER,))
    assert {row["backend"] for row in found.rows} == {"torch", "copy", *PEERS}
    assert set(PEERS) == {
        "flashinfer", "vllm-triton", "vllm-cuda", "sglang-triton", "sglang-cuda",
    }  # fmt: skip
    assert not found.refused and all(row["right"] for row in found.rows)


def test_n_states_are_measured_beside_merging_them_in_turn(libraries):
    case = Case(5, 3, 64, "fp32", states=8, device="cpu")
    makers, want = many_makers(case, peers=True)
    found = run(case, makers, want, 3, (EAGER,))
    assert {row["backend"] for row in found.rows} == {"torch", "pairwise", "flashinfer"}
    assert all(row["right"] for row in found.rows)


def test_a_peer_that_is_absent_says_why(monkeypatch):
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name.split(".")[0], None)
    case = Case(2, 2, 64, "fp32", device="cpu")
    makers, want = pair_makers(case, peers=True)
    found = run(case, makers, want, 3, (EAGER,))
    assert {item["backend"] for item in found.refused} == set(PEERS)
    assert all("ModuleNotFoundError" in item["reason"] for item in found.refused)
