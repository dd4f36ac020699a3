"""Greedy generation with a transformers model, and its comparison with another attention.

Two attentions are compared on the same tokens: the second run is forced along the first run's
path, so that step i of both has seen the same text, and their logits differ by arithmetic alone.
Both runs take the same steps (one prefill, then one token at a time).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidInputError
from .console import MissingPackageError

#: Largest |logit difference| to the reference that float32 may show. Logits of language models are
#: some tens; two orders of summation of the same float32 products differ by less than 1e-4 there.
FP32_TOLERANCE = 1e-3

Tokens = Callable[[str, int], None]


@dataclass
class LoadedModel:
    """A model and its tokenizer, ready to generate.

    Attributes:
        model: A ``transformers`` causal language model in evaluation mode.
        tokenizer: Its tokenizer.
        source: File or folder that it came from.
        load_seconds: Time to load both.
    """

    model: Any
    tokenizer: Any
    source: Path
    load_seconds: float


@dataclass(frozen=True)
class Run:
    """One greedy generation.

    Attributes:
        tokens: New token ids, the end token included if it came.
        logits: ``[N, V]`` float32 on the CPU, before each new token.
        first_token_seconds: From the call to the first token: prefill, and set-up on a first run.
        tokens_per_second: Decode rate after the first token; None if there was only one.
    """

    tokens: list[int]
    logits: torch.Tensor
    first_token_seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class Comparison:
    """How far a run is from the reference on the same tokens.

    Attributes:
        max_logit_difference: Largest absolute difference over all steps and the vocabulary.
        max_logit: Largest absolute reference logit, for scale.
        tolerance: What the difference may be.
        tolerance_basis: How the tolerance was derived.
        within: Whether it holds, NaN counting as a failure.
        tokens_identical: Whether the reference would have chosen the same tokens.
        first_difference: First step at which it would not, or None.
        margin: Reference's logit of its own choice minus that of ours, at that step.
    """

    max_logit_difference: float
    max_logit: float
    tolerance: float
    tolerance_basis: str
    within: bool
    tokens_identical: bool
    first_difference: int | None
    margin: float | None


def require_packages(gguf: bool) -> None:
    """Raise MissingPackageError unless what loading needs is installed."""
    names = ("transformers", "accelerate", "gguf") if gguf else ("transformers",)
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    pip = "pip install 'attn-backends[transformers]'"
    if missing:
        raise MissingPackageError(f"generate needs {', '.join(missing)}: {pip}")
    try:
        importlib.import_module("transformers")
    except Exception as error:  # a broken install raises anything
        text = f"{type(error).__name__}: {error}"
        raise MissingPackageError(f"transformers does not import ({text}): {pip}") from error


def load(source: Path, dtype: torch.dtype, device: torch.device, attention: str) -> LoadedModel:
    """Load a model folder or a GGUF file, without asking any network.

    Args:
        source: Folder with ``config.json``, weights and tokenizer; or a ``.gguf`` file.
        dtype: Of the weights and the computation.
        device: Where the model runs.
        attention: transformers' name of the attention to start with.

    Raises:
        InvalidInputError: There is no such model, or transformers cannot load it.
        MissingPackageError: A package is not installed, or broken.
    """
    gguf = source.suffix == ".gguf"
    if not (source.is_file() if gguf else (source / "config.json").is_file()):
        allowed = "a folder with config.json, or a .gguf file"
        raise InvalidInputError.of("model", str(source), allowed)
    require_packages(gguf)
    start = time.perf_counter()
    with _quiet_progress():
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        folder = source.parent if gguf else source
        place: dict[str, Any] = {"local_files_only": True}
        weights: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
        if gguf:
            place["gguf_file"] = source.name
            # Packed weights would compute in float32 through kernels of their own.
            weights["quantization_config"] = GgufConfig(dequantize=True)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **place)
            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), **place, **weights)
        except (OSError, ValueError, ImportError, KeyError) as error:
            text = f"{type(error).__name__}: {error}"
            raise InvalidInputError(f"transformers cannot load {source}: {text}") from error
    model = model.to(device).eval()
    return LoadedModel(model, tokenizer, source, time.perf_counter() - start)


@contextlib.contextmanager
def _quiet_progress() -> Iterator[None]:
    """Silence the bars of libraries: the command shows its own, and JSON output shows none."""
    from tqdm import tqdm

    logging: Any = importlib.import_module("transformers.utils.logging")
    shown, original = logging.is_progress_bar_enabled(), tqdm.__init__
    tqdm.__init__ = functools.partialmethod(original, disable=True)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        tqdm.__init__ = original
        if shown:
            logging.enable_progress_bar()


def to_float32(loaded: LoadedModel) -> None:
    """Widen the weights in place, exactly; the model then computes in float32."""
    # Called on the base class: transformers refuses it on models read from quantized files, whose
    # weights were in fact already expanded.
    torch.nn.Module.to(loaded.model, torch.float32)


def encode(loaded: LoadedModel, prompt: str, *, chat: bool) -> dict[str, torch.Tensor]:
    """Turn a prompt into model inputs ``[1, S]``.

    Args:
        loaded: The model.
        prompt: What the user says.
        chat: Wrap it as the user's turn if the tokenizer has a chat template.

    Raises:
        InvalidInputError: The prompt has no tokens.
    """
    tokenizer = loaded.tokenizer
    if chat and tokenizer.chat_template:
        turn = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"]
    if not ids.numel():
        raise InvalidInputError.of("prompt", repr(prompt), "text of at least one token")
    device = loaded.model.device
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def decode_text(tokenizer: Any, tokens: list[int]) -> str:
    """Text of tokens as it is, without special tokens."""
    text: str = tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def generate(
    loaded: LoadedModel,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    *,
    forced: list[int] | None = None,
    on_text: Tokens | None = None,
) -> Run:
    """Generate greedily, or along given tokens, keeping every step's logits.

    Args:
        loaded: The model; its current attention is used.
        inputs: From ``encode``.
        max_new_tokens: Most tokens to generate.
        forced: Tokens to take whatever the logits say; None takes the largest logit.
        on_text: Called with each new piece of text and the number of tokens so far.

    Returns:
        The tokens, logits and times.
    """
    from transformers import LogitsProcessorList

    clock = _Clock(loaded.tokenizer, on_text)
    processors = LogitsProcessorList()
    if forced is not None:
        max_new_tokens = len(forced)
        processors.append(_Force(forced, inputs["input_ids"].shape[1]))
    with torch.inference_mode():
        start = time.perf_counter()
        result = loaded.model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            output_logits=True,
            return_dict_in_generate=True,
            logits_processor=processors,
            streamer=clock,
        )
    tokens = result.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    logits = torch.stack([step[0].float().cpu() for step in result.logits])
    first, last = clock.times[0], clock.times[-1]
    rate = (len(tokens) - 1) / (last - first) if len(tokens) > 1 and last > first else None
    return Run(tokens, logits, first - start, rate)


class _Clock:
    """A streamer for ``generate``: notes when each token came and decodes what is complete."""

    def __init__(self, tokenizer: Any, on_text: Tokens | None) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.times: list[float] = []
        self._ids: list[int] = []
        self._shown = ""
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._saw_prompt:  # generate() streams the prompt first
            self._saw_prompt = True
            return
        self.times.append(time.perf_counter())
        self._ids += value.flatten().tolist()
        if self.on_text is not None:
            text = self._decode()
            # An unfinished character decodes to the replacement sign: wait for the rest of it.
            whole = text.startswith(self._shown) and not text.endswith("\ufffd")
            self._emit(text if whole else self._shown)

    def end(self) -> None:
        if self.on_text is not None:
            self._emit(self._decode())

    def _decode(self) -> str:
        return decode_text(self.tokenizer, self._ids)

    def _emit(self, text: str) -> None:
        piece, self._shown = text[len(self._shown) :], text
        assert self.on_text is not None
        self.on_text(piece, len(self._ids))


class _Force:
    """A logits processor that leaves one choice: the given token of this step."""

    def __init__(self, tokens: list[int], prompt_length: int) -> None:
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.tokens[input_ids.shape[1] - self.prompt_length]] = 0.0
        return forced


@contextlib.contextmanager
def recorded_choices() -> Iterator[Counter[tuple[str, str]]]:
    """Count, by (phase, backend), the attention calls that the plug hands to a backend.

    It listens where the plug asks the registry, so what is shown is what ran.
    """
    attention: Any = importlib.import_module("attn_backends.engines.transformers.attention")
    counts: Counter[tuple[str, str]] = Counter()
    original = attention.select

    def recording(spec: Any, **question: Any) -> Any:
        selection = original(spec, **question)
        counts[selection.phase, selection.name] += 1
        return selection

    attention.select = recording
    try:
        yield counts
    finally:
        attention.select = original


def compare(ours: Run, reference: Run, dtype: torch.dtype, exact: Run | None) -> Comparison:
    """Compare a run with the reference's run along the same tokens.

    Args:
        ours: The run in question.
        reference: The reference in the same dtype, forced along ``ours.tokens``.
        dtype: The model's dtype.
        exact: For half types: the reference in float32, with the same weights, along the same
            tokens. The tolerance is twice the reference's own largest error: each of the two
            runs may be that far from the exact result, in opposite directions.
    """
    steps = len(ours.tokens)
    gap = (ours.logits - reference.logits).abs().max().item()
    if exact is None:
        tolerance = FP32_TOLERANCE
        basis = "stated for float32, absolute"
    else:
        error = (reference.logits - exact.logits).abs().max().item()
        name = str(dtype).removeprefix("torch.")
        tolerance = 2 * error
        basis = f"twice the reference's own largest error in {name} against float32 ({error:.3g})"
    choice = reference.logits.argmax(-1)
    differs = (choice != torch.tensor(ours.tokens)).nonzero().flatten().tolist()
    margin = None
    if differs:
        row = reference.logits[differs[0]]
        margin = (row.max() - row[ours.tokens[differs[0]]]).item()
    assert reference.logits.shape[0] == steps
    return Comparison(
        max_logit_difference=gap,
        max_logit=reference.logits.abs().max().item(),
        tolerance=tolerance,
        tolerance_basis=basis,
        within=gap <= tolerance,
        tokens_identical=not differs,
        first_difference=differs[0] if differs else None,
        margin=margin,
    )


__all__ = [
    "FP32_TOLERANCE",
    "Comparison",
    "LoadedModel",
    "Run",
    "compare",
    "decode_text",
    "encode",
    "generate",
    "load",
    "recorded_choices",
    "require_packages",
    "to_float32",
]
