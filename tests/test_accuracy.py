"""`quest bench accuracy` on tiny models: the simulator against the real path, resuming, what is written and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")

import demo_models
import tiny_models
from test_cli import refused, run

from quest import QuestConfig
from quest.bench import accuracy, accuracy_measures, accuracy_numbers, accuracy_plot, accuracy_report
from quest.bench.accuracy_methods import METHODS, Method
from quest.bench.accuracy_store import Store
from quest.bench.paged_reader import Paged
from quest.bench.selection import Evict, OraclePages, QuestPages, Window
from quest.bench.simulate import Prompt, Simulated, read_prompt
from quest.bytes import step_bytes
from quest.passkey import document

PROMPT, END = 240, 272
SETTINGS = replace(accuracy.QUICK, tokens=8, documents=2, passkey=300, depths=(0.5,), lengths=(460, 480), samples=1)
TEXT = document()[:4000]


def prompt_of(family: str) -> tuple[Any, list[int], Prompt]:
    net = tiny_models.model(family, "sdpa")
    tokens = tiny_models.prompt(1, END)[0].tolist()
    return net, tokens, read_prompt(net, tokens[:PROMPT], END - PROMPT, sum_mass=True)


@pytest.fixture(autouse=True)
def same_attention() -> Any:
    """Models of `tiny_models` are shared between tests."""
    yield
    for family in ("llama", "smollm2", "gemma3"):
        tiny_models.model(family, "sdpa").set_attn_implementation("sdpa")


@pytest.mark.parametrize("family", ["llama", "smollm2", "gemma3"])
@pytest.mark.parametrize("budget", [64, 96])
def test_the_simulator_is_the_real_path(family: str, budget: int) -> None:
    net, tokens, prompt = prompt_of(family)
    real = Paged(net, prompt, QuestConfig.paper(budget=budget, dense_layers=(0,)), sample=1)
    simulated = Simulated(net, prompt, QuestPages(budget), dense=(0,), sample=1)
    want = real.feed(tokens[PROMPT:])
    torch.testing.assert_close(simulated.feed(tokens[PROMPT:]), want, atol=2e-4, rtol=2e-4)
    dense = Simulated(net, prompt).feed(tokens[PROMPT:])
    assert (want - dense).abs().max() > 0.1
    for layer, parts in simulated.notes.recall.items():
        torch.testing.assert_close(torch.cat(real.notes.recall[layer], -1), parts[0], atol=1e-4, rtol=1e-4)
    one_by_one = Simulated(net, prompt, QuestPages(budget), dense=(0,))
    singly = torch.cat([one_by_one.feed([token]) for token in tokens[PROMPT:]])
    torch.testing.assert_close(singly, want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_budget_that_covers_the_context_is_dense(family: str) -> None:
    net, tokens, prompt = prompt_of(family)
    net.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = net(torch.tensor([tokens])).logits[0, PROMPT:]
    rules = [None, Window(END), OraclePages(END, 16), OraclePages(END, 1), QuestPages(END), Evict(END)]
    readers = [Simulated(net, prompt, rule) for rule in [*rules, Evict(END + PROMPT, accumulated=True)]]
    readers.append(Paged(net, prompt, QuestConfig(budget=END)))
    for reader in readers:
        logits = reader.feed(tokens[PROMPT:])
        numbers = accuracy_numbers.compare(want, logits, torch.tensor(tokens[PROMPT:]))
        assert numbers["kl"].max() < 1e-6
        assert numbers["top1"].all()


def test_a_longer_prompt_is_one_prompt() -> None:
    net, tokens, whole = prompt_of("llama")
    short = read_prompt(net, tokens[:200], END - 200, sum_mass=True)
    longer = short.more(net, tokens[200:PROMPT])
    assert (short.length, longer.length) == (200, PROMPT)
    for layer, seen in longer.observed.items():
        torch.testing.assert_close(seen.queries, whole.observed[layer].queries, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(seen.mass, whole.observed[layer].mass, atol=1e-3, rtol=1e-4)
    fed = tokens[PROMPT:]
    for rule in (lambda: Evict(64), lambda: Evict(64, accumulated=True), lambda: OraclePages(64, 4)):
        got, want = (Simulated(net, prompt, rule()).feed(fed) for prompt in (longer, whole))
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def test_bytes_of_methods() -> None:
    """By hand: 3 layers, 2 KV heads of 8 numbers; a row of K and V has 2 * 8 * 2 bytes."""
    net, tokens, _ = prompt_of("llama")
    one = accuracy_measures.read_document(net, tokens, 16, sum_mass=True)
    contexts = range(END - 16, END)  # seen by each of the 16 tokens that are decoded
    assert one.prompt.length == contexts[0] - 1

    def counted(method: Method, budget: int | None) -> dict[str, Any]:
        return accuracy_measures.measure_text(net, [one], method, budget)[0]

    mean = sum(contexts) / 16
    row = 3 * 2 * 32
    dense = counted(METHODS["dense"], None)
    assert (dense["bytes_per_token"], dense["dense"], dense["recall"]) == (mean * row, True, 1.0)
    assert counted(METHODS["oracle-1"], 64)["bytes_per_token"] == 64 * row
    assert counted(METHODS["window"], 64)["bytes_per_token"] == 64 * row
    assert counted(METHODS["snapkv"], 64)["bytes_per_token"] == pytest.approx((64 + 8.5) * row)  # 1 to 16 new tokens
    for method in (METHODS["ours-page-16"],):
        found = counted(method, 64)
        config = method.at(64)
        assert config is not None
        pages = [-(-context // config.page_size) for context in contexts]
        assert found["summary_bytes_per_token"] == pytest.approx(sum(pages) * 2 * 8 * 2 / sum(contexts))
        assert found["bytes_per_token"] < 64 * row + sum(pages) / 16 * 3 * 2 * 32 + 1
        assert found["recall"] == pytest.approx(1 - found["lost_mass"])
        assert len(found["recall_by_layer"]) == 3
    packed = METHODS["ours"].at(64)
    assert packed is not None
    steps = [step_bytes(n, packed, num_heads=6, num_kv_heads=2, head_dim=8, itemsize=2) for n in contexts]
    found = counted(METHODS["ours"], 64)
    assert found["bytes_per_token"] == pytest.approx(3 * sum(read.total for read in steps) / 16)
    assert found["summary_bytes_per_token"] == pytest.approx(sum(read.summaries for read in steps) / 2 / sum(contexts))


def test_numbers() -> None:
    torch.manual_seed(0)
    dense, sparse = torch.randn(2, 50, 11)
    targets = torch.randint(11, (50,))
    found = accuracy_numbers.compare(dense, sparse, targets)
    p, q = dense.log_softmax(-1), sparse.log_softmax(-1)
    want = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(found["kl"], want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["nll"], -q[range(50), targets], rtol=1e-5)
    assert found["top1"].mean() == (dense.argmax(-1) == sparse.argmax(-1)).float().mean()
    row = accuracy_numbers.summarise([found, found])
    assert row["kl_ci95"][0] < row["kl"] < row["kl_ci95"][1]
    assert row["share_above_1_nat"] == (found["kl"] > 1).mean()
    assert row["perplexity"] == pytest.approx(float(torch.nn.functional.cross_entropy(sparse, targets).exp()))


def test_intervals() -> None:
    rng = np.random.default_rng(1)
    alike = rng.normal(size=(4, 400))
    low, high = accuracy_numbers.interval(alike)
    assert high - low == pytest.approx(2 * 1.96 / 40, rel=0.5)
    apart = alike + np.array([-1.0, 0, 1, 2])[:, None]  # documents that differ: wider than their tokens say
    low, high = accuracy_numbers.interval(apart)
    assert high - low > 1
    assert accuracy_numbers.interval(apart) == [low, high]


def test_beating_dense_is_beyond_chance() -> None:
    rng = np.random.default_rng(0)
    dense = [rng.normal(3, 1, 200) for _ in range(2)]
    assert not accuracy_numbers.beats(dense, dense)
    assert not accuracy_numbers.beats(dense, [one + rng.normal(0, 1, 200) for one in dense])
    assert accuracy_numbers.beats(dense, [one - 0.5 + rng.normal(0, 1, 200) for one in dense])


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(demo_models.save(tmp_path_factory.mktemp("tiny")))


def measured(folder: str, path: Path | None, methods: list[str], settings: accuracy.Settings = SETTINGS) -> list[Any]:
    store = Store(path, {}, {"documents": settings.documents})
    return accuracy.run([folder], methods, [64, 512], settings, TEXT, store, measures=accuracy.QUICK_MEASURES)


def without_times(rows: list[Any]) -> list[Any]:
    return [{**row, "seconds": [*row["seconds"]]} for row in rows]


@pytest.fixture
def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything of three letters is an answer."""
    monkeypatch.setattr(accuracy_measures, "score", lambda answers, output: float(len(output) > 2))


