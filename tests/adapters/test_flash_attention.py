"""FlashAttention behind one name: which build is chosen, and what each is spared."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from standin_flash import flash_attn_2, flash_attn_3, flash_attn_4, vllm
from support import assert_close, make_call, reference, run

from attn_backends.adapters.fa4 import FlashAttention4
from attn_backends.adapters.flash_attention import FlashAttentionBackend, candidates
from attn_backends.capacity import Capacity
from attn_backends.errors import UnsupportedCallError
from attn_backends.spec import AttentionSpec

TOKENSPEED = {
    "FLASHATTENTION_DISABLE_SOFTCAP": True,
    "FLASHATTENTION_DISABLE_HDIM96": True,
    "FLASH_ATTENTION_DISABLE_HDIMDIFF64": True,
    "FLASH_ATTENTION_DISABLE_HDIMDIFF192": True,
}


def bind(spec: AttentionSpec, **options: Any) -> FlashAttentionBackend:
    chosen = FlashAttentionBackend.Options.model_validate(options)
    return FlashAttentionBackend(spec, device="cpu", options=chosen)


def spec(**fields: Any) -> AttentionSpec:
    base = dict(num_heads=4, num_kv_heads=2, head_dim=64)
    return AttentionSpec(**{**base, **fields})


def fa3(flags: dict[str, bool] | None = None) -> dict[str, ModuleType]:
    module, config = flash_attn_3(flags)
    return {"flash_attn_interface": module, "flash_attn_config": config}


def test_without_any_package_every_install_command_is_named(install: Any) -> None:
    reasons = FlashAttentionBackend.unsupported_reasons(spec())
    text = "; ".join(map(str, reasons))
    for command in ("flash-attn", "tokenspeed-fa3", "flash-attn-4", "vllm"):
        assert f"pip install {command}" in text or command in text
    assert "flash_attn=not installed (supported: >=2.7); pip install flash-attn" in text
    with pytest.raises(UnsupportedCallError, match="not installed"):
        FlashAttentionBackend(spec())


def test_without_any_package_only_limits_that_no_build_would_lift_are_told(install: Any) -> None:
    def told(fields: dict[str, Any], **options: Any) -> list[str]:
        chosen = FlashAttentionBackend.Options(**options)
        found = FlashAttentionBackend.unsupported_reasons(spec(**fields), options=chosen)
        return [r.argument for r in found if "installed" not in r.got]

    assert told({"page_size": 16}) == []
    assert told({"page_size": 16}, version="2", source="package") == ["page_size"]
    for version in ("auto", "2"):
        assert told({"dtype": torch.float32}, version=version) == ["dtype"]
    assert told({"has_mask": True, "head_dim": 300}) == ["head_dim", "has_mask"]


def test_a_version_that_the_source_does_not_have_is_refused(install: Any) -> None:
    options = FlashAttentionBackend.Options(version="4", source="vllm")
    with pytest.raises(UnsupportedCallError, match=r"source=vllm \(supported: auto, package for"):
        FlashAttentionBackend(spec(), device="cpu", options=options)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ImportError,
            "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocation",
        ),
        (OSError, "libcudart.so.12: cannot open shared object file"),
        (RuntimeError, "built for another CUDA"),
        (AttributeError, "module 'torch' has no attribute 'x'"),
    ],
)
def test_a_package_that_does_not_load_keeps_its_own_words(
    error: type[Exception], message: str, install: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error.__name__}({message!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    install()
    monkeypatch.delitem(__import__("sys").modules, "flash_attn")
    text = "; ".join(map(str, FlashAttentionBackend.unsupported_reasons(spec())))
    assert message in text and error.__name__ in text


def test_an_old_or_partial_package_is_refused_with_what_is_wanted(install: Any) -> None:
    old = flash_attn_2()
    old.__version__ = "2.5.9"
    install(flash_attn=old)
    text = "; ".join(map(str, FlashAttentionBackend.unsupported_reasons(spec())))
    assert "flash_attn=2.5.9, too old (supported: >=2.7)" in text
    partial = flash_attn_2()
    del partial.flash_attn_with_kvcache
    install(flash_attn=partial)
    text = "; ".join(map(str, FlashAttentionBackend.unsupported_reasons(spec())))
    assert "flash_attn.flash_attn_with_kvcache" in text


def test_a_vllm_whose_extension_fails_says_why_in_its_own_words(install: Any) -> None:
    modules = vllm()
    interface = modules["vllm.vllm_flash_attn.flash_attn_interface"]
    interface.FA3_AVAILABLE, interface.FA3_UNAVAILABLE_REASON = False, "undefined symbol: _ZN2at"
    install(**modules)
    options = FlashAttentionBackend.Options(version="3", source="vllm")
    text = "; ".join(map(str, FlashAttentionBackend.unsupported_reasons(spec(), options=options)))
    assert "undefined symbol: _ZN2at" in text and "0.20.0" in text


def test_auto_passes_over_builds_that_cannot_do_the_call(install: Any, on_cpu: None) -> None:
    install(**fa3(), flash_attn=flash_attn_2())
    assert bind(spec()).build.version == 2  # the CPU prefers none in particular
    assert bind(spec(dtype=torch.float8_e4m3fn)).build.version == 3
    assert bind(spec(has_alibi=True)).build.version == 2
    assert bind(spec(page_size=16)).build.version == 3  # pages of 256 in FlashAttention 2
    assert "flash-attn 2.8.3" in bind(spec()).build.label


def test_a_build_that_loads_ends_the_search(
    install: Any, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(flash_attn=flash_attn_2())
    asked: list[str] = []
    own = FlashAttention4.probe
    monkeypatch.setattr(FlashAttention4, "probe", lambda self: (asked.append("4"), own(self))[1])
    assert FlashAttentionBackend.dependency_reasons() == [] and not asked
    options = FlashAttentionBackend.Options(version="4")
    assert FlashAttentionBackend.dependency_reasons(options) and asked


def test_an_asked_version_never_falls_back(install: Any, on_cpu: None) -> None:
    install(**fa3(), flash_attn=flash_attn_2())
    with pytest.raises(UnsupportedCallError, match=r"page_size=16 .*multiples of 256"):
        bind(spec(page_size=16), version="2")
    with pytest.raises(UnsupportedCallError, match="has_alibi=True"):
        bind(spec(has_alibi=True), version="3")
    assert [b.package for b in candidates(FlashAttentionBackend.Options(source="vllm"), None)] == [
        "vllm",
        "vllm",
    ]


def test_fa3_takes_what_its_build_left_out_from_the_build_itself(
    install: Any, on_cpu: None
) -> None:
    install(**fa3(TOKENSPEED))
    with pytest.raises(UnsupportedCallError, match=r"softcap=20.0 .*in this build"):
        bind(spec(softcap=20.0), version="3")
    with pytest.raises(UnsupportedCallError, match="head_dim_v=128"):
        bind(spec(head_dim=192, head_dim_v=128, page_size=16), version="3")
    call = make_call(spec(head_dim=192, head_dim_v=128), [3, 1], [5, 2])  # padded to 192 if ragged
    assert_close(run(bind(call.spec, version="3"), call), reference(call))


CASES = {
    "more-queries-than-keys-right": dict(causal=False, window=(None, 10)),
    "more-queries-than-keys-left": dict(causal=False, window=(2, None)),
    "both": dict(causal=False, window=(0, 1)),
    "alibi": dict(has_alibi=True),
    "alibi-window": dict(has_alibi=True, window=(2, None)),
    "alibi-full": dict(has_alibi=True, causal=False),
    "softcap": dict(softcap=2.0),
    "scale-zero": dict(sm_scale=0.0),
    "group-3": dict(num_heads=3, num_kv_heads=1),
    "dims": dict(head_dim=40, head_dim_v=72),
}
LENGTHS = (([100, 3, 0, 1], [10, 7, 4, 0]), ([1, 1, 1], [5, 0, 7]), ([1, 0, 1], [3, 0, 5]))


@pytest.mark.parametrize("lengths", LENGTHS, ids=["mixed", "decode", "gap"])
@pytest.mark.parametrize("page_size", [None, 256])
@pytest.mark.parametrize("case", CASES)
def test_fa2_equals_the_reference(case, page_size, lengths, install: Any, on_cpu: None) -> None:
    fields = {"dtype": torch.float16, "page_size": page_size, **CASES[case]}
    call = make_call(spec(**fields), *lengths, room=1)
    for name, modules in (("package", {"flash_attn": flash_attn_2()}), ("vllm", vllm())):
        install(**modules)
        options = {"version": "2", "source": name}
        if FlashAttentionBackend.unsupported_reasons(
            call.spec,
            device=torch.device("cpu"),
            options=FlashAttentionBackend.Options.model_validate(options),
        ):
            assert case == "dims" and page_size is not None
            continue
        for finite in (False, True):
            assert_close(
                run(bind(call.spec, **options, finite_cache=finite), call), reference(call)
            )


def test_fa2_decodes_through_the_cache_entry_and_prefills_through_varlen(
    install: Any, on_cpu: None
) -> None:
    module = flash_attn_2()
    install(flash_attn=module)
    backend = bind(spec(page_size=256), version="2")
    run(backend, make_call(backend.spec, [1, 1], [5, 9]))
    run(backend, make_call(backend.spec, [2, 1], [5, 9]))
    assert module.calls == ["kvcache", "varlen"]
    invariant = bind(spec(page_size=256, batch_invariant=True), version="2")
    run(invariant, make_call(invariant.spec, [1, 1], [5, 9]))
    assert module.calls[2:] == ["varlen"]


PAGES = [(v, p) for v in "234" for p in (None, 16, 256) if (v, p) != ("2", 16)]


@pytest.mark.parametrize(("version", "page_size"), PAGES)
@pytest.mark.parametrize("window", [None, (2, None)])
def test_lengths_that_only_the_device_knows_give_the_same(
    version, page_size, window, install: Any, on_cpu: None
) -> None:
    install(**fa3(), flash_attn=flash_attn_2(), **{"flash_attn.cute": flash_attn_4()})
    options = {"version": version, "finite_cache": version == "4"}
    fields = spec(page_size=page_size, window=window)
    call = make_call(fields, [3, 0, 1, 5], [9, 4, 0, 3], host=False, room=2)
    want = reference(call)
    padded = torch.cat([call.q, call.q[:2]])  # rows of no sequence
    backend = bind(fields, **options)
    got = backend.run(padded, call.k, call.v, backend.plan(call.batch))
    assert bool((got.o[-2:] == 0).all()) and bool((got.lse[-2:] == float("-inf")).all())
    assert_close(type(got)(got.o[:-2], got.lse[:-2]), want)


def test_fa3_skips_unused_slots_of_whole_tiles_unless_they_are_promised_finite(
    install: Any, on_cpu: None
) -> None:
    install(**fa3())
    call = make_call(spec(page_size=128), [1, 2], [5, 130])
    want = reference(call)
    for pages in (call.k, call.v):
        unused = torch.ones(pages.shape[:2], dtype=torch.bool)
        for row, kv in zip(call.batch.page_table.tolist(), (5, 130)):
            for at in range(kv):
                unused[row[at // 128], at % 128] = False
        pages[unused] = float("nan")
    assert_close(run(bind(call.spec, version="3"), call), want)
    promised = bind(call.spec, version="3", finite_cache=True)
    assert bool(run(promised, call).o.isnan().any())  # the promise was broken
    install(**vllm())
    with pytest.raises(UnsupportedCallError, match=r"page_size=128 .*finite_cache=True"):
        bind(call.spec, version="3", source="vllm")


def test_fa3_batch_invariance_fixes_the_bound_and_the_splits(install: Any, on_cpu: None) -> None:
    modules = fa3()
    install(**modules)
    backend = bind(spec(page_size=16, batch_invariant=True), version="3")
    run(backend, make_call(backend.spec, [1], [5]))
    run(backend, make_call(backend.spec, [1, 129], [5, 200]))
    assert modules["flash_attn_interface"].calls == [("kvcache", 512, 1)] * 2
    with pytest.raises(UnsupportedCallError, match="batch_invariant=True with window"):
        bind(spec(page_size=16, batch_invariant=True, window=(3, None)), version="3")


@pytest.mark.parametrize("form", ["float", "scalar", "head"])
def test_fa3_applies_fp8_scales_per_head(form: str, install: Any, on_cpu: None) -> None:
    install(**fa3())
    scales = torch.tensor([0.5, 1.75])
    value = {"float": 0.5, "scalar": torch.tensor(0.5), "head": scales}[form]
    call = make_call(
        spec(dtype=torch.float8_e4m3fn, page_size=16), [2, 1], [9, 20], k_scale=value, v_scale=value
    )
    got = run(bind(call.spec, version="3"), call)
    assert got.o.dtype == torch.bfloat16
    assert_close(got, reference(call))


def test_fa3_serves_mla_through_its_latent_input(install: Any, on_cpu: None) -> None:
    install(**fa3())
    fields = AttentionSpec(16, 1, 576, 512, page_size=16)
    call = make_call(fields, [1, 3], [20, 33])
    assert_close(run(bind(fields, version="3"), call), reference(call))
    own = call._replace(v=call.k[..., :512].clone())
    with pytest.raises(UnsupportedCallError, match="first 512 lanes of k"):
        run(bind(fields, version="3"), own)


@pytest.mark.parametrize("version", ["3", "4"])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("window", [None, (2, None)])
def test_a_plan_with_a_capacity_follows_its_updates(
    version, page_size, window, install: Any, on_cpu: None
) -> None:
    install(**fa3(), flash_attn=flash_attn_2(), **{"flash_attn.cute": flash_attn_4()})
    fields = spec(page_size=page_size, window=window)
    backend = bind(fields, version=version)
    capacity = Capacity(num_seqs=4, total_q=8, max_seqlen_q=5, max_seqlen_k=40, max_pages=4)
    first = make_call(fields, [1, 1], [5, 40])
    plan = backend.plan(first.batch, capacity)
    for lengths in (([1, 1], [5, 40]), ([3, 1, 4], [9, 0, 2]), ([0, 0], [3, 1])):
        call = make_call(fields, *lengths)
        plan.update(call.batch)
        q = torch.cat([call.q, torch.full((8 - len(call.q), 4, 64), 9.0, dtype=call.q.dtype)])
        got = backend.run(q, call.k, call.v, plan)
        n = len(call.q)
        assert bool((got.o[n:] == 0).all()) and bool((got.lse[n:] == float("-inf")).all())
        assert_close(type(got)(got.o[:n], got.lse[:n]), reference(call))


def test_the_fa2_inside_vllm_refuses_cuda_graphs(install: Any, on_cpu: None) -> None:
    install(**vllm())
    backend = bind(spec(), version="2")
    capacity = Capacity(num_seqs=1, total_q=1, max_seqlen_q=1, max_seqlen_k=8)
    with pytest.raises(UnsupportedCallError, match="capacity"):
        backend.plan(make_call(spec(), [1], [4]).batch, capacity)


FA2_FIELDS = {
    "plain": {},
    "alibi": dict(has_alibi=True),
    "window": dict(window=(3, None)),
    "full": dict(causal=False),
    "invariant": dict(batch_invariant=True),
}


@pytest.mark.parametrize("fields", FA2_FIELDS)
@pytest.mark.parametrize("longest", [1, 4])
@pytest.mark.parametrize("page_size", [None, 256])
def test_fa2_with_a_capacity_follows_its_updates(
    page_size, longest, fields, install, on_cpu
) -> None:
    """One query each through the entry for decode, also where sequences lack theirs."""
    module = flash_attn_2()
    install(flash_attn=module)
    fixed = spec(page_size=page_size, **FA2_FIELDS[fields])
    backend = bind(fixed, version="2", num_splits=3)
    capacity = Capacity(num_seqs=4, total_q=8, max_seqlen_q=longest, max_seqlen_k=40, max_pages=1)
    plan = backend.plan(make_call(fixed, [1, 1], [5, 40]).batch, capacity)
    steps = [([1, 1], [5, 40]), ([0, 1, 1], [9, 0, 2]), ([0, 0], [3, 1]), ([1], [40])]
    for q_lens, kv_lens in [*steps, ([3, 1, 4], [9, 0, 2])][: 4 if longest == 1 else 5]:
        call = make_call(fixed, q_lens, kv_lens)
        plan.update(call.batch)
        q = torch.cat([call.q, torch.full((8 - len(call.q), 4, 64), 9.0, dtype=call.q.dtype)])
        got = backend.run(q, call.k, call.v, plan, **call.kwargs)
        n = len(call.q)
        assert bool((got.o[n:] == 0).all()) and bool((got.lse[n:] == float("-inf")).all())
        assert_close(type(got)(got.o[:n], got.lse[:n]), reference(call))
    paged = page_size is not None and fields != "window"
    assert set(module.calls) == {"kvcache" if paged and longest == 1 else "varlen"}


@pytest.mark.parametrize("version", ["2", "3", "4"])
@pytest.mark.parametrize(("tokens", "heads"), [(5, 20), (8, 8)])
def test_the_lse_of_heads_by_tokens_is_turned(version, tokens, heads, install, on_cpu) -> None:
    """A library whose LSE holds 100 * head + token; with T == H shapes cannot tell."""  # F10

    def numbered(*, q: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        h, t = torch.arange(heads)[:, None], torch.arange(tokens)[None, :]
        return torch.zeros_like(q), (100 * h + t).float()

    module, cute = flash_attn_2(), flash_attn_4()
    modules = fa3()
    for part in (module, cute, modules["flash_attn_interface"]):
        part.flash_attn_varlen_func = numbered
    install(**modules, flash_attn=module, **{"flash_attn.cute": cute})
    call = make_call(spec(num_heads=heads, num_kv_heads=1), [tokens], [tokens])
    lse = run(bind(call.spec, version=version), call).lse
    assert lse.shape == (tokens, heads)
    want = 100 * torch.arange(heads)[None, :] + torch.arange(tokens)[:, None]
    assert torch.equal(lse, want.float())


def test_reports_name_every_build_that_loads_with_its_version(install: Any, on_cpu: None) -> None:
    assert FlashAttentionBackend.versions() == {}
    install(flash_attn=flash_attn_2(), **fa3(), **vllm())
    found = FlashAttentionBackend.versions()
    assert found == {"flash-attn": "2.8.3", "flash_attn_interface": "3.0.0", "vllm": "0.20.0"}
    assert bind(spec(), version="2", source="vllm").build.label == "FlashAttention 2 (vllm 0.20.0)"
    for variant, served in zip(FlashAttentionBackend.variants, ("flash-attn", "vllm")):
        options = FlashAttentionBackend.Options.model_validate(variant)
        assert FlashAttentionBackend.library(options) == (served, found[served])
    absent = FlashAttentionBackend.Options(version="4")
    assert FlashAttentionBackend.library(absent) is None
