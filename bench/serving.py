"""Continuous batching over one model through transformers: a scheduler in small, to read and to copy.

    engine = Engine(model, quest.Pools(num_layers, config=config, num_blocks=512, max_blocks=512, watermark=4))
    engine.submit(Request(prompt, max_new_tokens=64))
    while engine.busy:
        for request in engine.step():
            print(request.id, request.output or request.error)

Requests wait in a queue, first come, first served. A step of the engine lets the first one in if there is room, reads
one chunk of its prompt, and gives a token to every sequence that runs, all in one forward pass. Where blocks run out,
the youngest makes room and goes back to the head of the queue. So whoever has been let in is older than whoever waits,
and the oldest always gets on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quest import OutOfBlocks, Pools
from quest.integrations.transformers import QuestCache, register
from quest.measure import cache_argument, context_limit

__all__ = ["PREEMPT", "Counters", "Engine", "Request"]

PREEMPT = ("recompute", "suspend")


@dataclass(eq=False)
class Request:
    """What is asked for, and what has come of it.

    Attributes:
        prompt: token ids, a system prompt included.
        max_new_tokens: length of the answer, unless a stop token ends it.
        id: for people.
        arrival: when it is submitted, in seconds.
        output: the answer's token ids so far.
        times: when each of them was there, by the engine's clock.
        error: why there will be no more of them.
        preemptions: how often it had to make room.
        sequence: its id in the paged cache while it has one.
    """

    prompt: list[int]
    max_new_tokens: int
    id: str = ""
    arrival: float = 0.0
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None
    preemptions: int = 0
    sequence: int | None = None

    @property
    def known(self) -> list[int]:
        """Tokens that are read as a prompt: also what was answered before it had to make room, but for the last token.

        That one is the next decode step's, as it would have been.
        """
        return self.prompt + self.output[:-1]


@dataclass
class Counters:
    """Prompt tokens that were looked for among the cached ones (at the first try of a request) and found, tokens that
    forward passes have read as prompts, and how often a sequence made room."""

    looked_up: int = 0
    found: int = 0
    computed: int = 0
    preemptions: int = 0


class Engine:
    """Requests in, answers out, greedily decoded. Not for several threads.

    Args:
        model: a causal language model of transformers; its attention becomes "quest".
        pools: the KV cache's blocks. What it may read of them per token, its config says.
        chunk: prompt tokens that a step reads, a multiple of the block size. Chunks end at multiples of it, so that a
            prompt is read in the same portions whether whole chunks before them were found in the cache or not.
        preempt: how a sequence makes room. "recompute" drops its blocks and reads prompt and answer anew (what is still
            cached of them is found); "suspend" moves them to the pools' second tier. With sparse reads only that
            continues bit by bit: keys of an answer depend on what its tokens have read, and a prompt is read densely.
        stop: token ids that end an answer, and belong to it.
        clock: seconds.
    """

    def __init__(
        self,
        model: Any,
        pools: Pools,
        *,
        chunk: int = 256,
        preempt: str = "recompute",
        stop: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        block_size = pools.config.block_size
        if chunk < 1 or chunk % block_size:
            raise ValueError(f"Engine: chunk must be a multiple of the block size ({block_size}), got {chunk}")
        if preempt not in PREEMPT:
            raise ValueError(f"Engine: preempt must be one of {', '.join(PREEMPT)}, got {preempt!r}")
        register()
        model.set_attn_implementation("quest")
        self.model = model
        self.pools = pools
        self.chunk = chunk
        self.preempt = preempt
        self.stop = stop
        self.clock = clock
        self.cache = QuestCache(model.config, prefix_cache=pools)
        self.paged = self.cache.open(pools.device)
        self.counters = Counters()
        self.waiting: deque[Request] = deque()
        self.prefilling: Request | None = None
        self.running: list[Request] = []
        self._done: list[Request] = []
        self._argument = cache_argument(model)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running or self._done)

    def submit(self, request: Request) -> None:
        """Take a request, or refuse it: the next step gives it back, with its error."""
        if reason := self._refusal(request):
            self._end(request, reason)
        else:
            self.waiting.append(request)

    def step(self) -> list[Request]:
        """Read one chunk of a prompt at most, and add a token to every running sequence.

        Returns:
            The requests that have ended, those that failed too. An error is one request's; the others go on.
        """
        self._admit()
        self._prefill()
        self._decode()
        done, self._done = self._done, []
        return done

    # --- the parts of a step -----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let the first of the queue in if the blocks it lacks leave the watermark free, or if nobody else runs."""
        if self.prefilling is not None or not self.waiting:
            return
        request, paged = self.waiting[0], self.paged
        if request.sequence is None:
            tokens, sequence = request.known, paged.add()
            paged.select([sequence])
            # At least two tokens are left: a single one would be read as in a decode step, sparsely.
            found = paged.reuse(tokens[:-1])
            if self.running and not paged.admits(len(tokens) - found):
                paged.remove(sequence)
                return
            request.sequence = sequence
            if not request.preemptions:
                self.counters.looked_up += len(tokens)
                self.counters.found += found
        else:
            if self.running and not paged.admits(paged.length(request.sequence)):
                return
            try:
                paged.resume(request.sequence)
            except (OSError, OutOfBlocks):  # read it anew instead
                paged.remove(request.sequence)
                request.sequence = None
                return
        self.waiting.popleft()
        if paged.length(request.sequence) < len(request.known):
            self.prefilling = request
        else:
            self.running.append(request)

    def _prefill(self) -> None:
        """One chunk of the prompt that is being read; with the last one comes the answer's first token."""
        if (request := self.prefilling) is None:
            return
        tokens, start = request.known, self.paged.length(request.sequence)  # type: ignore[arg-type]
        end = min(start // self.chunk * self.chunk + self.chunk, len(tokens))
        end += end == len(tokens) - 1  # never a token alone
        try:
            (token,) = self._forward([request], [tokens[start:end]])
        except OutOfBlocks as error:
            self._make_room(error)
            return
        except Exception as error:
            self.prefilling = None
            self._fail(request, error)
            return
        self.counters.computed += end - start
        if end < len(tokens):
            return
        self.prefilling = None
        self.running.append(request)
        self._remember(request)
        if not request.output:  # otherwise it goes on where it was
            self._add(request, token)

    def _decode(self) -> None:
        """A token for every running sequence; the youngest make room if blocks run out."""
        while batch := [*self.running]:
            try:
                tokens = self._forward(batch, [request.output[-1:] for request in batch])
            except OutOfBlocks as error:
                self._make_room(error)
            except Exception:
                self._decode_one_by_one()
                return
            else:
                for request, token in zip(batch, tokens, strict=True):
                    self._add(request, token)
                return

    def _decode_one_by_one(self) -> None:
        """After an error: only those fail that fail alone."""
        for request in [*self.running]:
            try:
                (token,) = self._forward([request], [request.output[-1:]])
            except OutOfBlocks:
                pass  # the next step makes room
            except Exception as error:
                self.running.remove(request)
                self._fail(request, error)
            else:
                self._add(request, token)

    def _forward(self, requests: Sequence[Request], new: Sequence[list[int]]) -> list[int]:
        """The model's next token of each request, after `new` tokens, as many of each. An error changes nothing."""
        self.paged.select([request.sequence for request in requests])  # type: ignore[misc]
        self.cache.align()
        ids = torch.tensor(new, device=self.pools.device)
        before = self.paged.lengths
        position = torch.tensor(before, device=ids.device)[:, None] + torch.arange(ids.shape[1], device=ids.device)
        options = {"use_cache": True, "logits_to_keep": 1, self._argument: self.cache}
        try:
            with torch.inference_mode():
                logits = self.model(ids, position_ids=position, **options).logits
            return logits[:, -1].argmax(-1).tolist()
        except BaseException:
            self.cache.undo(before)
            raise

    # --- requests ----------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> str | None:
        """Why a request can't be served, however long it waits."""
        if not request.prompt or request.max_new_tokens < 1:
            return f"needs a prompt and an answer, got {len(request.prompt)} and {request.max_new_tokens} tokens"
        stored = len(request.prompt) + request.max_new_tokens - 1  # nobody reads the last token
        limit = context_limit(self.model)
        if limit is not None and stored > limit:
            return f"needs {stored:,} tokens of context, the model has {limit:,}"
        blocks = -(-stored // self.pools.config.block_size)
        if self.pools.max_blocks is not None and blocks > self.pools.max_blocks:
            return f"needs {blocks:,} blocks, the pool has {self.pools.max_blocks:,}"
        return None

    def _make_room(self, error: OutOfBlocks) -> None:
        """Send the youngest back to the head of the queue."""
        request = self.running.pop() if self.prefilling is None else self.prefilling
        self.prefilling = None
        if not self.running:  # nobody is left to wait for: the blocks are those of other caches on the pools
            self._fail(request, error)
            return
        request.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(request)
        if self.preempt == "suspend":
            try:
                self.paged.suspend(request.sequence)  # type: ignore[arg-type]
                return
            except (OSError, RuntimeError):  # the second tier is full
                pass
        self._release(request)

    def _add(self, request: Request, token: int) -> None:
        request.output.append(token)
        request.times.append(self.clock())
        if len(request.output) == request.max_new_tokens or token in self.stop:
            self.running.remove(request)
            self._release(request)
            self._end(request)

    def _remember(self, request: Request) -> None:
        self.paged.select([request.sequence])  # type: ignore[list-item]
        self.paged.remember((request.prompt + request.output)[: self.paged.lengths[0]])

    def _release(self, request: Request) -> None:
        """Give its blocks back; until others need them, its tokens can be found in them."""
        self._remember(request)
        self.paged.remove(request.sequence)  # type: ignore[arg-type]
        request.sequence = None

    def _fail(self, request: Request, error: Exception) -> None:
        self.paged.remove(request.sequence)  # type: ignore[arg-type]
        request.sequence = None
        self._end(request, f"{type(error).__name__}: {error}")

    def _end(self, request: Request, error: str | None = None) -> None:
        request.error = error
        self._done.append(request)