def test_an_interrupted_run_goes_on(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, easy: None) -> None:
    methods = ["ours", "window", "h2o"]
    whole = measured(folder, tmp_path / "whole.json", methods)
    path = tmp_path / "cut.json"
    put, left = Store.put, 9

    def tired(self: Store, *args: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        put(self, *args)

    monkeypatch.setattr(Store, "put", tired)
    with pytest.raises(KeyboardInterrupt):
        measured(folder, path, methods)
    monkeypatch.setattr(Store, "put", put)
    stored = json.loads(path.read_text())["rows"]
    assert sum(len(row["measures"]) for row in stored) == 8
    assert without_times(measured(folder, path, methods)) == without_times(whole)
    for row, before in zip(json.loads(path.read_text())["rows"], stored, strict=False):
        assert row["seconds"].items() >= before["seconds"].items()  # not measured again
    monkeypatch.setattr(accuracy.models, "load", None)  # not even loaded
    measured(folder, path, methods)
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "whole.json"]


def test_rows(folder: str, tmp_path: Path, easy: None) -> None:
    path = tmp_path / "x.json"
    rows = measured(folder, path, ["ours", "oracle-4"])
    assert [(row["method"], row["budget"]) for row in rows] == [
        ("dense", None),
        *(("ours", b) for b in (64, 512)),
        *(("oracle-4", b) for b in (64, 512)),
    ]
    dense, ours, covering = rows[:3]
    assert (dense["kl"], dense["top1_agreement"]) == (0, 1)
    assert covering["kl"] < 1e-6
    assert covering["dense"]
    assert not ours["dense"]
    assert ours["kl_ci95"][0] <= ours["kl"] <= ours["kl_ci95"][1]
    assert rows[3]["kl"] < ours["kl"]
    assert dense["passkey_a"] == dense["niah_single_1_b"] == 1.0
    assert ours["multikey_2_a"] is None  # not among the settings' tasks
    assert ours["bytes_per_token"] < dense["bytes_per_token"]
    other = measured(folder, path, ["window"])  # joins the others in the file
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 7
    assert other[0] == rows[0]
    assert [(one["task"], one["length"], one["solved"]) for one in found["tasks"]] == [
        ("passkey", 300, True),
        ("niah_single_1", 460, True),
        ("niah_single_1", 480, True),
    ]


