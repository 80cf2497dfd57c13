"""quest._host alone, against plain Python models: which blocks are whose, which tokens find them, who writes where."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quest._host import Blocks, OutOfBlocks, Sequences

TOKENS = [0, 1, -1, 2**31, -(2**63), 2**63 - 1]
EXTRAS = ["", "adapter"]
HASH_BITS = [0, 1, 2, 3, 64]
GARBAGE = -(10**9)
quick = settings(deadline=None, suppress_health_check=list(HealthCheck))


class Pool:
    """Blocks, and what they should say: references, the idle ones by age, and who is found by which tokens."""

    def __init__(self, num_blocks: int, block_size: int, hash_bits: int = 64) -> None:
        self.blocks = Blocks(num_blocks, block_size=block_size, hash_bits=hash_bits)
        self.size = block_size
        self.refs = [0] * num_blocks
        self.idle: list[int] = []  # the one to go first in front
        self.cached: set[int] = set()
        self.known: dict[tuple[str, tuple[int, ...]], int] = {}  # by extra and all tokens up to a block's end
        self.evicted = 0

    @property
    def free(self) -> list[int]:
        return [block for block, n in enumerate(self.refs) if not n and block not in self.cached]

    @property
    def held(self) -> list[int]:
        return [block for block, n in enumerate(self.refs) if n]

    @property
    def num_free(self) -> int:
        return self.refs.count(0)

    # --- what calls should do ----------------------------------------------------------------------------------------

    def taken(self, blocks: list[int]) -> None:
        """`blocks` were allocated: any free one, then idle ones by age."""
        for block in blocks:
            free = self.free
            if free:
                assert block in free
            else:
                assert block == self.idle.pop(0)
                self.lose(block)
                self.evicted += 1
            self.refs[block] = 1

    def hold(self, block: int) -> None:
        self.refs[block] += 1
        if block in self.idle:
            self.idle.remove(block)

    def drop(self, block: int) -> bool:
        self.refs[block] -= 1
        if not self.refs[block] and block in self.cached:
            self.idle.append(block)
        return not self.refs[block] and block not in self.cached

    def lose(self, block: int) -> None:
        """Not found any more, nor are those after it."""
        self.cached.discard(block)
        if block in self.idle:
            self.idle.remove(block)
        for extra, tokens in [key for key, found in self.known.items() if found == block]:
            after = [key for key in self.known if key[0] == extra and key[1][: len(tokens)] == tokens]
            for key in after:
                del self.known[key]

    def find(self, tokens: list[int], extra: str) -> list[int]:
        found: list[int] = []
        while len(tokens) >= (end := (len(found) + 1) * self.size):
            block = self.known.get((extra, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        for block in found:
            self.hold(block)
        return found

    def remember(self, tokens: list[int], blocks: list[int], extra: str) -> int:
        added = 0
        for i, block in enumerate(blocks):
            key = extra, tuple(tokens[: (i + 1) * self.size])
            if key in self.known:
                continue
            if block in self.known.values():
                break
            self.cached.add(block)
            self.known[key] = block
            added += 1
        return added

    # --- both --------------------------------------------------------------------------------------------------------

    def step(self, random: Random) -> None:
        kinds = ["allocate", "allocate", "retain", "release", "release", "remember", "remember", "find", "find"]
        kinds = kinds * 3 + ["forget", "rare"]
        getattr(self, "do_" + random.choice(kinds))(random)
        self.check()

    def do_allocate(self, random: Random) -> None:
        count = random.randint(0, min(4, self.num_free + 2))
        if count > self.num_free:
            text = f"^allocate: {count} more blocks are needed, and {self.num_free} of {len(self.refs)} are free$"
            with pytest.raises(OutOfBlocks, match=text):
                self.blocks.allocate(count)
        else:
            self.taken(self.blocks.allocate(count))

    def do_retain(self, random: Random) -> None:
        block = random.randrange(len(self.refs))
        if not self.refs[block] and block not in self.cached:
            with pytest.raises(ValueError, match=f"retain: block {block} is free"):
                self.blocks.retain(block)
        else:
            self.blocks.retain(block)
            self.hold(block)

    def do_release(self, random: Random) -> None:
        block = random.choice(self.held or [0])
        if not self.refs[block]:
            with pytest.raises(ValueError, match=f"release: block {block} is free already"):
                self.blocks.release(block)
        else:
            assert self.blocks.release(block) == self.drop(block)

    def do_remember(self, random: Random) -> None:
        blocks = [random.choice(self.held) for _ in range(random.randint(0, 3) if self.held else 0)]
        tokens = self.text(random, len(blocks) * self.size)
        extra = random.choice(EXTRAS)
        if self.num_free and random.random() < 0.1:
            at = random.randint(0, len(blocks))
            blocks.insert(at, self.refs.index(0))
            with pytest.raises(ValueError, match=f"remember: block {blocks[at]} is free"):
                self.blocks.remember(tokens + [0] * self.size, blocks, extra)
        else:
            assert self.blocks.remember(tokens, blocks, extra) == self.remember(tokens, blocks, extra)

    def do_find(self, random: Random) -> None:
        tokens, extra = self.text(random, random.randint(0, 4 * self.size)), random.choice(EXTRAS)
        assert self.blocks.find(tokens, extra) == self.find(tokens, extra)

    def do_forget(self, random: Random) -> None:
        block = random.randrange(len(self.refs))
        self.blocks.forget(block)
        self.lose(block)

    def do_rare(self, random: Random) -> None:
        kind = random.choice(["grow"] * 8 + ["copy"] * 4 + ["forget_all"])
        if kind == "grow" and len(self.refs) < 16:
            more = random.randint(-2, 3)
            self.blocks.grow(len(self.refs) + more)
            self.refs += [0] * more
        elif kind == "forget_all":
            self.blocks.forget_all()
            self.idle, self.cached, self.known = [], set(), {}
        elif kind == "copy":
            before, self.blocks = self.blocks, copy.deepcopy(self.blocks)
            before.forget_all()
            before.allocate(before.num_free)

    def text(self, random: Random, length: int) -> list[int]:
        """Tokens that are often the beginning of known ones."""
        known = list(random.choice([*self.known])[1]) if self.known and random.random() < 0.7 else []
        known = known[: random.randint(0, len(known))]
        return (known + [random.choice(TOKENS) for _ in range(length)])[:length]

    def check(self) -> None:
        blocks, refs = self.blocks, self.refs
        assert [blocks.refs(block) for block in range(len(refs))] == refs
        assert sorted(blocks.free) == self.free
        assert {block for block in range(len(refs)) if blocks.is_cached(block)} == self.cached
        shared = sum(n > 1 for n in refs)
        counts = len(refs), self.num_free, len(self.idle), shared, len(self.cached), self.evicted
        assert blocks.counts == counts
        names = ["num_blocks", "num_free", "num_idle", "num_shared", "num_cached", "num_evicted"]
        assert tuple(getattr(blocks, name) for name in names) == counts
        assert blocks.admits(self.num_free)
        assert not blocks.admits(self.num_free + 1)


@quick
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.integers(1, 3), st.sampled_from(HASH_BITS))
def test_blocks_in_any_history(random: Random, num_blocks: int, block_size: int, hash_bits: int) -> None:
    """Whoever takes, holds, releases, enters, finds and forgets: counts, references and what is found are right, the
    least recently used idle block goes first, and none is refused while one is free."""
    pool = Pool(num_blocks, block_size, hash_bits)
    for _ in range(40):
        pool.step(random)


@pytest.mark.parametrize("hash_bits", HASH_BITS)
def test_blocks_in_a_long_history(hash_bits: int) -> None:
    random = Random(hash_bits)
    pool = Pool(12, 2, hash_bits)
    for _ in range(4000):
        pool.step(random)
    assert pool.evicted > 50


def test_no_order_of_calls_leaves_blocks_that_cannot_be_taken() -> None:
    random, blocks = Random(0), Blocks(1000, block_size=16)
    for _ in range(20):
        taken = blocks.allocate(blocks.num_free)
        assert sorted(taken) == sorted({*taken})
        with pytest.raises(OutOfBlocks, match="allocate: 1 more blocks are needed, and 0 of 1000 are free"):
            blocks.allocate(1)
        random.shuffle(taken)
        for block in taken[: random.randint(1, len(taken))]:
            assert blocks.release(block)
    assert blocks.num_free == len(blocks.free) == 1000 - sum(blocks.refs(block) for block in range(1000))


def test_new_blocks_are_taken_lowest_first() -> None:
    blocks = Blocks(3, block_size=1)
    assert blocks.allocate(2) == [0, 1]
    blocks.grow(6)
    assert blocks.allocate(4) == [2, 3, 4, 5]


def test_the_watermark_is_left_to_those_that_run() -> None:
    blocks = Blocks(10, block_size=1, watermark=3)
    assert blocks.watermark == 3
    assert blocks.admits(7)
    assert not blocks.admits(8)
    blocks.allocate(10)
    assert not blocks.admits(0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Blocks(-1, block_size=1), ValueError, "Blocks: num_blocks must be at least 0, got -1"),
        (lambda: Blocks(1, block_size=0), ValueError, "Blocks: block_size must be at least 1, got 0"),
        (lambda: Blocks(1, block_size=1, watermark=-1), ValueError, "Blocks: watermark must be at least 0, got -1"),
        (lambda: Blocks(1, block_size=1, hash_bits=-1), ValueError, "Blocks: hash_bits must be at least 0, got -1"),
        (lambda: Blocks(2, block_size=1).refs(2), IndexError, r"block must be in \[0, 2\), got 2"),
        (lambda: Blocks(2, block_size=1).is_cached(10**6), IndexError, r"block must be in \[0, 2\), got 1000000"),
        (lambda: Blocks(2, block_size=1).retain(-1), IndexError, r"block must be in \[0, 2\), got -1"),
        (lambda: Blocks(2, block_size=1).release(2), IndexError, r"block must be in \[0, 2\), got 2"),
        (lambda: Blocks(2, block_size=1).forget(2), IndexError, r"block must be in \[0, 2\), got 2"),
        (lambda: Blocks(2, block_size=1).remember([1], [2], ""), IndexError, r"block must be in \[0, 2\), got 2"),
        (lambda: Blocks(2, block_size=4).remember([1] * 7, [0, 1], ""), ValueError, "fill 2 blocks of 4, got 7"),
        (lambda: Blocks(2, block_size=1).release(0), ValueError, "release: block 0 is free already"),
        (lambda: Blocks(2, block_size=1).retain(0), ValueError, "retain: block 0 is free"),
    ],
)
def test_blocks_that_are_not_there_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# ---- prefixes ----


def chain(blocks: Blocks, tokens: list[int], extra: str = "") -> list[int]:
    """New blocks, held once, that are found by `tokens`."""
    taken = blocks.allocate(len(tokens) // blocks.block_size)
    assert blocks.remember(tokens, taken, extra) == len(taken)
    return taken


def found(blocks: Blocks, tokens: list[int], extra: str = "") -> list[int]:
    """What `find` gives, and nobody holds afterwards."""
    got = blocks.find(tokens, extra)
    for block in reversed(got):
        blocks.release(block)
    return got


@pytest.mark.parametrize("hash_bits", HASH_BITS)
def test_blocks_are_found_by_all_tokens_up_to_their_end_and_nothing_else(hash_bits: int) -> None:
    blocks = Blocks(8, block_size=2, hash_bits=hash_bits)
    a = chain(blocks, [1, 2, 3, 4, 5, 6])
    b = chain(blocks, [3, 4, 1, 2])
    assert found(blocks, [1, 2, 3, 4, 5, 6, 7]) == a
    assert found(blocks, [1, 2, 3, 4, 5]) == a[:2]
    assert found(blocks, [1, 2, 3, 5, 5, 6]) == a[:1]
    assert found(blocks, [3, 4, 1, 2, 5, 6]) == b
    assert found(blocks, [5, 6]) == found(blocks, [2, 1]) == found(blocks, [1]) == found(blocks, []) == []
    assert found(blocks, [1, 2, 3, 4], "adapter") == []
    c = chain(blocks, [1, 2], "adapter")
    assert found(blocks, [1, 2, 3, 4], "adapter") == c
    assert found(blocks, [1, 2, 3, 4]) == a[:2]


@pytest.mark.parametrize("hash_bits", HASH_BITS)
def test_tokens_are_any_numbers_of_64_bits(hash_bits: int) -> None:
    blocks = Blocks(40, block_size=1, hash_bits=hash_bits)
    numbers = [0, 1, -1, 2**32, -(2**32), 2**32 + 1, 2**63 - 1, -(2**63), 2**62, -(2**62)]
    made = {number: chain(blocks, [number, number]) for number in numbers}
    for number, own in made.items():
        assert found(blocks, [number, number]) == own
        assert found(blocks, np.array([number, number])) == own
    assert blocks.num_cached == 20


@given(st.text(max_size=8), st.text(max_size=8))
@quick
def test_extra_is_compared_whole(one: str, other: str) -> None:
    blocks = Blocks(1, block_size=1, hash_bits=0)
    own = chain(blocks, [7], one)
    assert found(blocks, [7], other) == (own if one == other else [])


def test_what_follows_an_evicted_block_is_not_found_even_if_its_tokens_come_back() -> None:
    blocks = Blocks(3, block_size=1)
    first, second, third = chain(blocks, [1, 2, 3])
    for block in (first, second, third):  # the first one is the oldest
        blocks.release(block)
    assert blocks.allocate(1) == [first]
    assert found(blocks, [1, 2, 3]) == []
    assert blocks.num_cached == blocks.num_idle == 2
    assert blocks.remember([1], [first], "") == 1
    assert found(blocks, [1, 2, 3]) == [first]
    assert blocks.allocate(2) == [second, third]
    assert blocks.num_evicted == 3
    assert blocks.num_cached == 1


def test_a_forgotten_block_takes_those_after_it_along() -> None:
    blocks = Blocks(3, block_size=1)
    first, second, third = chain(blocks, [1, 2, 3])
    blocks.forget(second)
    assert found(blocks, [1, 2, 3]) == [first]
    assert blocks.remember([1, 2], [first, second], "") == 1
    assert found(blocks, [1, 2, 3]) == [first, second]


@pytest.mark.parametrize("hash_bits", HASH_BITS)
def test_holders_enter_their_chain_again_after_a_block_that_it_hung_on_is_gone(hash_bits: int) -> None:
    """Two hold the same tokens in blocks of their own. The one whose blocks were found goes, the other comes again."""
    blocks = Blocks(7, block_size=1, hash_bits=hash_bits)
    gone = chain(blocks, [1, 2])
    own = blocks.allocate(4)
    assert blocks.remember([1, 2, 3, 4], own, "") == 2
    assert found(blocks, [1, 2, 3, 4]) == gone + own[2:]
    for block in gone:
        blocks.release(block)
    blocks.allocate(2)  # the last free one, and the older of the two
    assert found(blocks, [1, 2, 3, 4]) == []
    assert blocks.num_cached == 3
    assert blocks.remember([1, 2, 3, 4], own, "") == 4
    assert found(blocks, [1, 2, 3, 4]) == own
    assert blocks.num_cached == 5


def test_what_is_known_already_stays_with_its_blocks() -> None:
    blocks = Blocks(6, block_size=1)
    old, new = chain(blocks, [1, 2]), blocks.allocate(3)
    assert blocks.remember([1, 2, 3], new, "") == 1
    assert found(blocks, [1, 2, 3]) == [*old, new[2]]
    assert not blocks.is_cached(new[0])
    assert blocks.remember([9, 1], [old[0], new[0]], "") == 0  # found by other tokens, so that ends the call
    assert blocks.remember([1, 2], old, "adapter") == 0
    assert found(blocks, [9]) == found(blocks, [1], "adapter") == []


def test_idle_blocks_go_least_recently_used_first() -> None:
    blocks = Blocks(4, block_size=1)
    own = [chain(blocks, [token])[0] for token in range(4)]
    for token in (2, 0, 3, 1):
        blocks.release(own[token])
    found(blocks, [0])  # used again
    blocks.retain(own[3])
    assert blocks.allocate(1) == [own[2]]
    blocks.release(own[3])
    assert blocks.allocate(3) == [own[1], own[0], own[3]]


# ---- sequences ----


class Plain:
    """Sequences on a pool, and what they should hold; a memory by slot that stands for K and V."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sequences = Sequences(world.pool.blocks)
        self.tokens: dict[int, list[int]] = {}
        self.rows: list[int] = []
        self.table, self.room = self.sequences.table(), self.sequences.room

    @property
    def held(self) -> list[int]:
        return [block for i in self.tokens for block in self.sequences.blocks_of(i)]

    def slots_of(self, i: int, begin: int = 0) -> np.ndarray:
        size = self.world.pool.size
        places = np.arange(begin, len(self.tokens[i]))
        return np.array(self.sequences.blocks_of(i), np.int64)[places // size] * size + places % size

    def check(self) -> None:
        sequences, size = self.sequences, self.world.pool.size
        if sequences.room != self.room:  # otherwise it is the same memory
            self.table, self.room = sequences.table(), sequences.room
        assert self.table.shape == self.room
        assert (sequences.ids, sequences.rows) == (sorted(self.tokens), self.rows)
        assert sequences.lengths == [len(self.tokens[i]) for i in self.rows]
        most = {}
        for i, tokens in self.tokens.items():
            blocks = sequences.blocks_of(i)
            assert len(blocks) == len({*blocks}) == -(-len(tokens) // size)
            assert sequences.length(i) == len(tokens)
            assert i in sequences
            assert self.world.memory[self.slots_of(i)].tolist() == tokens
            for place, block in enumerate(blocks):
                most[block] = max(most.get(block, 0), min(size, len(tokens) - place * size))
        assert sequences.unused_slots == sum(size - used for used in most.values())
        widths = [len(sequences.blocks_of(i)) for i in self.rows]
        assert sequences.width == max(widths, default=0)
        for row, i in enumerate(self.rows):
            line = self.table[row].tolist()
            assert line[: widths[row]] == sequences.blocks_of(i)
            assert {*line[widths[row] :]} <= {-1}


class World:
    """One pool with one or two batches of sequences on it."""

    def __init__(self, num_blocks: int, block_size: int, num_batches: int = 1, most: int = 8) -> None:
        self.pool = Pool(num_blocks, block_size)
        self.memory = np.full(num_blocks * block_size, GARBAGE)
        self.batches = [Plain(self) for _ in range(num_batches)]
        self.most = most
        self.added = self.refused = self.copied = 0

    def step(self, random: Random) -> None:
        kinds = ["add", "copy", "select", "remove", "empty", "fork", "remember", "adopt", "adopt", "rare"]
        kinds = kinds[:-1] * 3 + ["extend"] * 20 + ["crop"] * 6 + kinds[-1:]
        getattr(self, "do_" + random.choice(kinds))(random.choice(self.batches), random)
        self.check()

    def check(self) -> None:
        held = [block for batch in self.batches for block in batch.held]
        assert [held.count(block) for block in range(self.pool.blocks.num_blocks)] == self.refs
        for batch in self.batches:
            batch.check()

    @property
    def refs(self) -> list[int]:
        return [self.pool.blocks.refs(block) for block in range(self.pool.blocks.num_blocks)]

    def wipe(self, blocks: list[int]) -> None:
        self.memory.reshape(-1, self.pool.size)[blocks] = GARBAGE

    def changed(self, copies: list[tuple[int, int]], fresh: list[int], freed: list[int]) -> None:
        """What is copied is in place before anything is written; what was taken or freed holds nothing."""
        assert {to for _, to in copies} <= {*fresh}
        assert len({*fresh}) == len(fresh)
        assert all(not self.pool.blocks.is_cached(block) for block in (*fresh, *freed))
        lines = self.memory.reshape(-1, self.pool.size)
        before = [lines[source].copy() for source, _ in copies]
        self.wipe([*fresh, *freed])
        for (_, target), line in zip(copies, before):
            lines[target] = line
        self.copied += len(copies)

    def write(self, slots: np.ndarray, tokens: list[int]) -> None:
        for block in {int(slot) // self.pool.size for slot in slots}:
            assert self.refs[block] == 1
            assert not self.pool.blocks.is_cached(block)
        self.memory[slots] = tokens

    def expect_needed(self, batch: Plain, begin: list[int], counts: list[int]) -> int:
        """Blocks that are missing, and those that must be copied: where others hold a block too, one for every row
        that writes to it, and otherwise one fewer."""
        size, writers, missing = self.pool.size, {}, 0
        for i, first, count in zip(batch.rows, begin, counts):
            blocks = batch.sequences.blocks_of(i)
            missing += max(0, -(-(first + count) // size) - len(blocks))
            for place in range(first // size, -(-(first + count) // size) if count else 0):
                if place < len(blocks):
                    writers[blocks[place]] = writers.get(blocks[place], 0) + 1
        return missing + sum(n - (self.refs[block] == n) for block, n in writers.items())

    def state(self) -> Any:
        lists = [(b.sequences.rows, [b.sequences.blocks_of(i) for i in b.sequences.ids]) for b in self.batches]
        return self.pool.blocks.counts, self.refs, lists

    # --- calls -------------------------------------------------------------------------------------------------------

    def do_add(self, batch: Plain, random: Random) -> None:
        if len(batch.tokens) < self.most:
            i = batch.sequences.add()
            assert i not in batch.tokens
            assert i >= max(batch.tokens, default=0)
            batch.tokens[i] = []
            batch.rows.append(i)
            self.added += 1

    def do_copy(self, batch: Plain, random: Random) -> None:
        if batch.tokens and len(batch.tokens) < self.most:
            source = random.choice([*batch.tokens])
            i = batch.sequences.copy(source)
            assert batch.sequences.blocks_of(i) == batch.sequences.blocks_of(source)
            batch.tokens[i] = [*batch.tokens[source]]
            batch.rows.append(i)
            self.added += 1

    def do_select(self, batch: Plain, random: Random) -> None:
        batch.rows = random.sample([*batch.tokens], random.randint(len(batch.tokens) // 2, len(batch.tokens)))
        batch.sequences.select(batch.rows)
        if batch.rows:
            for wrong, message in (([*batch.rows, batch.rows[0]], "named twice"), ([10**6], "no sequence has id")):
                with pytest.raises(ValueError, match=message):
                    batch.sequences.select(wrong)

    def ends(self, batch: Plain, ids: list[int], freed: list[int]) -> None:
        """Of blocks that nobody holds any more, those without known tokens were given."""
        for i in ids:
            del batch.tokens[i]
        batch.rows = [i for i in batch.rows if i not in ids]
        assert all(not self.refs[block] and not self.pool.blocks.is_cached(block) for block in freed)
        self.wipe(freed)

    def do_remove(self, batch: Plain, random: Random) -> None:
        if batch.tokens:
            i = random.choice([*batch.tokens])
            self.ends(batch, [i], batch.sequences.remove(i))
            assert i not in batch.sequences

    def do_empty(self, batch: Plain, random: Random) -> None:
        if batch.tokens:
            i = random.choice([*batch.tokens])
            rows = [*batch.rows]
            self.ends(batch, [i], batch.sequences.empty(i))
            batch.tokens[i], batch.rows = [], rows

    def do_fork(self, batch: Plain, random: Random) -> None:
        if not batch.rows:
            return
        indices = [random.randrange(len(batch.rows)) for _ in range(random.randint(1, min(4, self.most)))]
        before, old = [*batch.rows], dict(batch.tokens)
        freed = batch.sequences.fork(indices)
        batch.rows = batch.sequences.rows
        for row, (i, source) in enumerate(zip(batch.rows, indices)):
            assert (i == before[source]) == (source not in indices[:row])
            batch.tokens[i] = [*old[before[source]]]
        self.added += sum(i not in before for i in batch.rows)
        rows = batch.rows
        self.ends(batch, [i for row, i in enumerate(before) if row not in indices], freed)
        assert batch.rows == rows

    def do_extend(self, batch: Plain, random: Random) -> None:
        counts = [random.choice([0, 1, 1, 2, random.randint(0, 3 * self.pool.size)]) for _ in batch.rows]
        lengths = [len(batch.tokens[i]) for i in batch.rows]
        begin = [random.randint(max(0, n - 3), n) if random.random() < 0.1 else n for n in lengths]
        q_len = max(counts, default=0)
        real = None
        if random.random() < 0.3:
            q_len += random.randint(0, 2)
            places = [{*random.sample(range(q_len), count)} for count in counts]
            real = np.array([[i in row for i in range(q_len)] for row in places], bool).reshape(len(counts), q_len)
        needed = batch.sequences.needed(begin, counts)
        assert needed == self.expect_needed(batch, begin, counts)
        blocks = self.pool.blocks
        if needed > blocks.num_free:
            before, self.refused = self.state(), self.refused + 1
            text = f"^extend: {needed} more blocks are needed, and {blocks.num_free} of {blocks.num_blocks} are free$"
            with pytest.raises(OutOfBlocks, match=text):
                batch.sequences.extend(begin, counts, q_len, real)
            assert self.state() == before
            return
        to_copy = batch.sequences.to_copy(begin, counts)
        copies, fresh, slots, ends, end_array, count_array = batch.sequences.extend(begin, counts, q_len, real)
        assert len(fresh) == needed
        assert [source for source, _ in copies] == to_copy
        assert ends == end_array.tolist() == [first + count for first, count in zip(begin, counts)]
        assert count_array.tolist() == counts
        assert (end_array.dtype, count_array.dtype, slots.dtype) == (np.int32, np.int32, np.int64)
        self.changed(copies, fresh, [])
        for row, (i, first, count) in enumerate(zip(batch.rows, begin, counts)):
            new = [random.randint(0, 1) for _ in range(count)]
            tokens = batch.tokens[i]
            stored = slots[row] >= 0
            expected = real[row] if real is not None else np.arange(q_len) >= q_len - count
            assert stored.tolist() == expected.tolist()
            batch.tokens[i] = tokens[:first] + new + tokens[first + count :]
            assert slots[row][stored].tolist() == batch.slots_of(i, first)[:count].tolist()
            self.write(slots[row][stored], new)

    def do_crop(self, batch: Plain, random: Random) -> None:
        lengths = [len(batch.tokens[i]) for i in batch.rows]
        ends = [random.randint(random.choice([0, max(0, n - 3)]), n) for n in lengths]
        redo = [random.randint(0, end % self.pool.size) for end in ends]
        begin = [end - again for end, again in zip(ends, redo)]
        needed, blocks = batch.sequences.needed_to_crop(ends, redo), self.pool.blocks
        assert needed == self.expect_needed(batch, begin, redo)
        if needed > blocks.num_free:
            before, self.refused = self.state(), self.refused + 1
            with pytest.raises(OutOfBlocks, match=f"^crop: {needed} more blocks are needed, and {blocks.num_free} of"):
                batch.sequences.crop(ends, redo)
            assert self.state() == before
            return
        to_copy = batch.sequences.to_copy(begin, redo)
        copies, fresh, freed = batch.sequences.crop(ends, redo)
        assert [source for source, _ in copies] == to_copy
        assert len(fresh) == needed == len(copies)
        self.changed(copies, fresh, freed)
        assert all(not self.refs[block] for block in freed)
        for i, end, first in zip(batch.rows, ends, begin):
            batch.tokens[i] = batch.tokens[i][:end]
            self.write(batch.slots_of(i, first), batch.tokens[i][first:])

    def do_remember(self, batch: Plain, random: Random) -> None:
        if batch.tokens:
            i = random.choice([*batch.tokens])
            blocks, tokens = batch.sequences.blocks_of(i), batch.tokens[i]
            full = len(tokens) // self.pool.size
            self.pool.blocks.remember(tokens, blocks[:full], "")

    def do_adopt(self, batch: Plain, random: Random) -> None:
        texts = [tokens for b in self.batches for tokens in b.tokens.values()] or [[]]
        text = random.choice(texts) + [random.randint(0, 1) for _ in range(4)]
        self.do_add(batch, random)
        empty = [i for i, tokens in batch.tokens.items() if not tokens]
        full = [i for i, tokens in batch.tokens.items() if tokens]
        if empty and (blocks := self.pool.blocks.find(text, "")):
            if full:
                for call in (lambda: batch.sequences.adopt(full[0], blocks), lambda: batch.sequences.fill(full[0], 1)):
                    with pytest.raises(ValueError, match=f"sequence {full[0]} must be empty, but has"):
                        call()
            batch.sequences.adopt(empty[0], blocks)
            batch.tokens[empty[0]] = text[: len(blocks) * self.pool.size]

    def do_rare(self, batch: Plain, random: Random) -> None:
        blocks = self.pool.blocks
        if random.random() < 0.5 and blocks.num_blocks < 30:
            blocks.grow(blocks.num_blocks + 2)
            self.memory = np.append(self.memory, [GARBAGE] * 2 * self.pool.size)
            return
        kept = [b.sequences for b in self.batches]
        self.pool.blocks, copies = copy.deepcopy((self.pool.blocks, kept))
        for batch, sequences in zip(self.batches, copies):
            assert sequences.blocks is self.pool.blocks
            batch.sequences, batch.table, batch.room = sequences, sequences.table(), sequences.room
        for sequences in kept:  # does not concern the copies
            for i in sequences.ids:
                sequences.remove(i)
        blocks.allocate(blocks.num_free)


@quick
@given(st.randoms(use_true_random=False), st.integers(3, 12), st.integers(1, 4), st.integers(1, 2))
def test_sequences_in_any_history(random: Random, num_blocks: int, block_size: int, num_batches: int) -> None:
    """Whoever adds, copies, selects, removes, forks, extends and crops: every token of every sequence, waiting ones
    too, lies where its table says; what others hold or prefixes find is never written; what does not fit changes
    nothing."""
    world = World(num_blocks, block_size, num_batches)
    for _ in range(25):
        world.step(random)


@pytest.mark.parametrize(("block_size", "num_batches"), [(1, 1), (2, 2), (4, 1), (5, 2)])
def test_thousands_of_sequences_come_and_go(block_size: int, num_batches: int) -> None:
    random, world = Random(block_size), World(20, block_size, num_batches, most=20)
    for _ in range(4000):
        world.step(random)
    assert world.added > 600
    assert world.refused > 20
    assert world.copied > 20
    assert world.pool.blocks.num_evicted > 20
    for batch in world.batches:
        for i in [*batch.tokens]:
            world.ends(batch, [i], batch.sequences.remove(i))
    blocks = world.pool.blocks
    assert blocks.num_free == blocks.num_blocks
    blocks.forget_all()
    assert sorted(blocks.free) == [*range(blocks.num_blocks)]


def filled(lengths: list[int], num_blocks: int = 8, block_size: int = 4) -> Sequences:
    sequences = Sequences(Blocks(num_blocks, block_size=block_size))
    for _ in lengths:
        sequences.add()
    sequences.extend([0] * len(lengths), lengths, max(lengths))
    return sequences


def test_where_all_who_hold_a_block_write_to_it_the_last_keeps_it() -> None:
    sequences = filled([6])
    sequences.fork([0, 0, 0])
    begin = [6, 6, 6]
    assert sequences.needed(begin, [1, 1, 1]) == 2
    assert sequences.needed(begin, [1, 0, 1]) == 2
    copies, fresh, *_ = sequences.extend(begin, [1, 1, 1], 1)
    assert copies == [(1, fresh[0]), (1, fresh[1])]
    assert [sequences.blocks_of(i)[1] for i in sequences.rows] == [*fresh, 1]
    assert [sequences.blocks_of(i)[0] for i in sequences.rows] == [0, 0, 0]


def test_what_a_waiting_sequence_holds_is_copied_before_a_row_writes_to_it() -> None:
    sequences = filled([6])
    waits = sequences.rows[0]
    runs = sequences.copy(waits)
    sequences.select([runs])
    copies, fresh, *_ = sequences.extend([6], [1], 1)
    assert copies == [(sequences.blocks_of(waits)[1], fresh[0])]
    assert (sequences.length(waits), sequences.length(runs)) == (6, 7)


def test_a_known_block_that_is_written_is_forgotten_and_the_blocks_before_it_stay() -> None:
    sequences = filled([12])
    blocks, tokens = sequences.blocks, [*range(12)]
    own = sequences.blocks_of(0)
    blocks.remember(tokens, own, "")
    sequences.crop([10], [0])  # nothing is written
    assert found(blocks, tokens) == own
    sequences.extend([10], [1], 1)
    assert found(blocks, tokens) == own[:2]
    sequences.crop([8], [0])
    assert found(blocks, tokens) == own[:2]
    sequences.extend([3], [1], 1)
    assert found(blocks, tokens) == []


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    sequences = filled([16], num_blocks=4)
    tokens, own = [*range(16)], sequences.blocks_of(0)
    sequences.blocks.remember(tokens, own, "")
    assert sequences.remove(0) == []
    for left in (3, 2, 1):
        assert sequences.blocks.allocate(1) == [own[left]]
        assert found(sequences.blocks, tokens) == own[:left]


def test_the_table_is_one_memory_until_its_room_changes() -> None:
    sequences = filled([4, 8], num_blocks=64)
    table, room = sequences.table(), sequences.room
    assert table.base is not None
    sequences.extend([4, 8], [4, 0], 4)
    assert table[:2].tolist() == sequences.table()[:2].tolist() == [sequences.blocks_of(i) for i in (0, 1)]
    sequences.extend([8, 8], [100, 0], 100)
    assert sequences.room != room
    old = table.tolist()
    del sequences  # what is left of it is the array's
    assert table.tolist() == old


def test_room_grows_to_a_multiple_so_that_tables_are_seldom_made_anew() -> None:
    sequences = filled([1], num_blocks=4096, block_size=1)
    rooms = {sequences.room}
    for length in range(1, 1000):
        sequences.extend([length], [1], 1)
        rooms.add(sequences.room)
    assert len(rooms) <= 11


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.extend([6], [1], 1), "extend: there must be one number for each of 2 rows"),
        (lambda s: s.extend([6, 3], [1], 1), "extend: there must be one number for each of 2 rows"),
        (lambda s: s.needed([6, 3], [1, 1, 1]), "extend: there must be one number for each of 2 rows"),
        (lambda s: s.extend([7, 3], [1, 1], 1), "extend: row 0 has 6 tokens, got 1 from 7 on"),
        (lambda s: s.extend([6, -1], [1, 1], 1), "extend: row 1 has 3 tokens, got 1 from -1 on"),
        (lambda s: s.extend([6, 3], [1, -1], 1), "extend: row 1 has 3 tokens, got -1 from 3 on"),
        (lambda s: s.extend([6, 3], [1, 2], 1), "extend: q_len places must hold each row's count of tokens"),
        (lambda s: s.extend([6, 3], [1, 2], 2, np.ones((2, 2), bool)), "extend: q_len places must hold"),
        (lambda s: s.extend([6, 3], [1, 1], 2, np.ones((2, 1), bool)), "extend: q_len places must hold"),
        (lambda s: s.extend([6, 3], [1, 1], 1, np.ones((1, 1), bool)), "extend: q_len places must hold"),
        (lambda s: s.to_copy([6], [1]), "to_copy: there must be one number for each of 2 rows"),
        (lambda s: s.crop([7, 3], [0, 0]), "crop: row 0 has 6 tokens, got 0 from 7 on"),
        (lambda s: s.crop([6, 3], [0, 4]), "crop: row 1 has 3 tokens, got 4 from -1 on"),
        (lambda s: s.needed_to_crop([6], [0]), "crop: there must be one number for each of 2 rows"),
        (lambda s: s.fork([0, 2]), r"fork: indices must be in \[0, 2\), got 2"),
        (lambda s: s.fork([-1]), r"fork: indices must be in \[0, 2\), got -1"),
        (lambda s: s.select([0, 0]), "sequence 0 is named twice"),
        (lambda s: s.select([0, 5]), "no sequence has id 5"),
        (lambda s: s.copy(5), "no sequence has id 5"),
        (lambda s: s.remove(-1), "no sequence has id -1"),
        (lambda s: s.empty(5), "no sequence has id 5"),
        (lambda s: s.length(5), "no sequence has id 5"),
        (lambda s: s.fill(0, 4), "sequence 0 must be empty, but has 6 tokens"),
        (lambda s: s.adopt(0, []), "sequence 0 must be empty, but has 6 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(call: Any, message: str) -> None:
    sequences = filled([6, 3])
    state = lambda: (sequences.blocks.counts, sequences.rows, sequences.lengths, sequences.table().tolist())  # noqa: E731
    before = state()
    with pytest.raises(ValueError, match=message):
        call(sequences)
    assert state() == before


def test_sequences_that_are_gone_hold_nothing() -> None:
    blocks = Blocks(8, block_size=4)
    one, two = Sequences(blocks), Sequences(blocks)
    for sequences in (one, two):
        sequences.add()
        sequences.extend([0], [9], 9)
    one.copy(0)
    one.select([])
    blocks.remember([*range(8)], one.blocks_of(0)[:2], "")
    del sequences, one
    assert (blocks.num_free, blocks.num_idle, blocks.num_shared) == (5, 2, 0)
    assert blocks.allocate(5)[3:] == [1, 0]  # the end of a sequence goes before its beginning
    assert two.lengths == [9]


def test_a_copy_on_the_same_blocks_holds_them_once_more() -> None:
    sequences = filled([6])
    blocks = sequences.blocks
    other = copy.deepcopy(sequences, {id(blocks): blocks})
    assert other.blocks is blocks
    assert (blocks.num_free, blocks.num_shared) == (6, 2)
    copies, fresh, *_ = other.extend([6], [1], 1)
    assert copies == [(sequences.blocks_of(0)[1], fresh[0])]
    assert (sequences.length(0), other.length(0)) == (6, 7)
    assert sequences.table()[0, 1] != other.table()[0, 1]
    del other
    assert (blocks.num_free, blocks.num_shared) == (6, 0)


def test_an_empty_sequence_is_filled_with_new_blocks() -> None:
    sequences = filled([6, 3])
    sequences.empty(0)
    assert len(sequences.fill(0, 9)) == 3
    assert sequences.lengths == [9, 3]
    assert sequences.table()[0, :3].tolist() == sequences.blocks_of(0)
    sequences.add()
    with pytest.raises(OutOfBlocks, match="resume: 5 more blocks are needed, and 4 of 8 are free"):
        sequences.fill(2, 17)
    assert sequences.length(2) == 0
