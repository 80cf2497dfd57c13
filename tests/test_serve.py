"""`bench/serving.py`: nothing is lost, and every request gets the answer that it gets alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_models import PAGE, SMALL, VOCAB, generate, model, model_config

from quest import Pools, QuestConfig
from quest.bench.serving import PREEMPT, Engine, Request
from quest.integrations.transformers import QuestCache

LAYERS = 3
DENSE = QuestConfig(page_size=PAGE, sink_tokens=PAGE, recent_tokens=PAGE, budget=1.0)
SPARSE = DENSE.replace(budget=SMALL)
PACKED = QuestConfig(block_size=64, budget=24)


def engine(config: QuestConfig = DENSE, blocks: int = 60, **options: Any) -> Engine:
    pools = Pools(LAYERS, config=config, num_blocks=blocks, max_blocks=blocks, watermark=1)
    return Engine(model("llama"), pools, **{"chunk": 4 * config.block_size, **options})


def text(length: int, seed: int = 0) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, VOCAB) for _ in range(length)]


def mixed(count: int, longest: int = 50, answer: int = 24, system: int = 30) -> list[Request]:
    """Requests of mixed lengths, three quarters of which begin alike."""
    choose, shared = random.Random(1), text(system, 1)
    prompts = [shared * (i % 4 > 0) + text(choose.randint(1, longest), 2 + i) for i in range(count)]
    return [Request(prompt, choose.randint(1, answer), str(i)) for i, prompt in enumerate(prompts)]


def finish(served: Engine, requests: list[Request], per_step: int = 1000) -> list[Request]:
    """Submit so many before every step until all have ended; they come back in the order in which they do."""
    coming, ended = [*requests], list[Request]()
    while coming or served.busy:
        for request in coming[:per_step]:
            served.submit(request)
        del coming[:per_step]
        ended += served.step()
    return ended


def alone(request: Request, config: QuestConfig) -> list[int]:
    ids = torch.tensor([request.prompt])
    cache = QuestCache(model_config("llama"), config=config)
    return generate(model("llama"), ids, cache, request.max_new_tokens)[0, ids.shape[1] :].tolist()


def nothing_is_left(served: Engine) -> bool:
    usage = served.paged.usage()
    return not (served.busy or usage.used or served.paged.suspended or served.paged.waiting or served.paged.ids)


@pytest.mark.parametrize("preempt", PREEMPT)
def test_200_requests_in_a_pool_that_holds_a_few(preempt: str) -> None:
    requests = mixed(200)
    served = engine(blocks=32, preempt=preempt)
    ended = finish(served, requests)
    assert {*map(id, ended)} == {*map(id, requests)}
    assert len(ended) == 200
    assert served.counters.preemptions == sum(request.preemptions for request in requests) > 10
    assert served.counters.found > 150 * 28 / 2
    assert nothing_is_left(served)
    for request in requests:
        assert request.error is None
        assert len(request.times) == len(request.output)
        assert request.times == sorted(request.times)
        assert request.output == alone(request, DENSE)


@pytest.mark.parametrize("config", [SPARSE, PACKED], ids=["pages", "packed"])
def test_sparse_reads_continue_where_they_were_suspended(config: QuestConfig) -> None:
    served = engine(config, blocks=24 if config is SPARSE else 5, preempt="suspend")
    requests = mixed(24, 40 if config is SPARSE else 200)
    finish(served, requests, per_step=1)
    assert served.counters.preemptions
    assert nothing_is_left(served)
    assert [request.output for request in requests] == [alone(request, config) for request in requests]


def test_running_sequences_go_on_while_a_long_prompt_is_read() -> None:
    served = engine()
    first, second = Request(text(9), 20), Request(text(100, 1), 4)
    served.submit(first)
    served.step()
    served.submit(second)
    for step in range(7):  # of 16 tokens each
        assert len(second.output) == 0
        assert len(first.output) == 2 + step
        served.step()
    assert len(second.output) == 2  # one from the prompt, and one decoded in the same step


def test_what_an_answer_leaves_is_found() -> None:
    served = engine()
    (first,) = finish(served, [Request(text(21), 12)])
    later = Request(first.prompt + first.output + text(5, 1), 3)
    finish(served, [later])
    assert served.counters.found == 32
    assert served.counters.computed == 21 + 38 - 32
    assert later.output == alone(later, DENSE)


def test_stop_tokens() -> None:
    expected = alone(Request(text(30), 12), DENSE)
    (ended,) = finish(engine(stop={expected[4]}), [Request(text(30), 12)])
    assert ended.output == expected[: expected.index(expected[4]) + 1]


def test_what_can_never_fit_is_refused() -> None:
    served = engine(blocks=12)
    requests = [
        Request(text(40), 8),  # 47 tokens in 12 blocks
        Request(text(40), 10),
        Request(text(600), 1),
        Request([], 4),
        Request(text(4), 0),
        Request(text(5), 3),
    ]
    finish(served, requests)
    assert [request.error for request in requests] == [
        None,
        "needs 13 blocks, the pool has 12",
        "needs 600 tokens of context, the model has 512",
        "needs a prompt and an answer, got 0 and 4 tokens",
        "needs a prompt and an answer, got 4 and 0 tokens",
        None,
    ]
    assert [len(request.output) for request in requests] == [8, 0, 0, 0, 0, 3]
    assert nothing_is_left(served)


@pytest.mark.parametrize("config", [DENSE, PACKED], ids=["pages", "packed"])
@pytest.mark.parametrize("answered", [0, 3])
def test_an_error_is_one_requests_own(config: QuestConfig, answered: int) -> None:
    """It comes up in the middle of the model, where some layers have stored the step's tokens already."""
    config = config.replace(budget=1.0)
    served, requests = engine(config), mixed(12)
    bad = requests[5]
    bad.max_new_tokens = 9

    def fail(*_: Any) -> None:
        if bad.sequence in served.paged.ids and len(bad.output) == answered:
            raise FloatingPointError("not a number")

    hook = model("llama").model.layers[1].register_forward_hook(fail)
    try:
        ended = finish(served, requests, per_step=2)
    finally:
        hook.remove()
    assert len(ended) == 12
    assert bad.error == "FloatingPointError: not a number"
    assert len(bad.output) == answered
    assert nothing_is_left(served)
    for request in requests:
        if request is not bad:
            assert request.error is None
            assert request.output == alone(request, config)


