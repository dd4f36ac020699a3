"""The plug against vLLM's own classes: what vLLM calls exists, and takes what vLLM passes."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.engine


def parameters(function):
    return inspect.signature(function).parameters


def test_nothing_abstract_is_left_open():
    from attn_backends.engines.vllm.backend import Backend
    from attn_backends.engines.vllm.builder import Builder
    from attn_backends.engines.vllm.impl import Impl

    for ours in (Backend, Builder, Impl):
        assert not inspect.isabstract(ours), ours.__abstractmethods__


@pytest.mark.parametrize("owner", ["backend", "builder", "impl"])
def test_every_override_takes_the_arguments_of_what_it_overrides(owner):
    from vllm.v1.attention import backend as theirs

    from attn_backends.engines.vllm import backend, builder, impl

    ours, base = {
        "backend": (backend.Backend, theirs.AttentionBackend),
        "builder": (builder.Builder, theirs.AttentionMetadataBuilder),
        "impl": (impl.Impl, theirs.AttentionImpl),
    }[owner]
    compared = 0
    for name, member in vars(ours).items():
        if name.startswith("_") and name != "__init__":
            continue
        there, here = getattr(base, name, None), getattr(ours, name)
        if there is None or not callable(here):
            continue
        compared += 1
        mine, kinds = parameters(here), {p.kind for p in parameters(here).values()}
        for at, (argument, _) in enumerate(parameters(there).items()):
            by_name = argument in mine or inspect.Parameter.VAR_KEYWORD in kinds
            by_place = inspect.Parameter.VAR_POSITIONAL in kinds
            assert by_name or by_place, f"{name}: {argument}"
            if argument in mine:
                assert list(mine).index(argument) == at, f"{name}: {argument} is elsewhere"
        assert member is not None
    assert compared >= 3


def test_the_layer_passes_what_the_constructor_takes():
    """The layer passes ten arguments in order, and the sinks by name."""
    from attn_backends.engines.vllm.impl import Impl

    first = list(parameters(Impl.__init__))[1:11]
    assert first == [
        "num_heads",
        "head_size",
        "scale",
        "num_kv_heads",
        "alibi_slopes",
        "sliding_window",
        "kv_cache_dtype",
        "logits_soft_cap",
        "attn_type",
        "kv_sharing_target_layer_name",
    ]


def test_the_layer_finds_its_kind_by_the_name_of_the_class():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from attn_backends.engines.vllm import backend_name, register

    register()
    member = AttentionBackendEnum[backend_name()]
    assert AttentionBackendEnum[member.get_class().get_name()] is member


def test_the_option_of_the_command_line_takes_the_name(monkeypatch):
    """As ``vllm serve MODEL --attention-backend NAME`` reads it."""
    from vllm.config.attention import AttentionConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from attn_backends.engines.vllm import backend_name, register

    register()
    monkeypatch.setattr(current_platform, "device_type", "cpu")  # defaults are made for a device
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    asked = parser.parse_args(["--model", "x", "--attention-backend", backend_name()])
    config = AttentionConfig(backend=EngineArgs.from_cli_args(asked).attention_backend)
    assert config.backend.get_class().get_name() == backend_name()


def test_the_shape_of_the_cache_is_what_the_engine_allocates():
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backend import AttentionBackend

    from attn_backends.engines.vllm.backend import Backend
    from attn_backends.engines.vllm.kv_cache import cache_views

    if hasattr(AttentionBackend, "customize_spec"):
        assert Backend.supported_kv_cache_layouts() is None
        return
    assert Backend.get_kv_cache_block_dim(16, 8, 64) == 0
    shape = Backend.get_kv_cache_shape(10, 16, 8, 64)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        order = Backend.get_kv_cache_stride_order()
    flat = torch.zeros(10 * 2 * 16 * 8 * 64)
    inverse = [order.index(i) for i in range(len(order))]
    cache = flat.view([shape[i] for i in order]).permute(inverse)
    assert cache.shape == shape
    k, v = cache_views(cache, torch.float32)
    assert k.shape == v.shape == (10, 16, 8, 64) and k.stride(-1) == 1


@pytest.mark.parametrize("window", [None, 5])
def test_a_layer_of_vllm_runs_through_the_plug(engine, monkeypatch, window):
    """vLLM's own layer, its operators and forward context; only the runner is the test's."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention

    from attn_backends.engines.vllm.backend import Backend
    from attn_backends.engines.vllm.impl import Impl

    made = engine(sliding_window=window)
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        monkeypatch.undo()  # the layer reads vLLM's own configuration
        layer = Attention(
            made.heads,
            made.dim,
            made.dim**-0.5,
            made.kv_heads,
            per_layer_sliding_window=window,
            prefix="model.layers.0.attn",
            attn_backend=Backend,
        )
        assert type(layer.impl) is Impl and layer.impl.spec == made.impl.spec
        layer.kv_cache = made.cache
        made.layer, made.impl = layer, layer.impl
        made.config.compilation_config.static_forward_context = {"layer": layer}
        for new in (9, 8, 1, 1):
            if not made.requests:
                made.request(21)
            (request,) = made.requests
            common = made.metadata([(request, new)])
            q = made.random(new, made.heads, made.dim)
            rows = slice(request.computed, request.computed + new)
            step = {layer.layer_name: made.builder.build(0, common)}
            slots = {layer.layer_name: common.slot_mapping}
            with torch.no_grad(), set_forward_context(step, config, slot_mapping=slots):
                out = layer(q, request.k[rows].contiguous(), request.v[rows].contiguous())
            want = made.expected(q, [(request, new)])
            request.computed += new
            torch.testing.assert_close(out.view_as(want).double(), want, rtol=1e-5, atol=1e-5)


