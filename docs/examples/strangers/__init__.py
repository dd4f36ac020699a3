"""Kernels nobody here wrote, as backends: what the conformance suite says of them.

``sglang_triton:SglangTriton``, ``vllm_triton:VllmTriton`` and ``vllm_triton:VllmDecode`` hand each
call to the Triton kernels inside the ``sglang`` and ``vllm`` wheels. The adapters translate
arguments and nothing more: they neither mend results nor go round a kernel's limits, so that a
failure in the report is the kernel's. What a kernel has no argument for is declared so, and
refused. Run them from the folder above::

    python -m attn_backends.conformance strangers.sglang_triton:SglangTriton --device cuda

They load from the installed packages, or from single files of their wheels: see ``sources``.
"""
