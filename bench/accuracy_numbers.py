"""Statistics of `quest bench accuracy`: divergence from dense per token, and intervals for means."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["beats", "compare", "interval", "summarise"]

RESAMPLES = 2000


def compare(dense: Tensor, sparse: Tensor, targets: Tensor) -> dict[str, np.ndarray]:
    """Per token: `kl` KL(dense || sparse) in nats, `nll` of the text's next token, `top1` whether both would choose
    the same one.

    Args:
        dense, sparse: logits [tokens, vocabulary]; targets: [tokens], the tokens that follow.
    """
    kl, nll, top1 = [], [], []
    for p, q, target in zip(dense, sparse, targets.tolist(), strict=True):  # fp64, a row at a time
        p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        kl.append(max(0.0, float((p.exp() * (p - q)).sum())))
        nll.append(-float(q[target]))
        top1.append(float(p.argmax() == q.argmax()))
    return {"kl": np.array(kl), "nll": np.array(nll), "top1": np.array(top1)}


def summarise(found: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """The numbers of a row from those of `compare`, one dict per document, all of as many tokens."""
    kl, nll, top1 = (np.stack([one[name] for one in found]) for name in ("kl", "nll", "top1"))
    return {
        "kl": float(kl.mean()),
        "kl_ci95": interval(kl),
        "kl_median": float(np.median(kl)),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "share_above_1_nat": float((kl > 1).mean()),
        "perplexity": float(np.exp(nll.mean())),
        "top1_agreement": float(top1.mean()),
    }


def interval(values: np.ndarray, seed: int = 0) -> list[float]:
    """95 % confidence interval of the mean of [documents, tokens], by bootstrap in two stages: documents are drawn
    with replacement, then tokens of each, since tokens of one document are alike."""
    rng = np.random.default_rng(seed)
    documents, tokens = values.shape
    means = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(documents, size=(documents, 1))
        means.append(values[drawn, rng.integers(tokens, size=(documents, tokens))].mean())
    return [float(x) for x in np.quantile(means, [0.025, 0.975])]


def beats(dense: list[np.ndarray], sparse: list[np.ndarray]) -> bool:
    """Whether the sparse perplexity is below dense's beyond chance: the interval of the tokens' differences in `nll`
    (a list of [tokens] per document) lies below 0."""
    return interval(np.stack(sparse) - np.stack(dense))[1] < 0
