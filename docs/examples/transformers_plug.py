"""A transformers model that computes its attention through a backend of this library.

Needs transformers; the model is tiny and random, so nothing is downloaded. Run it with
``python docs/examples/transformers_plug.py``.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attn_backends as ab
from attn_backends.engines.transformers import capture_lse, enable

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()
prompts = torch.randint(3, 256, (2, 8))
padding = torch.ones_like(prompts)
padding[1, :3] = 0  # the second prompt is shorter: padded on the left


def generate() -> torch.Tensor:
    """Eight new tokens for each prompt, greedily."""
    return model.generate(
        prompts, attention_mask=padding, max_new_tokens=8, do_sample=False, pad_token_id=0
    )


with torch.no_grad():
    model.set_attn_implementation("sdpa")
    want = generate()

    # Inside the block, transformers knows "attn_backends", and a name for every backend.
    with enable() as handle:
        print("names:", ", ".join([handle.name, *handle.names.values()]))

        # The configuration chooses the backend: here a context, else a file, the environment, auto.
        model.set_attn_implementation(handle.name)
        with ab.use("torch_native"):
            print("through use():  same tokens as sdpa:", torch.equal(generate(), want))

        # Or the name chooses it.
        model.set_attn_implementation(handle.names["torch_native"])
        print("through a name: same tokens as sdpa:", torch.equal(generate(), want))

        # The other half of the state, for which transformers has no slot.
        with capture_lse() as lses:
            model(prompts, attention_mask=padding)
        print("LSE of each layer:", [tuple(lse.shape) for lse in lses])

        # What cannot be honoured is refused by name.
        try:
            model(prompts, output_attentions=True)
        except ab.UnsupportedCallError as error:
            print("refused:", error)
