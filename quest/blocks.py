"""Which blocks of the pool each row holds. Knows block ids and token counts; K, V and summaries are in `pools.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class BlockAllocator:
    """Hands out block ids and counts references.

    Attributes:
        refs: references of each block, 0 for a free one.
        free: ids of the free blocks, a stack; the lowest id of a fresh pool comes first.
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self.refs: list[int] = []
        self.free: list[int] = []
        self.grow(num_blocks)

    @property
    def num_blocks(self) -> int:
        return len(self.refs)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`."""
        added = range(len(self.refs), num_blocks)
        self.refs += [0] * len(added)
        self.free = [*reversed(added), *self.free]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference.

        Raises:
            ValueError: fewer are free; nothing is taken then.
        """
        if count > len(self.free):
            raise ValueError(
                f"BlockAllocator.allocate: count must be at most {len(self.free)} free blocks, got {count}"
            )
        taken = self.free[len(self.free) - count :][::-1]
        del self.free[len(self.free) - count :]
        for block in taken:
            self.refs[block] = 1
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference for each of `blocks`."""
        for block in blocks:
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less for each of `blocks`; those without any are free again."""
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)


class BlockTable:
    """The blocks of each row, in order, as lists (for the host) and as a tensor (for the kernels).

    Attributes:
        rows: block ids of each row.
        tensor: [batch, max(1, longest row)] int32, -1 where a row has no block; a view of a larger tensor.
    """

    @torch.inference_mode(False)
    def __init__(self, batch_size: int, block_size: int, allocator: BlockAllocator, device: torch.device) -> None:
        self.block_size = block_size
        self.allocator = allocator
        self.rows: list[list[int]] = [[] for _ in range(batch_size)]
        self._room = torch.full((batch_size, 1), -1, dtype=torch.int32, device=device)
        self._view()

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def shared(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """(row, place) of the blocks that must be copied before each row writes its positions [first, end).

        Of rows that all write to one block, the last may keep it if no other row refers to it.
        """
        refs = self.allocator.refs
        writers: Counter[int] = Counter()
        places = []
        for row, (first, end) in enumerate(spans):
            blocks = self.rows[row] if first < end else []
            for place in range(first // self.block_size, min(self.blocks(end), len(blocks))):
                block = blocks[place]
                if refs[block] > 1 and refs[block] > writers[block] + 1:
                    writers[block] += 1
                    places.append((row, place))
        return places

    def own(self, row: int, place: int) -> tuple[int, int]:
        """Replace a shared block by a free one: (shared, fresh), for the copy of what it holds."""
        shared, (fresh,) = self.rows[row][place], self.allocator.allocate(1)
        self.allocator.release([shared])
        self.rows[row][place] = fresh
        self._room[row, place] = fresh
        return shared, fresh

    @torch.inference_mode(False)
    def add(self, row: int, count: int) -> None:
        """Give a row `count` more free blocks."""
        start, blocks = len(self.rows[row]), self.allocator.allocate(count)
        end, room = start + count, self._room.shape[1]
        if end > room:
            wider = self._room.new_full((len(self.rows), max(end, 2 * room)), -1)
            wider[:, :room] = self._room
            self._room = wider
        self._room[row, start:end] = torch.tensor(blocks, dtype=torch.int32, device=self._room.device)
        self.rows[row] += blocks
        self._view()

    def drop(self, row: int, keep: int) -> None:
        """Give a row's blocks back, but for the first `keep`."""
        blocks = self.rows[row]
        if len(blocks) > keep:
            self.allocator.release(reversed(blocks[keep:]))
            self._room[row, keep : len(blocks)] = -1
            del blocks[keep:]
            self._view()

    @torch.inference_mode(False)
    def fork(self, indices: Sequence[int]) -> None:
        """Make row i refer to the blocks of the old row `indices[i]`."""
        uses = Counter(indices)
        for row, blocks in enumerate(self.rows):
            for _ in range(uses[row] - 1):
                self.allocator.retain(blocks)
            if not uses[row]:
                self.allocator.release(blocks)
        self.rows = [list(self.rows[i]) for i in indices]
        self._room = self._room[torch.tensor(indices, device=self._room.device)]
        self._view()

    def slots(self, begin: Sequence[int], counts: Sequence[int], real: Tensor | None) -> Tensor:
        """slot_mapping [batch, q_len] of tokens from position `begin` on, whose blocks are in place.

        `real` [batch, q_len] says which of the q_len places hold a row's `counts` tokens, None that all do.
        """
        size, device = self.block_size, self._room.device
        q_len = counts[0] if real is None else real.shape[1]
        if q_len == 1:
            slots = [
                [blocks[first // size] * size + first % size if count else -1]
                for blocks, first, count in zip(self.rows, begin, counts, strict=True)
            ]
            return torch.tensor(slots, dtype=torch.int64, device=device)
        order = torch.arange(q_len, device=device) if real is None else real.cumsum(1) - 1
        position = torch.tensor(begin, device=device)[:, None] + order
        place = (position // size).clamp(0, self._room.shape[1] - 1)
        slot = self._room.gather(1, place).long() * size + position % size
        return slot if real is None else torch.where(real, slot, -1)

    def _view(self) -> None:
        self.tensor = self._room[:, : max(1, *map(len, self.rows))]
