"""A tiny random model with a tokenizer of its own, as a transformers folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LIMIT = 640
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"


def save(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A Llama of 2 layers that reads bytes, at most `LIMIT` of them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<s>", "</s>", *letters])}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=len(vocabulary),
        max_position_embeddings=LIMIT,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
