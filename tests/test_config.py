"""QuestConfig: validated settings, presets, overrides per layer."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from quest import QuestConfig
from quest.config import forced_pages, max_selected


def test_defaults():
    """Codes of single tokens in two levels; where pages of a size are asked for, minima and maxima of those."""
    config = QuestConfig()
    assert (config.page_size, config.block_size, config.budget) == (1, 256, 1024)
    assert (config.summary_bits, config.coarse_size) == (2, 16)
    layer = config.layer(7)
    assert (layer.dense, layer.budget, layer.sink_tokens, layer.recent_tokens) == (False, 1024, 4, 16)
    assert (layer.slack, layer.group_rule) == (0.0, "relative")

    config = QuestConfig(page_size=16)
    assert (config.page_size, config.block_size, config.budget) == (16, 16, 1024)
    assert (config.summary_bits, config.coarse_size) == (None, None)
    layer = config.layer(7)
    assert (layer.dense, layer.budget, layer.sink_tokens, layer.recent_tokens) == (False, 1024, 16, 32)
    assert (layer.slack, layer.group_rule) == (0.4, "relative")


@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_what_a_format_takes_where_it_is_not_told(page_size):
    """None means the format's own, and a setting of one's own stays, through `replace` too."""
    given = dict(sink_tokens=7, recent_tokens=9, slack=0.3)
    plain, mine = QuestConfig(page_size=page_size), QuestConfig(page_size=page_size, **given)
    assert QuestConfig(page_size=page_size, **dict.fromkeys(given)) == plain
    for config in (mine, mine.replace(budget=100), pickle.loads(pickle.dumps(mine))):
        assert {name: getattr(config, name) for name in given} == given
    assert plain.replace(budget=1024) == plain


def test_long():
    config = QuestConfig.long()
    assert (config.page_size, config.summary_bits, config.coarse_size, config.block_size) == (1, 2, 32, 512)
    assert (config.coarse_keep, config.coarse_limit) == (0.125, 4096)
    assert QuestConfig.long(coarse_keep=0.5, budget=512).replace(budget=256).layer(0).coarse_keep == 0.5


def test_paper():
    """16-token pages, the upper bound, each query head its own pages, two dense layers, forced pages."""
    config = QuestConfig.paper()
    assert (config.page_size, config.slack, config.group_rule, config.dense_layers) == (16, 1.0, "per_head", (0, 1))
    assert [config.layer(i).dense for i in range(3)] == [True, True, False]
    assert forced_pages(config.sink_tokens, config.recent_tokens, 16) == (1, 2)
    assert QuestConfig.paper(budget=256).budget == 256
    assert QuestConfig.paper(dense_layers=()).layer(0).dense is False


def test_overrides():
    config = QuestConfig(
        dense_layers=(0,), layers={0: {"budget": 64}, 3: {"budget": 0.5, "slack": 1}, 5: {"dense": True}}
    )
    assert config.layer(0).dense
    assert config.layer(0).budget == 64
    assert (config.layer(3).budget, config.layer(3).slack, config.layer(3).dense) == (0.5, 1, False)
    assert config.layer(5).dense
    assert config.layer(4) == QuestConfig().layer(4)


def test_replace():
    config = QuestConfig(layers={1: {"budget": 64}})
    assert config.replace(budget=512).layer(0).budget == 512
    assert config.replace(budget=512).layer(1).budget == 64
    assert config.replace(coarse_size=32).block_size == 512
    assert QuestConfig(page_size=16).replace(page_size=32).block_size == 32
    assert QuestConfig(page_size=8, block_size=32).replace(page_size=16).block_size == 32
    with pytest.raises(ValueError, match="block_size must be a multiple"):
        QuestConfig(page_size=8, block_size=32).replace(page_size=64)


def test_frozen_and_copied():
    overrides = {1: {"budget": 64}}
    config = QuestConfig(layers=overrides)
    with pytest.raises(FrozenInstanceError):
        config.budget = 5
    overrides[1]["budget"] = 128  # the caller's own, not the config's
    assert config.layer(1).budget == 64
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), QuestConfig(layers={1: {"budget": 64}})):
        assert same == config
        assert same.layer(1) == config.layer(1)
        assert hash(same) == hash(config)
    assert QuestConfig(dense_layers=[0, 2]).dense_layers == (0, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 0}, "page_size must be in"),
        ({"page_size": 2048}, "page_size must be in"),
        ({"page_size": 16, "block_size": 24}, "block_size must be a multiple of page_size .16., got 24"),
        ({"page_size": 16, "block_size": 0}, "block_size must be in"),
        ({"budget": 0}, "budget must hold the forced pages: 4 sink . 16 recent pages of 1 tokens = 20 tokens, got"),
        ({"budget": 19}, "budget must hold the forced pages"),
        ({"page_size": 16, "budget": 47}, "forced pages: 1 sink . 2 recent pages of 16 tokens = 48 tokens, got"),
        ({"budget": -1}, "budget must hold the forced pages"),
        ({"budget": 0.0}, "budget as a fraction of the context must be in .0, 1., got 0.0"),
        ({"budget": 1.5}, "budget as a fraction"),
        ({"budget": float("nan")}, "budget as a fraction"),
        ({"sink_tokens": -1}, "sink_tokens must be in"),
        ({"recent_tokens": -1}, "recent_tokens must be in"),
        ({"slack": 1.1}, r"slack must be in \[0, 1\], got 1.1"),
        ({"slack": float("nan")}, "slack must be in"),
        ({"group_rule": "mean"}, "group_rule must be one of softmax, relative, per_head, got 'mean'"),
        ({"dense_layers": (-1,)}, "dense_layers must be in"),
        ({"layers": {-1: {}}}, "layers .key. must be in"),
        ({"layers": {0: {"page_size": 8}}}, r"layers\[0\] has unknown settings \['page_size'\]; known: dense, budget"),
        ({"layers": {0: {"budget": 10}}}, "budget must hold the forced pages"),
        ({"layers": {0: {"sink_tokens": 1024}}}, "budget must hold the forced pages"),
    ],
    ids=str,
)
def test_values_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        QuestConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 16.0}, "page_size must be an int, got 16.0"),
        ({"page_size": True}, "page_size must be an int"),
        ({"block_size": "16"}, "block_size must be an int"),
        ({"budget": "all"}, "budget must be a number of tokens"),
        ({"budget": None}, "budget must be a number of tokens"),
        ({"budget": True}, "budget must be a number of tokens"),
        ({"budget": np.int64(512)}, "budget must be a number of tokens"),
        ({"sink_tokens": 1.5}, "sink_tokens must be an int"),
        ({"recent_tokens": "16"}, "recent_tokens must be an int"),
        ({"slack": "0.5"}, "slack must be a number, got '0.5'"),
        ({"slack": True}, "slack must be a number"),
        ({"group_rule": None}, "group_rule must be one of"),
        ({"dense_layers": 2}, "dense_layers must be a sequence of ints, got 2"),
        ({"dense_layers": "01"}, "dense_layers must be a"),
        ({"dense_layers": (0.0,)}, "dense_layers must be a"),
        ({"layers": [{}]}, "layers must map a layer's index to its settings"),
        ({"layers": {"3": {}}}, "layers .key. must be an int"),
        ({"layers": {3: 5}}, r"layers\[3\] must be a mapping of settings, got 5"),
        ({"layers": {3: {"dense": 1}}}, "dense must be a bool"),
        ({"layers": {3: {"slack": "x"}}}, "slack must be a number"),
    ],
    ids=str,
)
def test_values_of_the_wrong_type(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        QuestConfig(**settings)


def test_unknown_setting():
    with pytest.raises(TypeError, match="pages"):
        QuestConfig(pages=3)


@pytest.mark.parametrize(
    ("arguments", "width"),
    [
        ((100, 1, 16, 160, 0, 1, None), 10),
        ((100, 1, 16, 167, 0, 1, None), 11),  # a visible context of up to 167 tokens is read whole: 11 pages
        ((100, 1, 16, 160, 0, 1, 160), 11),  # and a window may start inside a page
        ((4, 1, 16, 160, 0, 1, None), 4),
        ((100, 1, 16, 0.5, 0, 1, None), 50),
        ((100, 1, 16, 0.001, 3, 4, None), 7),
        ((100, 2, 16, 16, 0, 1, None), 2),  # two new tokens may lie on two pages
        ((100, 18, 16, 16, 1, 1, None), 4),
        ((100, 34, 16, 16, 1, 3, None), 5),
    ],
)
def test_width_of_a_selection(arguments, width):
    assert max_selected(*arguments) == width