def test_what_dense_does_not_solve_is_not_compared(folder: str) -> None:
    store = Store(None, {}, {})
    rows = accuracy.run([folder], ["window"], [64], SETTINGS, TEXT, store, measures=("passkey", "niah_single_1"))
    accuracy_report.show(rows, store.tasks, Console())
    assert rows[0]["kl"] is None
    assert {row[f"{task}_{way}"] for row in rows for task in ("passkey", "niah_single_1") for way in "ab"} == {None}
    assert [one["length"] for one in store.tasks] == [300, 460]  # longer ones are not tried


def test_changed_settings(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    measured(folder, path, ["ours"])
    with pytest.raises(ValueError, match=r"other settings \(documents 2 there, 1 now\)"):
        measured(folder, path, ["ours"], replace(SETTINGS, documents=1))
    before = json.loads(path.read_text())["rows"]
    monkeypatch.setitem(METHODS, "ours", Method("changed", config=QuestConfig(slack=0.9)))
    measured(folder, path, ["ours"])
    after = json.loads(path.read_text())["rows"]
    assert before[0] == after[0]
    assert [row["fingerprint"] for row in before[1:]] != [row["fingerprint"] for row in after[1:]]
    assert before[1]["kl"] != after[1]["kl"]
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="must be a file of `quest bench accuracy`"):
        measured(folder, path, ["ours"])


