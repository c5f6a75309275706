"""Many tokens per call without the host: forward pass, draw, end of sequence and advance run on the device.

On a GPU the step is compiled on request and captured as one CUDA graph per batch size; the host replays it `span` times
and reads the tokens once. The module is the trainer's own, so that new weights need no copy. Elsewhere the same step
runs eagerly, which is how tests exercise it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oxrl.generators.embedded.cache import attention_configs, next_logits, own_attention
from oxrl.generators.embedded.joined_linear import JoinLinears, join_weights
from oxrl.generators.embedded.paged import PagedCache, PagedPass, PagedPrefill, PagedStep
from oxrl.generators.embedded.pages import PAGE, PageTables, pages_for
from oxrl.generators.embedded.sampling import Draws, Rules, draw_rows, uniforms_of
from oxrl.machine.out_of_memory import ran_out_of_memory
from oxrl.tensors import decoder_layers
from oxrl.types import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

NO_OTHER_GRAPHS: dict[str, Any] = {"triton.cudagraphs": False}
SPAN, LONG_SPAN = 8, 16  # tokens per row between two reads by the host, which overlap with the next span
FEW_SLOTS = 256  # up to so many, steps are short: a span has to last as long as the host takes to prefill
ENDS = 16  # end tokens per row that are compared on the device; the host compares all of them
NOT_FINITE = "the model's logits are not finite: check its weights, or use a higher precision"
VARIANTS = 32  # of the compiled draw, at most: two for each of seven `Draws`, of full and of smaller batches
COMPILED_TOKENS = 2e6  # from so many sampled tokens on, compiling earns back its time
HELD = 0.1  # of the device memory: a larger cache is freed for training, and graphs are captured again
SHARE = 0.5  # of the free device memory, for keys and values


class Capture(NamedTuple):
    """How to decode on a GPU."""

    capture: bool | None = None  # None: on a GPU, if the model allows it; elsewhere the same steps run eagerly
    compiles: bool | None = None  # None: if enough tokens are sampled to earn back the time it takes
    expected_tokens: float = 0.0  # that the run will sample
    cache_bytes: int | None = None  # for keys and values
    span: int | None = None  # None: LONG_SPAN for up to FEW_SLOTS, else SPAN


class Feed(NamedTuple):
    """What the device needs of a sequence: its last token and where it is, its rules, and when it ends."""

    token: int
    position: int  # of the token in the sequence
    drawn: int  # tokens sampled so far: the position in its random numbers
    left: int  # tokens that may still be sampled
    key: int
    end_token_ids: Sequence[int]
    rule: GenerationConfig


ENDED, UNDECIDED = -1, -2  # in place of a token: the row had ended, or must be continued by the host (see `draw_rows`)


class Span(NamedTuple):
    """`[steps, rows]` each; the token is ENDED or UNDECIDED where none was sampled."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    cut_mass: NDArray[np.float64]


class Started(NamedTuple):
    """A span that the device computes; `done` is an event of CUDA, if there is one."""

    number: int
    steps: int
    out: Tensor
    done: Any


INTEGERS = ("token", "position", "left", "drawn", "active", "key", "top_k")  # lines; `Feed` describes them
NUMBERS = ("temperature", "top_p", "min_p")


class State(NamedTuple):
    """The device's view of the batch. The rows are the last dimension, except for `tables`.

    A row is a column of `integers` (see INTEGERS, then its end tokens) and of `numbers` (see NUMBERS).
    """

    integers: Tensor  # int64
    numbers: Tensor  # float64
    step: Tensor  # [1], of the span
    tables: Tensor  # [rows, pages of the longest sequence]
    out: Tensor  # [span, 3, rows]: token, log-prob, cut mass, as float64

    def narrow(self, rows: int) -> State:
        """The first `rows` rows, as views."""
        narrow = (self.integers[:, :rows], self.numbers[:, :rows], self.step, self.tables[:rows], self.out[..., :rows])
        return State(*narrow)


def empty_state(slots: int, span: int, table: int, device: Any) -> State:
    return State(
        integers=torch.zeros(len(INTEGERS) + ENDS, slots, dtype=torch.int64, device=device),
        numbers=torch.ones(len(NUMBERS), slots, dtype=torch.float64, device=device),
        step=torch.zeros(1, dtype=torch.int64, device=device),
        tables=torch.zeros(slots, table, dtype=torch.int32, device=device),
        out=torch.zeros(span, 3, slots, dtype=torch.float64, device=device),
    )


