"""Bookkeeping of paged caches on the host, in C++ and without torch (csrc/host).

Blocks and sequences are numbers here; what blocks hold is for others to move. Every call that changes several things
checks first: an error changes nothing. Numbers of the wrong type raise a TypeError. Calls are atomic under Python's
lock, and each costs time by what it names, whatever the size of the pool.
"""

from collections.abc import Sequence
from typing import Any, final, overload

import numpy as np
from numpy.typing import NDArray

_Tokens = NDArray[np.integer[Any]] | Sequence[int]  # token ids, any 64-bit numbers

class OutOfBlocks(RuntimeError):
    """Fewer blocks are free than are needed; the message says how many are needed and free, and of how many.

    Nothing has been changed.
    """

class Blocks:
    """The block ids of a pool, 0 to num_blocks - 1: who holds them, and which tokens they are found by.

    A block is held by as many as its `refs` say. One that nobody holds is free, and idle if its tokens are known:
    then it keeps them until no other block is left, the one that was held longest ago going first. Any block serves
    anybody, so none are lost in gaps.
    """

    def __init__(self, num_blocks: int, *, block_size: int, watermark: int = 0, hash_bits: int = 64) -> None:
        """Blocks that nobody holds.

        Args:
            num_blocks: at least 0; `grow` adds more.
            block_size: tokens of a block, at least 1.
            watermark: blocks that `admits` leaves free.
            hash_bits: of the hashes that prefixes are looked for by. _Tokens are compared too, so that fewer bits cost
                time only; they are for tests.

        Raises:
            ValueError: a number is too small.
        """
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def watermark(self) -> int: ...
    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, idle ones included."""
    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds, and that are found by their tokens."""
    @property
    def num_cached(self) -> int:
        """Blocks whose tokens were remembered, held or idle; those too that are not found any more because the block
        before them has lost its own."""
    @property
    def num_shared(self) -> int:
        """Blocks that are held more than once."""
    @property
    def num_evicted(self) -> int:
        """Idle blocks that `allocate` has given away so far."""
    @property
    def counts(self) -> tuple[int, int, int, int, int, int]:
        """num_blocks, num_free, num_idle, num_shared, num_cached and num_evicted of one moment."""
    @property
    def free(self) -> list[int]:
        """Free blocks that are not idle, the one that is taken next at the end."""
    def refs(self, block: int) -> int:
        """How often a block is held. Raises IndexError if there is no such block, as all methods below do."""
    def is_cached(self, block: int) -> bool:
        """Whether a block counts among `num_cached`."""
    def admits(self, count: int) -> bool:
        """Whether `count` blocks can be taken so that the watermark stays free."""
    def grow(self, num_blocks: int) -> None:
        """Add free blocks up to `num_blocks`; none where there are as many."""
    def allocate(self, count: int) -> list[int]:
        """Take free blocks, each held once from now on; idle ones, which lose their tokens, after all others.

        Raises:
            OutOfBlocks: fewer are free.
        """
    def retain(self, block: int) -> None:
        """Hold a block once more; an idle one is no longer free.

        Raises:
            ValueError: it is free, and its tokens are not known.
        """
    def release(self, block: int) -> bool:
        """Hold a block once less.

        Returns:
            Whether nobody holds it any more and its tokens are not known: nobody needs what it holds.

        Raises:
            ValueError: nobody holds it.
        """
    def find(self, tokens: _Tokens, extra: str) -> list[int]:
        """The blocks that hold the longest known beginning of `tokens` under `extra`, each held once more; whole
        blocks only."""
    def remember(self, tokens: _Tokens, blocks: Sequence[int], extra: str) -> int:
        """Have full blocks found: `blocks[i]` holds tokens[i * block_size : (i + 1) * block_size], after those before.

        `extra` stands for all else that their contents depend on. Where other blocks are found by the same tokens
        already, those stay. A block that is found by other tokens or another `extra` stays so, and ends the call.

        Returns:
            How many of `blocks` were entered.

        Raises:
            ValueError: a block is free, or there are fewer tokens than the blocks hold.
        """
    def forget(self, block: int) -> None:
        """What a block holds changes: have it, and those that follow it, no longer found."""
    def forget_all(self) -> None:
        """`forget` every block."""
    def __deepcopy__(self, memo: dict[int, Any]) -> Blocks: ...

