"""Which tokens of which sequences lie in which blocks: the part of a paged cache that knows no layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quest import _host
from quest._host import OutOfBlocks
from quest.gaps import Gaps
from quest.pools import Pools, Stored, Usage, check_int

Tokens = Sequence[int] | Tensor


@dataclass(slots=True, eq=False)
class Step:
    """Slots reserved for one step, the same for every layer. Valid until the cache is changed by another call."""

    slot_mapping: Tensor  # [batch, q_len] int64, -1 for a token that is not stored
    seq_lens: Tensor  # [batch] int32, lengths after the step
    block_table: Tensor  # [batch, max_blocks] int32, -1 where a row has no block
    num_new: Tensor  # [batch] int32, tokens that each row gains
    lengths: list[int]  # the numbers of seq_lens
    version: int


class PagedSequences:
    """Sequences and their blocks. The batch is an ordered choice of them, its rows; the others wait.

    Attributes:
        pools: the blocks, which other caches may use too.
        ids: the rows' sequences, in order.
        lengths: the rows' tokens.
        block_table: [batch, max_blocks] int32, -1 where a row has no block.
        seq_lens: [batch] int32, the numbers of `lengths`.
    """

    def __init__(self, pools: Pools, batch_size: int) -> None:
        self.pools = pools
        self.config = pools.config
        self.device = pools.device
        self._on_cpu = pools.device.type == "cpu"  # a device makes that name anew each time, which is slow
        self._sequences = _host.Sequences(pools.blocks)
        for _ in range(batch_size):
            self._sequences.add()
        self._suspended: dict[int, tuple[Stored, int]] = {}  # and their lengths
        self._gaps = Gaps(pools.num_layers, self._sequences)
        self._version = 0
        self.lengths: list[int] = []
        self.block_table = self._int32([])
        self._room = self._int32([])
        self._refresh()

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def version(self) -> int:
        """Another one after every change."""
        return self._version

    @property
    def num_blocks(self) -> int:
        """Blocks of the pools, free ones included."""
        return self.pools.blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, those included that are kept for their tokens while nobody needs others."""
        return self.pools.blocks.num_free

    @property
    def waiting(self) -> list[int]:
        """Sequences that are in the pools, but not in the batch."""
        return [i for i in self._sequences.ids if i not in self._suspended and i not in self.ids]

    @property
    def suspended(self) -> list[int]:
        """Sequences that are in the second tier."""
        return list(self._suspended)

    def usage(self) -> Usage:
        """Blocks by state, slots taken for nothing, and how prefixes were found. May be called from any thread."""
        return self.pools.usage(self._sequences.unused_slots)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, wherever it is."""
        self._check_id("length", sequence)
        return self._suspended[sequence][1] if sequence in self._suspended else self._sequences.length(sequence)

    # --- one step ----------------------------------------------------------------------------------------------------

    def extend(self, num_new: int | Sequence[int] | Tensor, *, start: Sequence[int] | None = None) -> Step:
        """Reserve slots for new tokens of every row, in all layers.

        Args:
            num_new: tokens per row: one number for all, or one per row (a row's tokens are then the last ones of its
                q_len = max(num_new) places), or a bool tensor [batch, q_len] that says which tokens are real; the
                others get slot -1 and are never stored.
            start: where each row's tokens begin, if not at its end: the slots of tokens that are there already, for
                a layer that stores them later than the others.

        Raises:
            OutOfBlocks: the pools may not grow, and fewer blocks are free than are needed.
            ValueError, TypeError: an argument is wrong. An error, also one of memory, changes nothing.
        """
        counts, q_len, real = self._new_tokens(num_new)
        begin = self.lengths if start is None else self._check_start(start)
        ids, before, span = self.ids, self.lengths, (begin, counts, q_len, real)
        if self.pools.stale:
            self._mend()
        if (residency := self.pools.residency) is None:
            try:
                taken, (slots, ends, seq_lens, num) = self._take(span)
            except OutOfBlocks:
                self.pools.reserve(self._sequences.needed(begin, counts))
                taken, (slots, ends, seq_lens, num) = self._take(span)
        else:  # what may fail comes before what changes
            self.pools.reserve(self._sequences.needed(begin, counts))
            with residency.step():
                residency.hold(self._sequences.to_copy(begin, counts))
                taken, (slots, ends, seq_lens, num) = self._take(span)
        lens = self._tensor(seq_lens)
        if taken or start is not None:
            self._refresh()
        else:  # the rows and their blocks are those of before
            self.lengths, self.seq_lens, self._version = ends, lens, self._version + 1
        self._gaps.begin(self._version, ids, before, begin, ends)
        return Step(self._tensor(slots), lens, self.block_table, self._tensor(num), ends, self._version)

    def _take(self, span: tuple[Any, ...]) -> tuple[bool, tuple[Any, ...]]:
        """Extend the rows; whether there are other blocks now, and the step's slots, lengths and counts."""
        copies, fresh, *numbers = self._sequences.extend(*span)
        if copies or fresh:
            self._changed(copies, fresh, ())
        return bool(copies or fresh), tuple(numbers)

    def admits(self, num_tokens: int) -> bool:
        """Whether a new sequence of so many tokens fits without growing the pools, and leaves the watermark free."""
        check_int("admits", "num_tokens", num_tokens, 0)
        return self.pools.blocks.admits(-(-num_tokens // self.config.block_size))

    # --- sequences ---------------------------------------------------------------------------------------------------

    def add(self) -> int:
        """A new, empty sequence, as the batch's last row; gives its id."""
        sequence = self._sequences.add()
        self._refresh()
        return sequence

    def copy(self, sequence: int) -> int:
        """A new sequence, as the batch's last row, that shares the blocks of another until one of them writes there."""
        self._check_id("copy", sequence, suspended=False)
        self._gaps.end()
        fresh = self._sequences.copy(sequence)
        self._gaps.fork([sequence, sequence], [sequence, fresh])
        self._refresh()
        return fresh

    def select(self, sequences: Iterable[int]) -> None:
        """Make these sequences the batch, in this order. Those left out wait, and keep their blocks."""
        wanted = list(sequences)
        for sequence in wanted:
            self._check_id("select", sequence, suspended=False)
        if len({*wanted}) != len(wanted):
            raise ValueError(f"select: sequences must differ, got {wanted}")
        if wanted != self.ids:
            self._sequences.select(wanted)
            self._refresh()

    def remove(self, sequence: int) -> None:
        """End a sequence, wherever it is; if it is a row, the rows after it move up."""
        self._check_id("remove", sequence)
        self._gaps.end()
        self._gaps.remove(sequence)
        if sequence in self._suspended:
            self.pools.drop(self._suspended.pop(sequence)[0])
        self._changed((), (), self._sequences.remove(sequence))
        self._refresh()

    def fork(self, indices: Sequence[int] | Tensor) -> None:
        """Make row i a copy of the old row `indices[i]`: selects, reorders, repeats. Rows share their blocks until
        they write to them. `indices` may be of another length than the batch. Of the rows that become one old row the
        first is that sequence still; rows that nobody becomes end."""
        indices = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        if not indices:
            raise ValueError("fork: indices must name at least one row, got none")
        for i, source in enumerate(indices):
            check_int("fork", f"indices[{i}]", source, 0, self.batch_size - 1)
        self._gaps.end()
        before = self.ids
        self._changed((), (), self._sequences.fork(indices))
        self._refresh()
        self._gaps.fork([before[i] for i in indices], self.ids)
        ended = {*before} - {*self.ids}
        self._gaps.crop(ended, [0] * len(ended))

    def free(self, row: int) -> None:
        """Empty one row: its blocks go back to the pool, and its place in the batch stays."""
        check_int("free", "row", row, 0, self.batch_size - 1)
        self._gaps.end()
        self._gaps.crop([self.ids[row]], [0])
        self._changed((), (), self._sequences.empty(self.ids[row]))
        self._refresh()

    def reset(self) -> None:
        """Empty every row; the pools stay."""
        self._gaps.end()
        self._gaps.crop(self.ids, [0] * self.batch_size)
        for sequence in self.ids:
            self._changed((), (), self._sequences.empty(sequence))
        self._refresh()

    def clear(self) -> None:
        """End every sequence, waiting and suspended ones too."""
        for sequence in [*self._sequences.ids]:
            self.remove(sequence)

    # --- preemption --------------------------------------------------------------------------------------------------

    def suspend(self, sequence: int) -> None:
        """Move a sequence to the second tier and release its blocks. It leaves the batch, and keeps its id.

        Raises:
            OSError: the second tier is full or fails; the sequence stays where it is.
        """
        self._check_id("suspend", sequence, suspended=False)
        self._mend()
        stored = self.pools.store(self._sequences.blocks_of(sequence))
        self._gaps.suspend(sequence)
        self._suspended[sequence] = stored, self._sequences.length(sequence)
        if sequence in self.ids:
            self._sequences.select([i for i in self.ids if i != sequence])
        self._changed((), (), self._sequences.empty(sequence))
        self._refresh()

    def resume(self, sequence: int) -> None:
        """Bring a suspended sequence back, as it was; it waits until `select` makes it a row.

        Raises:
            OutOfBlocks, OSError: it stays suspended.
        """
        self._check_id("resume", sequence)
        if sequence not in self._suspended:
            raise ValueError(f"resume: sequence must be suspended, got {sequence}, which is not")
        stored, length = self._suspended[sequence]
        self.pools.reserve(-(-length // self.config.block_size))
        blocks = self._sequences.fill(sequence, length)
        self._changed((), blocks, ())
        try:
            self.pools.load(stored, blocks)
        except BaseException:
            self._changed((), (), self._sequences.empty(sequence))
            raise
        self._gaps.resume(sequence, length)
        del self._suspended[sequence]
        self.pools.drop(stored)

    # --- prefixes ----------------------------------------------------------------------------------------------------

    def reuse(self, tokens: Tokens, *, row: int = 0, extra_keys: Sequence[Hashable] = ()) -> int:
        """Give an empty row the blocks of the longest known beginning of `tokens`, but for the last token.

        Args:
            tokens: token ids, [num_tokens].
            extra_keys: what else K and V depend on (adapter, model, images): found is what was remembered with equal
                ones. They are told apart by their `repr`.

        Returns:
            Tokens that the row has now, a multiple of the block size; the caller goes on with the next one.
        """
        check_int("reuse", "row", row, 0, self.batch_size - 1)
        if self.lengths[row]:
            raise ValueError(f"reuse: row must be empty, got row {row} with {self.lengths[row]} tokens")
        ids = _token_ids("reuse", tokens)
        blocks = self.pools.find(ids[:-1], repr(tuple(extra_keys)))
        if blocks:
            self._sequences.adopt(self.ids[row], blocks)
            self._refresh()
        return self.lengths[row]

    def remember(self, tokens: Tokens, *, row: int = 0, extra_keys: Sequence[Hashable] = ()) -> int:
        """Make a row's full blocks findable by their tokens, also after the row has ended, until the pools need them.

        Args:
            tokens: the row's token ids, or its first ones: [num_tokens].

        Returns:
            How many blocks were not known before.

        Raises:
            ValueError: there are more tokens than the row has, or a layer has not stored all of them.
        """
        check_int("remember", "row", row, 0, self.batch_size - 1)
        ids = _token_ids("remember", tokens)
        if len(ids) > self.lengths[row]:
            raise ValueError(f"remember: tokens must be at most the row's {self.lengths[row]}, got {len(ids)}")
        self._mend()
        full = len(ids) // self.config.block_size
        if late := self._gaps.late(self.ids[row], full * self.config.block_size):
            raise ValueError(f"remember: every layer must have stored the tokens, layers {late} have not")
        blocks = self._sequences.blocks_of(self.ids[row])[:full]
        return self.pools.blocks.remember(ids, blocks, repr(tuple(extra_keys)))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        """See to it that all blocks of the sequences have summaries."""

    def _changed(self, copies: Sequence[tuple[int, int]], fresh: Sequence[int], freed: Sequence[int]) -> None:
        """Do with the tensors what was done with their blocks."""
        self.pools.changed(copies, fresh, freed)

    def _new_tokens(self, num_new: int | Sequence[int] | Tensor) -> tuple[list[int], int, np.ndarray | None]:
        """Tokens per row, places per row, and which of them hold tokens [batch, q_len] (None: the last ones)."""
        batch = len(self.lengths)
        if not batch:
            raise ValueError("extend: the batch must have rows, got none: add or select sequences")
        if isinstance(num_new, int):
            check_int("extend", "num_new", num_new, 1)
            return [num_new] * batch, num_new, None
        if isinstance(num_new, Tensor):
            if num_new.dtype != torch.bool or num_new.dim() != 2 or num_new.shape[0] != batch or not num_new.numel():
                raise ValueError(
                    f"extend: num_new as a tensor must be bool [{batch}, q_len], got {num_new.dtype} {[*num_new.shape]}"
                )
            real = num_new.cpu().contiguous().numpy()
            return real.sum(1).tolist(), real.shape[1], real
        counts = list(num_new)
        if len(counts) != batch:
            raise ValueError(f"extend: num_new must be one number per row ({batch}), got {len(counts)}")
        for row, count in enumerate(counts):
            check_int("extend", f"num_new[{row}]", count, 0)
        if not (q_len := max(counts)):
            raise ValueError("extend: num_new must be above 0 for at least one row, got only zeros")
        return counts, q_len, None

    def _check_start(self, start: Sequence[int]) -> list[int]:
        begin = list(start)
        if len(begin) != self.batch_size:
            raise ValueError(f"extend: start must be one position per row ({self.batch_size}), got {len(begin)}")
        for row, first in enumerate(begin):
            check_int("extend", f"start[{row}]", first, 0, self.lengths[row])
        return begin

    def _check_id(self, op: str, sequence: int, *, suspended: bool = True) -> None:
        check_int(op, "sequence", sequence, 0)
        if sequence not in self._sequences:
            raise ValueError(f"{op}: sequence must be the id of one that was added and not removed, got {sequence}")
        if not suspended and sequence in self._suspended:
            raise ValueError(f"{op}: sequence must not be suspended, got {sequence}, which is: resume it first")

    def _refresh(self) -> None:
        """The tensors that follow from the sequences; what `extend` returned before is no longer valid."""
        sequences = self._sequences
        self.ids, self.lengths = sequences.rows, sequences.lengths
        if sequences.room != tuple(self._room.shape):
            with torch.inference_mode(False):
                self._room = torch.from_numpy(sequences.table())
        table = self._room[: len(self.ids), : max(1, sequences.width)]
        self.block_table = table if self._on_cpu else table.to(self.device)
        self.seq_lens = self._int32(self.lengths)
        self._version += 1

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        made = torch.from_numpy(numbers)
        return made if self._on_cpu else made.to(self.device)

    def _int32(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)


def _token_ids(op: str, tokens: Tokens) -> np.ndarray:
    ids = tokens.cpu().numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"{op}: tokens must be one-dimensional and of integers, got {ids.dtype} {[*ids.shape]}")
    return np.ascontiguousarray(ids, np.int64)
