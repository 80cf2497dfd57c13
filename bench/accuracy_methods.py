"""The methods of `quest bench accuracy`: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from quest.bench.paged_reader import Paged
from quest.bench.selection import RECENT, SINK, Evict, OraclePages, QuestPages, Rule, Window
from quest.bench.simulate import Prompt, Simulated
from quest.config import QuestConfig

__all__ = ["METHODS", "QUICK", "Method", "check"]

Kind = Literal["dense", "sparse", "loses", "oracle"]
Reader = Simulated | Paged


@dataclass(frozen=True)
class Method:
    """A way of reading a KV cache.

    Args:
        what: for people.
        kind: "sparse" can be run as it is, "loses" forgets tokens for good, "oracle" knows the attention beforehand.
        config: what the product runs with, at every budget. With a `rule` beside it, only its bytes and dense layers
            count, and the rule is simulated.
        rule: makes the simulated rule for a budget.
    """

    what: str
    kind: Kind = "sparse"
    config: QuestConfig | None = None
    rule: Callable[[int], Rule] | None = None

    def at(self, budget: int | None) -> QuestConfig | None:
        """The config for a budget, None without one."""
        return None if self.config is None or budget is None else self.config.replace(budget=budget)

    def start(self, model: Any, prompt: Prompt, budget: int | None) -> Reader:
        """A reader that decodes behind the prompt."""
        if budget is None:
            return Simulated(model, prompt)
        config = self.at(budget)
        if self.rule is None:
            assert config is not None, self
            return Paged(model, prompt, config)
        return Simulated(model, prompt, self.rule(budget), dense=config.dense_layers if config else ())

    @property
    def sums_mass(self) -> bool:
        """Whether it needs `read_prompt(sum_mass=True)`."""
        return self.rule is not None and getattr(self.rule(SINK + RECENT), "accumulated", False)

    def settings(self, budget: int | None) -> str:
        """All that its results depend on, as text."""
        return repr((self.at(budget), self.rule(budget) if self.rule and budget else None))


PAGE_4 = QuestConfig(page_size=4, summary_bits=4, coarse_size=16, coarse_keep=0.25, coarse_slack=0.4)

METHODS: dict[str, Method] = {
    "dense": Method("everything", "dense"),
    "window": Method("sinks and the newest tokens", "loses", rule=Window),
    "snapkv": Method("tokens kept by the attention of the prompt's end", "loses", rule=Evict),
    "h2o": Method("tokens kept by the attention of the whole prompt", "loses", rule=partial(Evict, accumulated=True)),
    "quest-unforced": Method(
        "Quest, forced to read the open page only",
        config=QuestConfig.paper(sink_tokens=0, recent_tokens=1),
        rule=partial(QuestPages, sink_tokens=0, recent_tokens=1),
    ),
    "paper": Method("Quest as published, with forced pages", config=QuestConfig.paper()),
    "paper-16-16": Method(
        "Quest as published, with one sink page and one recent page",
        config=QuestConfig.paper(sink_tokens=16, recent_tokens=16),
    ),
    "ours": Method("QuestConfig()", config=QuestConfig()),
    "ours-long": Method("QuestConfig.long()", config=QuestConfig.long()),
    "ours-page-4": Method("pages of 4 tokens, 4 bits, two levels", config=PAGE_4),
    "ours-page-16": Method("pages of 16 tokens, in K's dtype", config=QuestConfig(page_size=16)),
    "oracle-16": Method("the best pages of 16 tokens", "oracle", rule=partial(OraclePages, page_size=16)),
    "oracle-4": Method("the best pages of 4 tokens", "oracle", rule=partial(OraclePages, page_size=4)),
    "oracle-1": Method("the best tokens", "oracle", rule=partial(OraclePages, page_size=1)),
}
QUICK = ("dense", "window", "paper", "ours", "oracle-16")


def check(names: list[str], budgets: list[int]) -> None:
    """Raise on a method that isn't there, or a budget that some method can't have."""
    if unknown := [name for name in names if name not in METHODS]:
        raise ValueError(f"--methods must be among {', '.join(METHODS)}, got {', '.join(map(repr, unknown))}")
    for budget in budgets:
        if budget < SINK + RECENT:
            raise ValueError(f"--budgets must hold the forced {SINK} + {RECENT} tokens of every method, got {budget}")
        for name in names:
            METHODS[name].at(budget)
