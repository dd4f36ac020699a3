"""Repeated runs: what a repeat may take over from the checks, and which addresses it passes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from attn_backends import driver
from attn_backends import triton_compiled as compiled
from attn_backends.backend import RunExtras
from attn_backends.output import AttentionOutput
from attn_backends.triton_native import repeat as module
from attn_backends.triton_native.call import Step

NONE = RunExtras()
SPLIT_AT, MERGE_AT = (1600, 3200), (4800,)


class Form:
    """A compiled kernel whose launches are written down."""

    def __init__(self, log: list, name: str) -> None:
        self.log, self.name = log, name

    def launch(self, grid, values, changing):
        def launch(stream, *args):
            # Arguments that are absent are not passed.
            assert len(args) == changing - sum(x is None for x in values[:changing])
            self.log.append((self.name, grid, stream, (*args, *values[changing:])))

        return launch


def form_of_three(kept=(True, False, True), formats="QQ", widths=(1, 1)):
    return compiled.Form(1, 32, 0, False, formats, kept, widths, 0, "a kernel")


def test_a_launch_is_kept_of_numbers_alone():
    form = form_of_three()
    assert form.launch((1, 1, 1), (16, None, 32), 1) is not None
    assert form.launch((1, 1, 1), (16, None, None), 1) is None  # its launches would fail
    assert form.launch((1, 1, 1), (None, None, 32), 1) is None
    assert form.launch((1, 1, 1), (16, 5, 32), 2) is None  # what is compiled in cannot change
    assert form.launch((1, 1, 1), (16, None), 1) is None


def test_a_tensor_map_is_passed_with_its_shape_and_strides():
    form = form_of_three((True, True), "QMiiqq", (1, 5))
    assert form.arguments((16, (b"map", 7, 8, 9, 1))) == (16, b"map", 7, 8, 9, 1)
    assert form.launch((1, 1, 1), (16, (b"map", 7, 8, 9, 1)), 2) is not None
    assert compiled.format_of("tensordesc<bf16[64, 128]>") == "Miiqq"
    assert [compiled.format_of(x) for x in ("*fp32", "i32", "other", None)] == [
        "Q",
        "i",
        None,
        None,
    ]


def test_the_first_kernel_may_lack_maps(made):
    (q, k, v), split = qkv(), (None, None, *SPLIT_AT)
    repeat, _, log = made(q, k, v, split=split)
    assert repeat(q, k, v, None, None) is not None
    name, _, _, args = log[0]
    assert name == "split" and args[5:7] == split[:2] and None not in args[7:]
    extras = NONE._replace(sinks=torch.zeros(2))
    repeat, _, log = made(q, k, v, extras, split=split)
    assert repeat(q, k, v, extras, None) is not None
    assert None not in log[0][3] and log[0][3][5:7] == SPLIT_AT


@pytest.fixture
def made(monkeypatch):
    """``make(tensors, extras, given)``: a repeat on the CPU, its outputs, and what it launches."""
    monkeypatch.setattr(driver, "current_device", lambda: None)
    monkeypatch.setattr(driver, "current_stream", lambda index: 7)
    monkeypatch.setattr(module, "is_hooked", lambda: False)

    def empty(shape, stride, dtype, index):
        return torch.empty_strided(shape, stride, dtype=dtype)

    monkeypatch.setattr(module, "empty", empty)

    def make(q, k, v, extras=NONE, given=False, split=SPLIT_AT):
        log: list = []
        launchers = [
            SimpleNamespace(form=lambda key, n=n: Form(log, n), values=(True,))
            for n in ("split", "merge")
        ]
        steps = [
            Step(launchers[0], (3, 1, 1), tuple, split, (11, 12), False),
            Step(launchers[1], (2, 1, 1), tuple, MERGE_AT, (13,), True),
        ]
        call = SimpleNamespace(
            steps=steps, hopper=None, bytes=False, scale=0.5, softcap=1.0, key="key",
            plan=SimpleNamespace(mask_indptr=None),
        )  # fmt: skip
        out = AttentionOutput(torch.empty(4, 2, 16), torch.empty(4, 2))
        tensors = (q, k, v, *(out if given else ()))
        return module.repeat_of(call, tensors, extras, out, given), out, log

    return make


def qkv():
    return torch.randn(4, 2, 16), torch.randn(9, 1, 16), torch.randn(9, 1, 16)


def test_addresses_of_other_tensors_reach_the_kernels(made):
    repeat, _, log = made(*qkv())
    q, k, v = qkv()
    o, lse = repeat(q, k, v, None, None)
    assert o.shape == (4, 2, 16) and lse.shape == (4, 2) and lse.dtype == torch.float32
    spare = SPLIT_AT[0]
    at = [x.data_ptr() for x in (q, k, v, o, lse)]
    options = (spare,) * 6
    assert log == [
        ("split", (3, 1, 1), 7, (*at, *SPLIT_AT, *options, 0.5, 1.0, 1.0, 11, 12, True)),
        ("merge", (2, 1, 1), 7, (*at[3:], *MERGE_AT, spare, spare, 1.0, 13, True)),
    ]


def test_given_outputs_are_written(made):
    repeat, _, log = made(*qkv(), given=True)
    out = torch.empty(4, 2, 16), torch.empty(4, 2)
    result = repeat(*qkv(), None, out)
    assert result.o is out[0] and result.lse is out[1]
    assert log[0][3][3:5] == (out[0].data_ptr(), out[1].data_ptr())
    assert repeat(*qkv(), None, None) is None
    assert repeat(*qkv(), None, (out[0], out[1].mT.contiguous().mT)) is None
    assert repeat(*qkv(), None, (out[0],)) is None and repeat(*qkv(), None, 3) is None


def test_other_layouts_and_other_forms_take_the_ordinary_way(made):
    repeat, out, log = made(*qkv())
    q, k, v = qkv()
    for other in (
        (q[:3], k, v), (q.half(), k, v), (q, k[:8], v), (q, k, v.expand(9, 2, 16)),
        (q, k, None), (q, k, k), (q, k, "v"), (None, k, v), (q.requires_grad_(), k, v),
    ):  # fmt: skip
        assert repeat(*other, None, None) is None, other
    assert repeat(*qkv(), None, out) is None
    assert repeat(*qkv(), (None, torch.ones(2), None, None, None), None) is None
    assert not log


def test_addresses_between_vectors_take_the_ordinary_way(made):
    repeat, _, log = made(*qkv())
    _, k, v = qkv()
    odd = torch.empty(4 * 2 * 16 + 1)[1:].view(4, 2, 16)
    assert repeat(odd, k, v, None, None) is None and not log
    repeat, _, log = made(odd, k, v)
    assert repeat(odd, k, v, None, None) is None and not log


def test_values_that_are_keys_stay_so(made):
    q, k, _ = qkv()
    repeat, _, log = made(q, k, None)
    assert repeat(q, k, None, None, None) is not None
    assert log[0][3][1] == log[0][3][2] == k.data_ptr()
    alias = k.view(9, 1, 16)
    repeat = made(q, k, alias)[0]
    assert repeat(q, k, alias, None, None) is not None
    assert repeat(q, k, qkv()[2], None, None) is None


def test_options_change_with_every_run(made):
    sinks, scale = torch.randn(2), torch.ones(1)
    repeat, _, log = made(*qkv(), RunExtras(sinks, None, None, 0.5, scale))
    other = torch.randn(2)
    o, lse = repeat(*qkv(), (other, None, None, 0.25, scale), None)
    spare, args = SPLIT_AT[0], log[0][3]
    assert args[7:13] == (other.data_ptr(), spare, spare, spare, spare, scale.data_ptr())
    assert args[13:16] == (0.125, 1.0, 1.0)
    assert log[1][3] == (
        o.data_ptr(), lse.data_ptr(), *MERGE_AT, other.data_ptr(), scale.data_ptr(), 1.0, 13, True,
    )  # fmt: skip
    for bad in (
        (other, None, None, -1.0, scale), (other, None, None, float("nan"), scale),
        (other, None, None, True, scale), (other, None, None, scale, scale),
        (None, None, None, 0.5, scale), (torch.randn(3), None, None, 0.5, scale),
        (other.double(), None, None, 0.5, scale), (other, other, None, 0.5, scale),
    ):  # fmt: skip
        assert repeat(*qkv(), bad, None) is None, bad
    assert repeat(*qkv(), None, None) is None
    assert made(*qkv(), RunExtras(k_scale=1))[0] is None  # not a number a run may pass unchecked


def test_another_mode_of_torch_is_learnt(made):
    args = qkv()
    repeat, _, _ = made(*args)
    with torch.autocast("cpu", torch.bfloat16):
        repeat(*args, None, None)  # taken or not: torch decides what it compares
        repeat.watch(args, NONE)
        assert repeat(*args, None, None) is not None
    repeat.watch(args, NONE)
    assert repeat(*args, None, None) is not None


def test_profilers_and_other_devices_take_the_ordinary_way(made, monkeypatch):
    repeat, _, log = made(*qkv())
    monkeypatch.setattr(module, "is_hooked", lambda: True)
    assert repeat(*qkv(), None, None) is None
    monkeypatch.setattr(module, "is_hooked", lambda: False)
    monkeypatch.setattr(driver, "current_device", lambda: 1)
    assert repeat(*qkv(), None, None) is None and not log


def test_a_plan_goes_without_the_garbage_collector():
    import gc
    import weakref

    import attn_backends as ab
    from attn_backends.triton_native.backend import TritonBackend

    if not TritonBackend.capabilities.devices.count("cpu"):
        pytest.skip("needs Triton's interpreter")
    spec = ab.AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    backend = TritonBackend(spec)
    plan = backend.plan(ab.Batch.from_lengths([1, 1, 2], [4, 5, 0]))
    backend.run(torch.randn(4, 2, 16), torch.randn(9, 1, 16), torch.randn(9, 1, 16), plan)
    gone = weakref.ref(plan)
    gc.disable()
    try:
        del plan
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture
def layers():
    """``layers(**spec)``: a backend, a plan, and functions that make tensors and run both ways."""
    import attn_backends as ab
    from attn_backends.triton_native.backend import TritonBackend

    def make(**more):
        fields = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
        spec = ab.AttentionSpec(**{**fields, "page_size": 16, **more})
        backend = TritonBackend(spec)
        table = torch.randperm(300, device="cuda")[:258].reshape(2, 129).int()
        batch = ab.Batch.from_lengths([1, 1], [2049, 77], page_table=table)
        plan = backend.plan(batch)

        def tensors():
            q = torch.randn(2, 8, 64, device="cuda", dtype=torch.bfloat16)
            cache = torch.randn(2, 300, 16, 2, 64, device="cuda").to(spec.kv)
            return q, cache[0], cache[1]

        def both(*args, **options):
            """The repeat's result and the ordinary one; fails if nothing was repeated."""
            repeat, called = plan.repeat, []
            plan.repeat = lambda *a: called.append(repeat(*a)) or called[-1]
            result = backend.run(*args, plan, **options)
            plan.repeat = None
            fresh = backend.plan(batch)
            want = backend.run(*args, fresh, **{**options, "out": None})
            plan.repeat = repeat
            return called[0] is not None, result, want

        return backend, plan, tensors, both

    return make


