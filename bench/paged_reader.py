"""The product's own path, token by token, as a reader like `quest.bench.simulate.Simulated`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quest.bench.simulate import Prompt, logits_of
from quest.config import QuestConfig
from quest.measure import Decoder

__all__ = ["Paged"]


class Paged(Decoder):
    """A model that decodes behind a prompt over a `QuestCache`.

    Args:
        sample: of every so many tokens of a `feed`, one is looked at for the recall.

    The recall in its `notes` is `exp(lse - dense lse)`, so it holds whatever format the summaries have.
    """

    def __init__(self, model: Any, prompt: Prompt, config: QuestConfig, *, sample: int = 8) -> None:
        super().__init__(model, prompt.cache, config)
        self.sample = sample
        self.notes = prompt.notes()
        self._sampled = False
        self._decode = self.cache.paged.decode
        self.cache.paged.decode = self._watched

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens one by one; logits [tokens, vocabulary] of what follows each."""
        rows = []
        for i, token in enumerate(tokens):
            self._sampled = len(tokens) > 1 and i % self.sample == 0
            rows.append(self.step(token))
        return torch.stack(rows)

    def _watched(self, layer: int, query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = self._decode(layer, query, *args, **options)
        if self._sampled and options["sinks"] is None:
            key, _ = self.cache.paged.dense(layer)
            scale = options["softmax_scale"] or query.shape[-1] ** -0.5
            heads = query if options.get("heads_first") else query.transpose(1, 2)
            dense = logits_of(heads.float(), key.float(), scale, options["softcap"]).logsumexp(-1)
            self.notes.recall[layer].append((lse[0].T.reshape(dense.shape) - dense).exp().clamp_max(1.0))
        return out, lse
