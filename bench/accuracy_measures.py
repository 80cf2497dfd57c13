"""What `quest bench accuracy` measures of one method and budget: texts, and tasks with an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quest.bench import accuracy_numbers as numbers
from quest.bench.accuracy_methods import Method
from quest.bench.simulate import Notes, Prompt, Simulated, read_prompt
from quest.bench.tasks import Sample, score
from quest.bytes import StepBytes, model_bytes
from quest.config import QuestConfig
from quest.passkey import encode, opening

__all__ = ["Document", "answer_score", "cut", "measure_text", "read_document"]

ITEMSIZE = 2  # bytes of a number as serving would store it (bf16); accuracy is measured in fp32


@dataclass
class Document:
    """A text whose end is decoded: `fed` goes in token by token, `targets` follow, `dense` holds dense logits."""

    prompt: Prompt
    fed: list[int]
    targets: Tensor
    dense: Tensor  # [tokens, vocabulary]
    nll: np.ndarray  # dense, [tokens]


def cut(tokenizer: Any, text: str, documents: int, context: int) -> list[list[int]]:
    """Stretches of `context` tokens, as far apart in the text as can be.

    Raises:
        ValueError: the text is too short for them not to overlap.
    """
    tokens, first = encode(tokenizer, text), opening(tokenizer)
    length = context - len(first)
    if len(tokens) < documents * length:
        raise ValueError(
            f"--text must hold {documents} documents of {length:,} tokens, got {len(tokens):,}: give a longer text, "
            "fewer --documents or a shorter --context"
        )
    gap = (len(tokens) - length) // max(1, documents - 1)
    return [first + tokens[i * gap : i * gap + length] for i in range(documents)]


def read_document(model: Any, tokens: Sequence[int], last: int, sum_mass: bool) -> Document:
    """Read a text but for its last tokens, and take dense attention's predictions of those."""
    begin = len(tokens) - last - 1
    prompt = read_prompt(model, tokens[:begin], last + 1, sum_mass=sum_mass)
    fed, targets = list(tokens[begin:-1]), torch.tensor(tokens[begin + 1 :])
    dense = Simulated(model, prompt).feed(fed)
    return Document(prompt, fed, targets, dense, numbers.compare(dense, dense, targets)["nll"])


def measure_text(
    model: Any, documents: Sequence[Document], method: Method, budget: int | None
) -> tuple[dict[str, Any], bool]:
    """Divergence from dense, perplexity, recall and bytes read per token, over the ends of all documents; and whether
    the perplexity is below dense's."""
    found, notes = [], []
    for document in documents:
        reader = method.start(model, document.prompt, budget)
        found.append(numbers.compare(document.dense, reader.feed(document.fed), document.targets))
        notes.append(reader.notes)
    values = numbers.summarise(found) | recalls(notes)
    beats = numbers.beats([document.nll for document in documents], [one["nll"] for one in found])
    return values | bytes_read(model, documents, method, budget, notes), beats


def recalls(notes: Sequence[Notes]) -> dict[str, Any]:
    """`recall`: share of the dense attention mass that falls in what is read: mean over layers, and by layer (null for
    one that has none to choose from, 1 for one left dense). `lost_mass` is the rest. `hits`: share of the read tokens
    that are among the heaviest, of simulated methods only."""
    first = notes[0]
    kept = {i: torch.cat([x.flatten() for one in notes for x in one.recall[i]]) for i in first.recall}
    by_layer = [
        float(kept[i].mean()) if i in kept else 1.0 if i in first.layers else None for i in range(first.num_layers)
    ]
    known = [x for x in by_layer if x is not None]
    mean = sum(known) / len(known)
    hits = [x.flatten() for one in notes for layer in one.hits.values() for x in layer]
    return {
        "recall": mean,
        "lost_mass": 1 - mean,
        "recall_by_layer": by_layer,
        "hits": float(torch.cat(hits).mean()) if hits else None,
    }


def bytes_read(
    model: Any, documents: Sequence[Document], method: Method, budget: int | None, notes: Sequence[Notes]
) -> dict[str, Any]:
    """Bytes per token, of all layers: mean over the decoded tokens. Those of a config are `quest.bytes`'; a rule's are
    the rows of K and V that it read, and no summaries."""
    config = method.at(budget)
    context = documents[0].prompt.length + len(documents[0].fed)
    contexts = range(documents[0].prompt.length + 1, context + 1)
    steps = [model_bytes(model.config, config or QuestConfig(), tokens, ITEMSIZE) for tokens in contexts]
    total = sum(steps, StepBytes())
    full = documents[0].prompt.layers
    _, heads, _, width = documents[0].prompt.cache.layers[full[0]].keys.shape
    sparse = [i for i in full if config is None or not config.layer(i).dense]
    if budget is None:
        read, summaries = total.dense, 0
    elif config is not None:
        read, summaries = total.total, total.summaries
    else:
        row = 2 * width * ITEMSIZE
        counted = sum(sum(one.tokens_read) for one in notes) / len(notes)
        read, summaries = total.dense - sum(contexts) * heads * len(full) * row + round(counted) * row, 0
    return {
        "context": context,
        "dense": budget is None or budget >= context,
        "summary_bytes_per_token": summaries / (sum(contexts) * heads * max(1, len(sparse))),
        "bytes_per_token": read / len(steps),
        "bytes_fraction": read / total.dense,
    }


def answer_score(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    sample: Sample,
    method: Method,
    budget: int | None,
    sparse_question: bool,
) -> float:
    """Share of the answers found in the greedy continuation. `prompt` holds the sample up to its question, of which
    the last token is always read sparsely, so that all of the answer comes from sparse reads; with `sparse_question`
    the others are too."""
    read = 0 if sparse_question else len(sample.question) - 1
    reader = method.start(model, prompt.more(model, sample.question[:read]), budget)
    stop = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])}
    token = int(reader.feed(sample.question[read:])[-1].argmax())
    answer, found = [], 0.0
    while token not in stops:
        answer.append(token)
        found = score(sample.answers, tokenizer.decode(answer))
        if found == 1 or len(answer) == sample.new_tokens:
            break
        token = int(reader.feed([token])[-1].argmax())
    return found