def assert_repeats(found, repeated=True):
    was_repeated, got, want = found
    assert was_repeated is repeated
    assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)


@pytest.mark.gpu
def test_layers_repeat_bit_for_bit_on_a_gpu(layers):
    backend, plan, tensors, both = layers()
    for _ in range(2):  # the first may have to compile
        backend.run(*tensors(), plan)
    for _ in range(3):
        assert_repeats(both(*tensors()))
    out = (
        torch.empty(2, 8, 64, device="cuda", dtype=torch.bfloat16),
        torch.empty(2, 8, device="cuda"),
    )
    for _ in range(2):
        backend.run(*tensors(), plan, out=out)
    found = both(*tensors(), out=out)
    assert_repeats(found)
    assert found[1].o is out[0]
    q, k, v = tensors()
    odd = torch.empty(2 * 8 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(2, 8, 64)
    odd.copy_(q)
    assert_repeats(both(odd, k, v), repeated=False)
    with pytest.raises(ValueError, match=r"q\.dtype"):
        backend.run(q.half(), k, v, plan)
    with pytest.raises(ValueError, match="requires_grad"):
        backend.run(q.requires_grad_(), k, v, plan)


@pytest.mark.gpu
def test_options_of_each_layer_are_its_own_on_a_gpu(layers):
    backend, plan, tensors, both = layers(kv_dtype=torch.float8_e4m3fn)
    options = lambda: {"sinks": torch.randn(8, device="cuda"), "k_scale": 0.5,  # noqa: E731
                       "v_scale": torch.rand(1, device="cuda") + 0.5}  # fmt: skip
    for _ in range(2):
        backend.run(*tensors(), plan, **options())
    for scale in (0.25, 0.75):
        assert_repeats(both(*tensors(), **{**options(), "k_scale": scale}))
    with pytest.raises(ValueError, match="k_scale"):
        backend.run(*tensors(), plan, **{**options(), "k_scale": -1.0})


@pytest.mark.gpu
def test_graphs_streams_and_threads_repeat_on_a_gpu(layers):
    import threading

    backend, plan, tensors, _ = layers()
    args = tensors()
    want = backend.run(*args, plan)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        got = backend.run(*args, plan)
    got.o.zero_()
    graph.replay()
    assert torch.equal(got.o, want.o)
    results = []

    def work():
        results.extend(backend.run(*args, backend.plan(plan.batch)).o for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 15 and all(torch.equal(o, want.o) for o in results)


@pytest.mark.multi_gpu
def test_tensors_on_another_device_than_the_current_one_repeat(layers):
    with torch.cuda.device(1):
        backend, plan, tensors, _ = layers()
        args = tensors()
        want = backend.run(*args, plan)
    for _ in range(3):
        got = backend.run(*args, plan)
        assert got.o.device.index == 1 and torch.equal(got.o, want.o)
