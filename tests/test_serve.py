"""`quest bench serve`: no request is lost, each gets the answer that it gets alone; and the file they come from."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PAGE, SMALL, VOCAB, generate, model, model_config

from quest import Pools, QuestConfig
from quest.bench import serve, workload
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
    return answer(tuple(request.prompt), request.max_new_tokens, config)


@functools.cache
def answer(prompt: tuple[int, ...], max_new_tokens: int, config: QuestConfig) -> list[int]:
    cache = QuestCache(model_config("llama"), config=config)
    return generate(model("llama"), torch.tensor([prompt]), cache, max_new_tokens)[0, len(prompt) :].tolist()


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
    served = engine(config, blocks=24 if config is SPARSE else 6, preempt="suspend")
    requests = mixed(24, 40 if config is SPARSE else 60)
    finish(served, requests)
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


# --- the load --------------------------------------------------------------------------------------------------------


def test_arrivals_are_waited_for_only_while_there_is_work() -> None:
    clock, seen = serve.Clock(), []
    served = engine(clock=clock)
    requests = [Request(text(20, i), 3, str(i), arrival) for i, arrival in enumerate((2000.0, 0.0, 1000.0))]
    serve.serve(served, requests, clock, seen.extend)
    assert [request.id for request in seen] == ["1", "2", "0"]
    assert all(request.arrival <= request.times[0] < request.arrival + 500 for request in requests)
    assert 1000 < clock.skipped < clock()


LINE = {"arrival": 1, "prompt": "text", "max_new_tokens": 4}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 3: not JSON: "),
        ("[1]", r"line 3: a request must be a JSON object, got \[1\]"),
        ({"prompt": "a", "max_new_tokens": 4}, r"line 3: arrival is missing"),
        (
            LINE | {"budget": 3},
            r"line 3: unknown field 'budget'; known are arrival, prompt, max_new_tokens, system, id",
        ),
        (LINE | {"arrival": "0"}, r'line 3: arrival must be seconds, at least 0, got "0"'),
        (LINE | {"arrival": -1}, r"line 3: arrival must be seconds, at least 0, got -1"),
        (LINE | {"arrival": float("nan")}, r"line 3: arrival must be seconds, at least 0, got NaN"),
        (LINE | {"prompt": ""}, r'line 3: prompt must be text or token ids below 100, at least one, got ""'),
        (
            LINE | {"prompt": [5, 100]},
            r"line 3: prompt must be text or token ids below 100, at least one, got \[5, 100\]",
        ),
        (LINE | {"prompt": [-1] * 99}, r"line 3: prompt must be .* got \[-1, -1, [-1, ]*\.\.\.$"),
        (LINE | {"max_new_tokens": 0}, r"line 3: max_new_tokens must be a whole number, at least 1, got 0"),
        (LINE | {"max_new_tokens": True}, r"line 3: max_new_tokens must be a whole number, at least 1, got true"),
        (LINE | {"max_new_tokens": 2.5}, r"line 3: max_new_tokens must be a whole number, at least 1, got 2.5"),
        (LINE | {"system": 1}, r"line 3: system must be true, false or text, got 1"),
        (LINE | {"id": 7}, r"line 3: id must be text, got 7"),
        (LINE | {"id": "1"}, r"line 3: id must differ from those before, got '1', as in line 1"),
    ],
)
def test_a_line_that_is_no_request(tmp_path: Path, line: Any, message: str) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n\n{line if isinstance(line, str) else json.dumps(line)}\n")
    with pytest.raises(ValueError, match=message):
        workload.read(file, vocabulary=100)


def test_files_without_requests(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        workload.read(tmp_path / "requests.jsonl", 100)
    (tmp_path / "requests.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no requests"):
        workload.read(tmp_path / "requests.jsonl", 100)


class Letters:
    """A tokenizer whose tokens are letters, after one that opens a text."""

    bos_token_id = 1

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [*text.encode("latin-1", "replace")]}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("latin-1")


def test_made_up_requests_are_as_of_a_file(tmp_path: Path) -> None:
    rows = workload.make(Letters(), 50, rate=5.0, longest=200, seed=3)
    assert rows == workload.make(Letters(), 50, rate=5.0, longest=200, seed=3)
    assert rows != workload.make(Letters(), 50, rate=5.0, longest=200, seed=4)
    workload.write(tmp_path / "deep" / "requests.jsonl", rows)
    assert workload.read(tmp_path / "deep" / "requests.jsonl", 256) == rows
    requests = workload.to_requests(Letters(), rows)
    assert len({*map(tuple, (request.prompt[: 1 + workload.SYSTEM_LETTERS] for request in requests))}) == 1
    lengths = [len(request.prompt) - 1 - workload.SYSTEM_LETTERS for request in requests]
    assert 16 <= min(lengths) < 30 < 150 < max(lengths) <= 200
    assert 5 < requests[-1].arrival < 20
    for options in ({"longest": 15}, {"longest": 10**7}, {"rate": 0.0}):
        with pytest.raises(ValueError, match="--" + next(iter(options))):
            workload.make(Letters(), 1, **{"rate": 1.0, "longest": 20, **options})


def test_system_prompts() -> None:
    rows = [
        LINE | {"id": "a", "prompt": "ab", "system": "xy"},
        LINE | {"id": "b", "prompt": [7, 8], "system": "xy"},
        LINE | {"id": "c", "prompt": [7, 8]},
        LINE | {"id": "d", "prompt": "ab", "system": False},
    ]
    x, y, a, b = b"xyab"
    prompts = [request.prompt for request in workload.to_requests(Letters(), rows)]
    assert prompts == [[1, x, y, a, b], [1, x, y, 7, 8], [7, 8], [1, a, b]]


def test_bench_serve(tmp_path: Path) -> None:
    import demo_models
    from typer.testing import CliRunner

    from quest.cli import app

    folder, requests, file = demo_models.save(tmp_path / "model"), tmp_path / "requests.jsonl", tmp_path / "serve.json"
    system = (
        "You answer in bytes, whatever you are asked for; this is long enough for two blocks of sixty-four, see? " * 2
    )
    rows = [LINE | {"arrival": i / 50, "prompt": "abc " * 12, "system": system, "max_new_tokens": 30} for i in range(9)]
    rows.append(LINE | {"prompt": "too long " * 99})
    workload.write(requests, rows)
    options = ["--blocks", "40", "--blocks", "8", "--budget", "64", "--chunk", "128", "--json", str(file)]
    command = ["bench", "serve", "--model", str(folder), "--requests", str(requests)]
    result = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    assert "needs 894 tokens of context, the model has 640" in result.output
    assert "64 tokens" in result.output
    rows = json.loads(file.read_text())["rows"]
    assert [(row["reads"], row["blocks"]) for row in rows] == [(x, n) for n in (40, 8) for x in ("dense", "sparse")]
    for row in rows:
        assert row["finished"] == 9
        assert [*row["errors"]] == ["10"]
        assert row["output_tokens"] == 9 * 30
        assert row["hit_rate"] > 0.5
        assert row["used_blocks"] <= row["blocks"]
        assert row["shared_blocks"] >= 3
        assert 0 < row["first_token_s"]["median"] <= row["first_token_s"]["p95"]
        assert (row["bytes_of_dense"] == 1) == (row["reads"] == "dense")
    refused = CliRunner().invoke(app, [*command, "--chunk", "100"])
    assert refused.exit_code == 2
    assert "chunk must be a multiple of the block size (64), got 100" in refused.output