def test_sparse_above_dense_is_flagged(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(None, {}, {})
    rows = accuracy.run([folder], ["ours"], [64], SETTINGS, TEXT, store, measures=("text",))
    assert rows[1]["beats_dense"] == []
    name = rows[0]["model"]
    for row in rows:
        row["passkey_a"] = row["passkey_b"] = 0.9
    rows[1] |= {"passkey_b": 1.0, "beats_dense": ["passkey_b", "perplexity"]}
    tasks = [{"model": name, "task": "passkey", "length": 300, "score": 0.9, "solved": True}]
    accuracy_report.show(rows, tasks, Console(width=200))
    shown = capsys.readouterr().out
    assert f"{name}, ours 64 beats dense in passkey_b, perplexity" in shown
    assert "90% / 100% !" in shown
    assert "passkey: dense finds 90% at 300" in shown


def test_the_command(folder: str, tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "deep" / "x.json"
    text.write_text(TEXT)
    options = ["--models", folder, "--text", str(text), "--tokens", "8", "--samples", "1", "--json", str(file)]
    options += ["--methods", "ours,oracle-4,snapkv", "--budgets", "128,64", "--plot", str(tmp_path / "p" / "plot")]
    shown = run("bench", "accuracy", *options)
    assert "passkey: dense finds 0% at" in shown
    found = json.loads(file.read_text())
    assert {"cpu", "isa", "threads", "torch"} <= set(found["machine"])
    assert [(row["method"], row["budget"]) for row in found["rows"]][1:3] == [("ours", 64), ("ours", 128)]
    name = Path(folder).name
    assert (tmp_path / "p" / f"plot-{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert run("bench", "accuracy", *options).splitlines()[1:-2] == shown.splitlines()[1:-2]


def test_plots_have_all_panels(tmp_path: Path) -> None:
    row = dict.fromkeys([f"{task}_{way}" for task in ("passkey", *accuracy.MEASURES[2:]) for way in "ab"], 0.5)
    rows: list[dict[str, Any]] = [{**row, "method": "dense", "budget": None, "kl": 0.0, "bytes_per_token": 9e6}]
    rows += [
        {**row, "method": method, "budget": budget, "kl": 0.1 / budget, "bytes_per_token": 1e4 * budget}
        for method in METHODS
        if method != "dense"
        for budget in (64, 128)
    ]
    rows = [
        {**one, "model": "m", "measures": ["text"], "dense": one["budget"] is None, "top1_agreement": 0.8}
        for one in rows
    ]
    assert accuracy_plot.task_score(rows[0], "a") == 0.5
    assert accuracy_plot.draw(rows, tmp_path / "x") == [tmp_path / "x-m.png"]
    assert (tmp_path / "x-m.png").stat().st_size > 50_000


def test_mistakes_are_one_line(folder: str, tmp_path: Path) -> None:
    assert "--methods must be among dense, window" in refused("bench", "accuracy", "--methods", "ours,magic")
    assert "--methods must be names" in refused("bench", "accuracy", "--methods", "ours,")
    assert "--budgets must be whole numbers" in refused("bench", "accuracy", "--budgets", "few")
    assert "--budgets must hold the forced 16 + 32 tokens" in refused("bench", "accuracy", "--budgets", "32")
    assert "--measures must be among text, passkey, niah" in refused("bench", "accuracy", "--measures", "taste")
    assert "none of the packaged" in refused("bench", "accuracy", "--models", "gpt")
    assert "no such file" in refused("bench", "accuracy", "--text", str(tmp_path / "none"))
    few = tmp_path / "few.txt"
    few.write_text("too short")
    options = ["bench", "accuracy", "--models", folder, "--methods", "window"]
    assert "--text must hold 1 documents of 480 tokens, got 9" in refused(*options, "--text", str(few))
    assert "--tokens must leave some" in refused(*options, "--tokens", "479")