class Sequences:
    """The blocks of sequences: token t of a sequence lies in slot `blocks[t // block_size] * block_size + t %
    block_size`, which is reserved by `extend`.

    Sequences are known by ids, which are never used twice. Some of them, in an order, are the rows; the others wait.
    Sequences share blocks after `copy` and `fork`, and with others on the same `Blocks`: what a call is about to write
    is made a sequence's own before. Every method that takes an id raises a ValueError if no sequence has it.
    """

    def __init__(self, blocks: Blocks) -> None:
        """No sequences yet. Several may lie on the same blocks."""
    @property
    def blocks(self) -> Blocks: ...
    @property
    def ids(self) -> list[int]:
        """All sequences, ascending."""
    @property
    def rows(self) -> list[int]:
        """The rows' ids, in order."""
    @property
    def lengths(self) -> list[int]:
        """The rows' tokens."""
    @property
    def unused_slots(self) -> int:
        """Slots of held blocks that hold no token of any sequence here."""
    @property
    def width(self) -> int:
        """Blocks of the row that has most."""
    @property
    def room(self) -> tuple[int, int]:
        """Shape of `table()`: it is another array when this is another shape."""
    def __contains__(self, id: int) -> bool: ...
    def table(self) -> NDArray[np.int32]:
        """The rows' blocks in [room_rows, room_width], -1 in a row after its last block. Rows past the last mean
        nothing. The array shares its memory with the sequences, which keep it up to date until `room` changes."""
    def length(self, id: int) -> int:
        """_Tokens of a sequence."""
    def blocks_of(self, id: int) -> list[int]:
        """Blocks of a sequence, in order."""
    def add(self) -> int:
        """A new sequence without tokens, as the last row; gives its id."""
    def copy(self, id: int) -> int:
        """A new sequence that shares all blocks of another, as the last row; gives its id."""
    def select(self, ids: Sequence[int]) -> None:
        """Make these the rows, in this order; the others wait.

        Raises:
            ValueError: one is named twice.
        """
    def remove(self, id: int) -> list[int]:
        """End a sequence; rows after it move up. Gives the blocks that nobody needs any more."""
    def empty(self, id: int) -> list[int]:
        """Release a sequence's blocks, it stays without tokens. Gives the blocks that nobody needs any more."""
    def fill(self, id: int, length: int) -> list[int]:
        """Take new blocks for `length` tokens of a sequence without any; gives them.

        Raises:
            OutOfBlocks: fewer are free.
            ValueError: it has tokens.
        """
    def adopt(self, id: int, blocks: Sequence[int]) -> None:
        """Give full blocks, held already (`Blocks.find`), to a sequence without tokens, which releases them later.

        Raises:
            ValueError: it has tokens.
        """
    def fork(self, indices: Sequence[int]) -> list[int]:
        """Make row i what row indices[i] was. The first row that an old one becomes is that sequence still, further
        ones are copies of it, and an old row that none becomes ends.

        Returns:
            The blocks that nobody needs any more.

        Raises:
            ValueError: an index is not of a row.
        """
    def to_copy(self, begin: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Blocks that `extend` replaces by copies, as many times as each is copied."""
    def needed(self, begin: Sequence[int], counts: Sequence[int]) -> int:
        """Blocks that `extend` takes. Raises as it does, but for OutOfBlocks."""
    def extend(
        self, begin: Sequence[int], counts: Sequence[int], q_len: int, real: NDArray[np.bool_] | None = None
    ) -> tuple[list[tuple[int, int]], list[int], NDArray[np.int64], list[int], NDArray[np.int32], NDArray[np.int32]]:
        """Reserve slots for `counts[row]` tokens of each row from `begin[row]` on, which is at most its length.

        Blocks that get tokens and that others hold too are replaced by copies, but where all who hold one write to it
        the last keeps it; those whose tokens are known are forgotten.

        Args:
            begin, counts: one number per row.
            q_len: places of a row in the slots.
            real: [rows, q_len], which places hold the row's tokens; the last ones if None.

        Returns:
            copies: blocks to be copied whole, (from, to), before anything is written.
            fresh: blocks that were taken, those copied to included.
            slots: [rows, q_len], -1 in places that hold no token.
            ends: the tokens' end, begin + counts.
            ends and counts as arrays.

        Raises:
            OutOfBlocks: fewer are free than are needed.
            ValueError: numbers don't fit the rows, or the places.
        """
    def needed_to_crop(self, ends: Sequence[int], redo: Sequence[int]) -> int:
        """Blocks that `crop` takes. Raises as it does, but for OutOfBlocks."""
    def crop(self, ends: Sequence[int], redo: Sequence[int]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """Keep the first ends[row] tokens of each row; the last redo[row] of those are going to be written again.

        Returns:
            copies, fresh: as `extend` does.
            freed: blocks that nobody needs any more.

        Raises:
            OutOfBlocks: fewer are free than are needed.
            ValueError: an end is past the row's length, or `redo` past the end.
        """
    def __deepcopy__(self, memo: dict[int, Any]) -> Sequences:
        """On a deep copy of the blocks; on the same ones, held once more each, where `memo` maps them to themselves."""

def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Ask the system to back memory, which begins with a page, by huge pages, where it has such."""

class ResidencyCounts:
    """`hits`, `misses` in units; `bytes_in`, `bytes_out` moved; `resident`, `peak` bytes in memory."""

    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def bytes_in(self) -> int: ...
    @property
    def bytes_out(self) -> int: ...
    @property
    def resident(self) -> int: ...
    @property
    def peak(self) -> int: ...

@final
class Residency:
    """Which units of K and V are in memory. `table`: address, stride and width of a block table, int32.

    `rows`: positions [begin, end) of each row. `scan`, `read`, `read_pages`, `write` and `hold` raise OSError, and have
    changed nothing then.
    """

    def __init__(self, num_layers: int, max_bytes: int) -> None: ...
    def set_layer(
        self,
        layer: int,
        k: int,
        v: int,
        unit_bytes: tuple[int, int],
        *,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        unit_tokens: int,
        fd: int,
        file: str,
    ) -> None: ...
    def grow(self, layer: int, k: int, v: int, num_blocks: int, /) -> None: ...
    def scan(self, layer: int, table: tuple[int, int, int], rows: Sequence[tuple[int, int]], /) -> None: ...
    def read(self, layer: int, table: tuple[int, int, int], rows: Sequence[tuple[int, int]], /) -> None: ...
    def write(self, layer: int, table: tuple[int, int, int], rows: Sequence[tuple[int, int]], /) -> None: ...
    def read_pages(
        self,
        layer: int,
        table: tuple[int, int, int],
        page_idx: int,
        shape: tuple[int, ...],
        page_size: int,
        /,
    ) -> None: ...
    def hold(self, blocks: Sequence[int], /) -> None: ...
    def copy_blocks(self, pairs: Sequence[tuple[int, int]], /) -> None: ...
    def written(self, layer: int, blocks: Sequence[int], /) -> None: ...
    def forget(self, blocks: Sequence[int], /) -> None: ...
    def copy_layer(self, layer: int, other: Residency, /) -> None: ...
    def settle(self) -> None: ...
    @property
    def counts(self) -> ResidencyCounts: ...

Moves = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]