def advance(logits: Tensor, state: State, draws: Draws) -> None:
    """Draw the next tokens, record them, and freeze the rows that ended."""
    token, position, left, count, active, key, top_k = (state.integers[line] for line in range(len(INTEGERS)))
    temperature, top_p, min_p = (state.numbers[line] for line in range(len(NUMBERS)))
    rules = Rules(temperature.float(), top_k, top_p, min_p.float())
    drawn, undecided = draw_rows(logits, rules, uniforms_of(key, count), draws)
    going = (active > 0) & ~undecided
    tokens = drawn.tokens.where(going, torch.where(active > 0, UNDECIDED, ENDED))
    new = torch.stack([tokens.double(), drawn.logprobs.double(), drawn.cut_mass])
    state.out.index_copy_(0, state.step, new[None])
    left.sub_(going.long())
    count.add_(going.long())
    going = going & ~(drawn.tokens == state.integers[len(INTEGERS) :]).any(0) & (left > 0)
    token.copy_(drawn.tokens.where(going, token))
    position.add_(going.long())
    active.copy_(going.long())
    state.step.add_(1)


def compiled_layers(model: PreTrainedModel) -> dict[nn.Module, Any]:
    """The decoder layers with a compiled `forward`; layers of one kind share their code."""
    forwards = {layer: MethodType(type(layer).forward, layer) for layer in decoder_layers(model)}
    options = {**NO_OTHER_GRAPHS, "post_grad_custom_pre_pass": JoinLinears()}
    return {layer: torch.compile(each, dynamic=True, options=options) for layer, each in forwards.items()}


