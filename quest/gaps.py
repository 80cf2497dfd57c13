"""Which layers lack tokens that others have stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quest import _host


class Gaps:
    """Tokens that a layer was to store in some step, and has not: their positions, by layer and sequence.

    A step costs next to nothing while the same layers store. Layers that have not begun, as those of a model that are
    not paged never do, lack all tokens but those that were found, and nothing is noted of them.

    Attributes:
        stored_step: by layer, the version of the last step that it has stored, 0 before its first.
    """

    def __init__(self, num_layers: int, sequences: _host.Sequences) -> None:
        self.stored_step = [0] * num_layers
        self._sequences = sequences
        self._missing: dict[tuple[int, int], set[int]] = {}
        self._silent = set(range(num_layers))  # layers that have not begun
        self._version = 0  # of the step, 0 if there is none
        self._spans: tuple[Sequence[int], ...] = ((), (), (), ())
        self._given: dict[tuple[int, int], set[int]] = {}  # of the step, what others have written meanwhile
        self._away: dict[int, set[int]] = {}  # suspended sequences, and which layers had not begun then

    def begin(self, version: int, ids: Sequence[int], before: Sequence[int], *span: Sequence[int]) -> None:
        """The step before is over. The next is of sequences that had `before` tokens; `span`: the first position of
        each that is stored, and the one after the last."""
        self.note()
        self._version, self._spans, self._given = version, (ids, before, *span), {}

    def note(self) -> None:
        """Note who has stored what of the step so far."""
        if not self._version or not (self._missing or self._silent or min(self.stored_step) < self._version):
            return  # as nearly always
        late = {layer for layer, stored in enumerate(self.stored_step) if stored < self._version}
        if late == self._silent and not self._missing:
            return
        for layer in self._silent - late:
            self._start(layer)
        self._silent &= late
        for sequence, before, first, end in zip(*self._spans, strict=True):
            for layer in range(len(self.stored_step)):
                if layer not in late:
                    self.fill(layer, sequence, range(first, end))
                elif layer not in self._silent:
                    self._lack(layer, sequence, {*range(before, end)} - self._given.get((layer, sequence), set()))

    def end(self) -> None:
        """The step is over: what comes would change its sequences' tokens."""
        self.note()
        self._version = 0

    def late(self, sequence: int, length: int) -> list[int]:
        """Layers that lack any of a sequence's first tokens, which are those of full blocks."""
        self.note()
        found = {layer for (layer, i), gap in self._missing.items() if i == sequence and min(gap) < length}
        return sorted(found | self._silent if self._unknown(sequence, length) else found)

    # --- what becomes of sequences -----------------------------------------------------------------------------------

    def fill(self, layer: int, sequence: int, positions: range) -> None:
        """These tokens are there now."""
        if gap := self._missing.get((layer, sequence)):
            gap.difference_update(positions)
            if not gap:
                del self._missing[layer, sequence]

    def written(self, layers: Iterable[int], sequence: int, positions: range) -> None:
        """Somebody else has written these tokens."""
        self.note()
        for layer in layers:
            if layer in self._silent:
                self._start(layer)
                self._silent.remove(layer)
            self.fill(layer, sequence, positions)
            self._given.setdefault((layer, sequence), set()).update(positions)

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Sequences `targets` are now what `sources` were."""
        if self._missing:
            gaps = {(layer, i): gap for (layer, i), gap in self._missing.items() if i not in sources}
            for (layer, i), gap in self._missing.items():
                gaps |= {
                    (layer, target): {*gap} for source, target in zip(sources, targets, strict=True) if source == i
                }
            self._missing = gaps

    def crop(self, sequences: Iterable[int], ends: Iterable[int]) -> None:
        for sequence, end in zip(sequences, ends, strict=True):
            for layer, i in [*self._missing]:
                if i == sequence:
                    self.fill(layer, i, range(end, max(self._missing[layer, i]) + 1))

    def suspend(self, sequence: int) -> None:
        self.end()
        self._away[sequence] = {*self._silent}

    def resume(self, sequence: int, length: int) -> None:
        """A suspended sequence is back; layers that have begun meanwhile lack it."""
        for layer in self._away.pop(sequence) - self._silent:
            self._lack(layer, sequence, {*range(length)})

    def remove(self, sequence: int) -> None:
        self.crop([sequence], [0])
        self._away.pop(sequence, None)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _lack(self, layer: int, sequence: int, positions: set[int]) -> None:
        if positions:
            self._missing.setdefault((layer, sequence), set()).update(positions)

    def _start(self, layer: int) -> None:
        """A layer begins with this step: it lacks all that was there before, but for what was found."""
        spans = {sequence: before for sequence, before, *_ in zip(*self._spans, strict=True)}
        for sequence in self._sequences.ids:
            length = spans.get(sequence, self._sequences.length(sequence))
            self._lack(layer, sequence, set().union(*self._unknown(sequence, length)))

    def _unknown(self, sequence: int, length: int) -> list[range]:
        """Positions in blocks that nobody knows by their tokens."""
        blocks, size = self._sequences.blocks_of(sequence), self._sequences.blocks.block_size
        spans = (range(i, min(i + size, length)) for i in range(0, length, size))
        return [span for span, block in zip(spans, blocks, strict=False) if not self._sequences.blocks.is_cached(block)]