@final
class Slots:
    """Which units of K and V have a slot on a device; the others are on the host.

    Moves: units that lost their slots, those slots, which of them are newer than the host's copy; units that got slots,
    those slots. Copying is the caller's: out first, then in; if it can't, `undo` takes the last call back.
    """

    @overload
    def __init__(
        self, num_blocks: int, *, num_kv_heads: int, units_per_head: int, unit_tokens: int, capacity: int
    ) -> None: ...
    @overload
    def __init__(self, other: Slots) -> None: ...
    def grow(self, num_blocks: int, /) -> None: ...
    def units(
        self, table: tuple[int, int, int], page_idx: int, shape: tuple[int, ...], page_size: int, /
    ) -> NDArray[np.int64]:
        """The units of selected pages, each once."""

    def read(self, units: NDArray[np.int64], /) -> Moves | None:
        """Slots for different units that are read; None if they are more than there are slots: none has moved."""

    def write(self, units: NDArray[np.int64], /) -> tuple[NDArray[np.int64], Moves]:
        """Slots for units that are written, -1 for those that are to be written on the host."""

    def undo(self) -> None: ...
    def where(self, units: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Slots of units, -1 on the host."""

    def forget(self, blocks: Sequence[int], /) -> None:
        """Blocks hold nothing any more."""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """hits, misses: units; used, peak: slots."""