def test_a_second_tier_that_fails_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sequence can't be stored or brought back, it is read anew."""
    served, requests = engine(blocks=30, preempt="suspend"), mixed(20)
    failures = []

    def sometimes(call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            failures.append(len(failures) % 2)
            if failures[-1]:
                raise OSError("disk full")
            return call(*args)

        return wrapped

    monkeypatch.setattr(served.pools, "store", sometimes(served.pools.store))
    monkeypatch.setattr(served.pools, "load", sometimes(served.pools.load))
    finish(served, requests)
    assert sum(failures) > 2
    assert nothing_is_left(served)
    assert [request.output for request in requests] == [alone(request, DENSE) for request in requests]


def test_blocks_that_other_caches_hold() -> None:
    """Nobody is left to make room: an error instead of a step without an end."""
    served = engine(blocks=12)
    other = QuestCache(model_config("llama"), prefix_cache=served.pools)
    generate(model("llama"), torch.tensor([text(20)]), other, 1)
    (ended,) = finish(served, [Request(text(40, 1), 2)])
    assert ended.error is not None
    assert ended.error.startswith("OutOfBlocks: extend: ")
    assert finish(served, [Request(text(20, 1), 2)])[0].error is None


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"Engine: chunk must be a multiple of the block size \(4\), got 6"):
        engine(chunk=6)
    with pytest.raises(ValueError, match=r"Engine: preempt must be one of recompute, suspend, got 'drop'"):
        engine(preempt="drop")