def test_the_split_of_a_step_is_the_engines(engine):
    """``Requests.split`` finds the boundary that vLLM's own helper finds."""
    from vllm.v1.attention.backends.utils import split_decodes_and_prefills

    from attn_backends.engines.vllm.steps import Requests

    made = engine()
    requests = [made.request(8) for _ in range(4)]
    for news in ([1, 1, 3, 2], [4, 1, 1, 2], [1, 1, 1, 1], [2, 2, 5, 5]):
        for threshold in (1, 2):
            common = made.metadata(list(zip(requests, news)))
            decodes, prefills, decode_rows, prefill_rows = split_decodes_and_prefills(
                common, decode_threshold=threshold
            )
            decode, prefill = Requests.of(common, exact=True).split(threshold)
            got = [(0, 0) if x is None else (x.num_reqs, x.num_tokens) for x in (decode, prefill)]
            assert got == [(decodes, decode_rows), (prefills, prefill_rows)]


def test_the_share_of_a_rank_is_the_engines():
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    from attn_backends.engines.vllm.context_parallel import ContextParallel

    parallel = ContextParallel(2, 1, 4, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    lens = torch.arange(20, dtype=torch.int32)
    assert torch.equal(parallel._context_lens(lens), get_dcp_local_seq_lens(lens, 2, 1, 4))


@pytest.mark.parametrize(
    "all_to_all, name", [(False, "cp_lse_ag_out_rs"), (True, "dcp_a2a_lse_reduce")]
)
def test_ranks_exchange_states_as_vllm_was_told(monkeypatch, all_to_all, name):
    """``--dcp-comm-backend`` decides; both take what the plug passes."""
    from vllm.config import ParallelConfig
    from vllm.distributed import parallel_state

    from attn_backends.engines.vllm import context_parallel

    assert "dcp_comm_backend" in parameters(ParallelConfig)
    monkeypatch.setattr(parallel_state, "get_dcp_group", lambda: "the group")
    group, combine = context_parallel._collective(all_to_all)
    assert group == "the group" and combine.__name__ == name
    inspect.signature(combine).bind(None, None, group, return_lse=True)