@contextmanager
def forwards_replaced(functions: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Inside, these modules run other functions instead of their `forward`."""
    before = {module: vars(module).get("forward") for module in functions}
    for module, function in functions.items():
        module.forward = function
    try:
        yield
    finally:
        for module, function in before.items():
            if function is None:
                del module.forward
            else:
                module.forward = function


def batch_sizes(slots: int) -> list[int]:
    """Batch sizes for which a graph is captured, ascending: at most a third of a batch is idle rows."""
    sizes = [size for power in range(3, 20) for size in (1 << power, 3 << (power - 1)) if size < slots]
    return [*sizes, slots]


class CapturedDecoder:
    """Sequences in pages; `enter` prefills, `run` samples up to `span` tokens of every row."""

    shrinks = late_entry = True

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        options: Capture = Capture(),  # noqa: B008 - immutable
    ) -> None:
        self.model, self.slots, self.cache_bytes = model, slots, options.cache_bytes
        self.span = options.span or (LONG_SPAN if slots <= FEW_SLOTS else SPAN)
        self.captures = model.device.type == "cuda"
        self.configs = attention_configs(model)
        self.sizes = batch_sizes(slots)
        self.compiles = bool(options.compiles)
        self._advance = torch.compile(advance, options=NO_OTHER_GRAPHS) if self.compiles else advance
        self._layers = compiled_layers(model) if self.compiles else {}
        self._join_weights()
        self.graphs: dict[tuple[int, Draws], Any] = {}
        self._memory: Any = None  # shared by all graphs
        self._beside: Any = None  # a stream
        self._on_device: dict[int, int] = {}  # rows whose state the device has, and their column there
        self._started = self._finished = 0  # spans
        self._held: list[tuple[int, list[int]]] = []  # pages that a span in flight may still write, by its number
        self.allocate(0)

    def allocate(self, longest: int) -> None:
        """Make room for `slots` sequences of `longest` tokens, or as many pages as the memory allows."""
        pages = 1 + self.slots * pages_for(longest + self.span)
        limit = self._max_pages()
        self.cache = PagedCache(min(pages, limit))
        self.tables = PageTables(max(2, self.cache.pages))
        width = pages_for(longest + self.span)
        self.state = empty_state(self.slots, self.span, width, self.model.device)
        self.host_tables = np.zeros((2 * self.slots, width), dtype=np.int32)  # rows, and sequences prefilled ahead
        self.longest = longest
        self._on_device.clear()
        self._forget_graphs()

    @property
    def page_bytes(self) -> int:
        """Of keys and values of all layers."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * PAGE * heads * dim * self.model.dtype.itemsize)

    def _max_pages(self) -> int:
        if self.cache_bytes is not None:
            return max(2, self.cache_bytes // self.page_bytes)
        if not self.captures:
            return 1 << 30
        free, _ = torch.cuda.mem_get_info(self.model.device)
        unused = torch.cuda.memory_reserved(self.model.device) - torch.cuda.memory_allocated(self.model.device)
        return max(2, int(SHARE * (free + unused)) // self.page_bytes)

    def fits(self, contexts: Sequence[Sequence[int]], lengths: Sequence[int], *, alone: bool = False) -> int:
        """How many of these contexts, from the first on, can enter now; `lengths` are those of their whole sequences.

        Every other sequence keeps a page to grow. If there is no other (`alone`), memory may be allocated anew.
        """
        if alone and max(lengths) > self.longest:
            self.allocate(-(-max(lengths) // PAGE) * PAGE)
        free = len(self.tables.free) - len(self.tables.tables)
        seen: set[tuple[int, ...]] = set()
        for count, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
            full, rest = divmod(len(context), PAGE)
            free -= (0 if tuple(context) in seen else full) + (1 if rest else 0) + 1
            seen.add(tuple(context))
            if free < 0 or length > self.longest or pages_for(length) >= self.tables.pages:
                return count
        return len(contexts)

    def enter(self, rows: Sequence[int], contexts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after each context, `[len(rows), V]`."""
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, context in zip(rows, contexts, strict=True):
            rows_of.setdefault(tuple(context), []).append(row)
        for context, own in rows_of.items():
            if not self.tables.enter(own, len(context)):
                raise RuntimeError(f"{len(self.tables.free)} free pages cannot hold {len(context)} tokens: see fits()")
            for row in own:
                self._show(row)
        logits = self._prefill(rows_of)
        order = {context: index for index, context in enumerate(rows_of)}
        return logits[[order[tuple(context)] for context in contexts]]

    def _prefill(self, rows_of: dict[tuple[int, ...], list[int]]) -> Tensor:
        device, lengths = self.model.device, [len(context) for context in rows_of]
        tokens = torch.tensor([token for context in rows_of for token in context], device=device)[None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        tables = [[self.tables[row] for row in own] for own in rows_of.values()]
        prefill = PagedPrefill(self.cache, lengths, tables, device)
        keep = torch.tensor(prefill.borders[1:], device=device) - 1
        return self._forward(tokens, positions, prefill, keep)[0]

    def _forward(self, tokens: Tensor, positions: Tensor, how: PagedPass, keep: int | Tensor) -> Tensor:
        with how.running(), own_attention(self.configs), forwards_replaced(self._layers):
            return next_logits(self.model, self.cache, {"input_ids": tokens}, positions, how, keep)

    def extend(self, row: int, length: int) -> bool:
        """Make room for `length` tokens in this row; False if there are too few pages."""
        before = len(self.tables[row])
        if not self.tables.extend(row, length):
            return False
        if len(self.tables[row]) > before:
            self._show(row)
        return True

    def leave(self, row: int) -> None:
        """Free the pages of this row, after the spans in flight: they may still write to them."""
        self._on_device.pop(row, None)
        self._held.append((self._started, self.tables.remove(row)))
        self._free_pages()

    def _free_pages(self) -> None:
        for _, pages in (free := [each for each in self._held if each[0] <= self._finished]):
            self.tables.release(pages)
        del self._held[: len(free)]

    def move(self, source: int, target: int) -> None:
        self.tables.move(source, target)
        self._on_device.pop(target, None)
        if source in self._on_device:
            self._on_device[target] = self._on_device.pop(source)
        self._show(target)

    def reload(self, row: int) -> None:
        """The next `start` sets the state of this row again."""
        self._on_device.pop(row, None)

    def settle(self) -> None:
        """Wait for the spans in flight; all rows are loaded again by the next `start`."""
        if self.captures and self._started > self._finished:
            torch.cuda.current_stream(self.model.device).synchronize()
        self._finished = self._started
        self._free_pages()
        self._on_device.clear()

    def clear(self) -> None:
        """Free all pages. Captured graphs have the addresses of their memory: it stays allocated if it is small."""
        self.settle()
        for row in list(self.tables.tables):
            self.tables.leave(row)
        size = self.cache.pages * self.page_bytes
        if not self.captures or size > HELD * torch.cuda.get_device_properties(self.model.device).total_memory:
            self.cache = PagedCache(self.cache.pages)
            self._forget_graphs()

    def _show(self, row: int) -> None:
        pages = self.tables[row]
        self.host_tables[row, : len(pages)] = pages

    def missing(self, rows: int) -> list[int]:
        """Of the first `rows` rows, those whose state the device does not have."""
        return [row for row in range(rows) if row not in self._on_device]

    def start(self, rows: int, feeds: Mapping[int, Feed], draws: Draws, steps: int) -> Started:
        """Sample up to `steps` tokens of the first rows, without waiting; they have pages for them.

        `feeds` has the rows that are `missing`. A span may be started before the last one is finished.
        """
        width = next(size for size in self.sizes if size >= rows)
        replay = self._graph(width, draws)
        self._load(rows, width, feeds)
        for _ in range(steps):
            replay()
        self._started += 1
        out = self.state.out[:steps, :, :rows]
        if not self.captures:
            return Started(self._started, steps, out.clone(), None)
        host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        host.copy_(out, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return Started(self._started, steps, host, done)

    def finish(self, started: Started) -> Span:
        """Wait for the tokens of a span."""
        if started.done is not None:
            started.done.synchronize()
        self._finished = started.number
        self._free_pages()
        out = started.out.numpy()
        return Span(out[:, 0].astype(np.int64), out[:, 1], out[:, 2])

    def beside(self) -> AbstractContextManager[Any]:
        """Inside, work runs beside the span that was started."""
        if not self.captures:
            return nullcontext()
        self._beside = self._beside or torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._beside)

    def next_logits(self, rows: Sequence[int], feeds: Sequence[Feed]) -> Tensor:
        """Feed the last tokens of these rows once, eagerly; return their logits."""
        device = self.model.device
        positions = torch.tensor([feed.position for feed in feeds], device=device)
        tokens = torch.tensor([feed.token for feed in feeds], device=device)
        step = PagedStep(self.cache, torch.from_numpy(self.host_tables[list(rows)]).to(device), positions)
        return self._forward(tokens[:, None], positions[:, None], step, 1)[:, -1]

    def _load(self, rows: int, width: int, feeds: Mapping[int, Feed]) -> None:
        """Bring the state of the batch on the device up to date. Idle rows use the scratch page."""
        state = self.state
        source = np.array([self._on_device.get(row, 0) for row in range(rows)], dtype=np.int64)
        if (source != np.arange(rows)).any():
            columns = self._upload(source)
            for lines in (state.integers, state.numbers):
                lines[:, :rows] = lines[:, columns]
        if feeds:
            columns = self._upload(np.fromiter(feeds, dtype=np.int64))
            state.integers[:, columns] = self._upload(np.array([_integers(feed) for feed in feeds.values()]).T)
            rules = [(feed.rule.temperature, feed.rule.top_p, feed.rule.min_p) for feed in feeds.values()]
            state.numbers[:, columns] = self._upload(np.array(rules, dtype=np.float64).T)
        state.tables[:rows] = self._upload(self.host_tables[:rows])
        state.step.zero_()
        if rows < width:
            self._idle(slice(rows, width))
        self._on_device = {row: row for row in range(rows)}

    def _upload(self, values: NDArray[Any]) -> Tensor:
        """Copy to the device without waiting for its work."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(self.model.device, non_blocking=True) if self.captures else tensor.clone()

    def _idle(self, rows: slice) -> None:
        for name in ("active", "position"):
            self.state.integers[INTEGERS.index(name), rows] = 0
        self.state.tables[rows] = 0

    def _step(self, state: State, draws: Draws) -> None:
        """Feed the tokens, draw the next ones, freeze the rows that ended. No value is read by the host."""
        token, position = state.integers[:2]
        step = PagedStep(self.cache, state.tables, position)
        logits = self._forward(token[:, None], position[:, None], step, 1)[:, -1]
        if self.compiles:  # one compiled function for all batch sizes
            for each, dim in ((logits, 0), (state.integers, 1), (state.numbers, 1), (state.out, 2)):
                torch._dynamo.maybe_mark_dynamic(each, dim)
        with torch._dynamo.config.patch(recompile_limit=VARIANTS):
            self._advance(logits, state, draws)

    def _graph(self, rows: int, draws: Draws) -> Callable[[], None]:
        state = self.state.narrow(rows)
        if not self.captures:
            return lambda: self._step(state, draws)
        if self._started == self._finished:  # weights do not change while a span is in flight
            self._check_addresses()
        if (rows, draws) not in self.graphs:
            for size in sorted({rows, self.sizes[-1]}, reverse=True):  # the largest first: the others fit in its memory
                if (size, draws) not in self.graphs:
                    kept = [each.clone() for each in self.state]  # capturing runs the step
                    self.graphs[size, draws] = self._capture(self.state.narrow(size), draws)
                    for each, before in zip(self.state, kept, strict=True):
                        each.copy_(before)
        replay: Callable[[], None] = self.graphs[rows, draws].replay
        return replay

    def _join_weights(self) -> None:
        if self.compiles:
            join_weights(decoder_layers(self.model))
        self._addresses = self._addresses_now()

    def _addresses_now(self) -> list[int]:
        return [each.data_ptr() for each in chain(self.model.parameters(), self.model.buffers())]

    def _check_addresses(self) -> None:
        if self._addresses_now() != self._addresses:
            logger.info("the model's weights have moved: the decoding step is captured again")
            self._forget_graphs()
            self._join_weights()

    def _capture(self, state: State, draws: Draws) -> Any:
        started = time.monotonic()
        self._idle(slice(None))  # warm-up and capture write to the scratch page only
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                state.step.zero_()
                self._step(state, draws)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        state.step.zero_()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._step(state, draws)
        self._memory = graph.pool()
        logger.info("captured decoding of %d rows in %.1f s", state.integers.shape[1], time.monotonic() - started)
        return graph

    def _forget_graphs(self) -> None:
        self.graphs.clear()
        self._memory = None


def why_not_captured(decoder: CapturedDecoder) -> str | None:
    """Compare a few captured tokens with the plain module; the reason why the model cannot be captured, if any."""
    model = decoder.model
    vocabulary = model.get_input_embeddings().weight.shape[0]
    contexts = torch.randint(vocabulary, (2, PAGE + 7), generator=torch.Generator().manual_seed(0)).tolist()
    contexts[0] = contexts[0][:7]
    rule = GenerationConfig(temperature=0.0)
    try:
        fits = decoder.fits(contexts, [2 * PAGE] * len(contexts), alone=True)
        if fits < len(contexts):
            return f"there is memory for {fits} short sequences only"
        first = decoder.enter([0, 1], contexts).argmax(-1).tolist()
        feeds = [Feed(token, len(seen), 1, 8, 0, (), rule) for token, seen in zip(first, contexts, strict=True)]
        for row, feed in enumerate(feeds):
            decoder.extend(row, feed.position + 9)
        steps = min(8, decoder.span)
        span = decoder.finish(decoder.start(len(feeds), dict(enumerate(feeds)), Draws.of([rule]), steps))
    except (ImportError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if ran_out_of_memory(error):
            raise
        logger.debug("capture failed", exc_info=True)
        return f"the model's decoding step cannot be captured ({str(error).strip().splitlines()[0]})"
    finally:
        decoder.clear()
    for row, context in enumerate(contexts):
        sampled = span.tokens[:, row].tolist()
        whole = torch.tensor([*context, first[row], *sampled], device=model.device)[None]
        logits = model(input_ids=whole, use_cache=False).logits[0, len(context) : -1].float()
        if not bool(logits.isfinite().all()):
            raise FloatingPointError(NOT_FINITE)
        theirs = logits.log_softmax(-1).gather(1, whole[0, len(context) + 1 :, None])[:, 0].double().cpu().numpy()
        gap = float(np.abs(theirs - span.logprobs[:, row]).max())
        if not gap <= (1e-3 if model.dtype == torch.float32 else 0.2):
            return f"log-probs of its captured step differ by {gap:.1e}"
    return None


def _integers(feed: Feed) -> list[int]:
    """The column of a row in `State.integers`."""
    key = feed.key - 2**64 if feed.key >= 2**63 else feed.key
    ends = (*feed.end_token_ids, *[-1] * ENDS)[:ENDS]
    return [feed.token, feed.position, feed.left, feed.drawn, 1, key, feed.rule.top_k, *ends]
