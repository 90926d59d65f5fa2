"""One decoding step of any variant, shape by shape, and the cache it needs.

The variant itself is run on the meta device (shapes without numbers), so what is shown is what its code does; nothing
here knows a variant by name. Must never allocate a tensor of the size it talks about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels.terms import ScoreTerm, ValueTerm
from ..positions import POSITIONS
from ..spec import AttentionSpec
from ..streams import Stream

BASELINE = "mha"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One product or rearrangement of the step: `count` times the same shapes, for every `each`."""

    what: str
    shapes: str
    count: int
    each: str
    why: str


@dataclass(frozen=True, kw_only=True)
class CacheLine:
    """A stream as the cache holds it after the step: heads x (tokens, width)."""

    stream: str
    role: str
    heads: int
    tokens: int
    width: int

    @property
    def elements(self) -> int:
        return self.heads * self.tokens * self.width

    def __str__(self) -> str:
        return f"{self.heads} x ({self.tokens},{self.width})"


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A decoding step of one layer over `history` cached tokens. route: "absorb" or "expand", see Attention."""

    spec: AttentionSpec
    history: int
    route: str
    lines: tuple[Line, ...]
    cache: tuple[CacheLine, ...]
    baseline: tuple[CacheLine, ...]

    @property
    def elements(self) -> int:
        """Elements in the cache after the step, one layer and row."""
        return sum(line.elements for line in self.cache)

    @property
    def baseline_elements(self) -> int:
        """The same for MHA with as many query heads of the same size."""
        return sum(line.elements for line in self.baseline)

    @property
    def saved(self) -> float:
        """Percent less than MHA."""
        return 100 * (1 - self.elements / self.baseline_elements)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "variant": self.spec.variant,
            "spec": self.spec.model_dump(mode="json", exclude_none=True),
            "history": self.history,
            "route": self.route,
            "steps": [vars(line) for line in self.lines],
            "cache": [{**vars(line), "elements": line.elements, "shape": str(line)} for line in self.cache],
            "elements": self.elements,
            "mha_elements": self.baseline_elements,
            "saved_percent": self.saved,
        }


def spec_for(variant: str, d_model: int, n_heads: int, kv_heads: int | None = None, **fields: Any) -> AttentionSpec:
    """The spec of a variant with `kv_heads` shared heads wherever it shares any; UserError where it shares none."""
    spec = AttentionSpec(variant=variant, d_model=d_model, n_heads=n_heads, **fields)
    if kv_heads is None:
        return spec
    shared = [name for name in ("k_heads", "v_heads") if getattr(spec, name) is not None and name not in fields]
    if not shared and variant != BASELINE:
        raise UserError(f"kv_heads={kv_heads}: variant {spec.variant!r} has no shared heads; leave it unset")
    return spec.replace(**dict.fromkeys(shared, kv_heads))


def walk(spec: AttentionSpec, history: int) -> Walk:
    """Run one step for the token that follows `history` cached ones.

    Raises UserError for a negative history, and for a bidirectional spec, which has no past to keep.
    """
    if history < 0:
        raise UserError(f"history={history}: allowed are 0 or more cached tokens")
    if not spec.causal:
        raise UserError("causal=False: a bidirectional layer keeps no past")
    tokens = history + 1
    with torch.no_grad(), torch.device("meta"):
        variant = spec.variant_class(spec)
        position = POSITIONS[spec.position.kind](spec.n_heads, spec.causal, spec.position.options)
        now, past = position.rotation(torch.zeros(1, 1)), position.rotation(torch.zeros(1, tokens))
        x = torch.empty(1, 1, spec.d_model)
        queries, entries = variant.queries(x, now), variant.entries(x, now)
        streams = {s.name: torch.empty(1, s.heads, tokens, s.width) for s in spec.streams}
        absorbs = variant.absorbs(spec)
        terms = (variant.absorb if absorbs else variant.expand)(queries, streams, past)
        lines = [
            *(_query(name, q, spec) for name, q in queries.items()),
            *(_entry(stream, entries[stream.name], history) for stream in spec.streams),
            *(_folded(term, queries, streams, terms.scores) for term in terms.scores if _is_folded(term, queries)),
            *(_score(term, streams, spec) for term in terms.scores),
            _softmax(spec, len(terms.scores), tokens, position.has_tables),
            *_value(terms.value, streams, spec, tokens),
            _output(spec, variant.output_width(spec), variant.output),
        ]
    return Walk(
        spec=spec,
        history=history,
        route="absorb" if absorbs else "expand",
        lines=tuple(lines),
        cache=_cache(spec.streams, tokens),
        baseline=_cache(_baseline(spec).streams, tokens),
    )


def _baseline(spec: AttentionSpec) -> AttentionSpec:
    return AttentionSpec(variant=BASELINE, d_model=spec.d_model, n_heads=spec.n_heads, d_head=spec.d_head)


def _cache(streams: Sequence[Stream], tokens: int) -> tuple[CacheLine, ...]:
    return tuple(CacheLine(stream=s.name, role=s.role, heads=s.heads, tokens=tokens, width=s.width) for s in streams)


def product(a: tuple[int, int], b: tuple[int, int]) -> str:
    """`(1,512) x (512,101) -> (1,101)`"""
    return f"({a[0]},{a[1]}) x ({b[0]},{b[1]}) -> ({a[0]},{b[1]})"


def _query(name: str, q: Tensor, spec: AttentionSpec) -> Line:
    return Line(
        what=f"query {name}",
        shapes=f"(1,{spec.d_model}) -> (1,{q.shape[-1]})",
        count=q.shape[1],
        each="query head",
        why="of the new token alone; used in this step and forgotten",
    )


def _entry(stream: Stream, entry: Tensor, history: int) -> Line:
    width = entry.shape[-1]
    use = {(True, True): "scored and summed", (True, False): "scored", (False, True): "summed"}
    return Line(
        what=f"stream {stream.name}",
        shapes=f"({history},{width}) + (1,{width}) -> ({history + 1},{width})",
        count=entry.shape[1],
        each="shared head" if entry.shape[1] > 1 else "layer",
        why=f"{use[stream.scores, stream.values]} by every later token: appended to the cache, never changed",
    )


def _source(tensor: Tensor, streams: Mapping[str, Tensor]) -> tuple[str, bool]:
    """The stream that a term reads, and whether it reads it as it is cached."""
    name = next((name for name, stream in streams.items() if stream is tensor), None)
    return (name, True) if name else ("rebuilt from " + ", ".join(streams), False)


def _is_folded(term: ScoreTerm, queries: Mapping[str, Tensor]) -> bool:
    """Whether the term's query is neither one of the token's own queries nor a slice of one."""
    own = [_root(q) for q in queries.values()]
    return not any(_root(term.q) is root for root in own)


def _root(x: Tensor) -> Tensor:
    """The tensor that x is a view of, or x itself."""
    return x if x._base is None else x._base


def _folded(
    term: ScoreTerm, queries: Mapping[str, Tensor], streams: Mapping[str, Tensor], terms: Sequence[ScoreTerm]
) -> Line:
    unused = [q.shape[-1] for q in queries.values() if not any(term.q is q for term in terms)]
    width = term.q.shape[-1]
    return Line(
        what=f"query folded for {_source(term.stream, streams)[0]}",
        shapes=f"(1,{unused[0]}) -> (1,{width})" if len(unused) == 1 else f"-> (1,{width})",
        count=term.q.shape[1],
        each="query head",
        why="the factor that would make keys goes into the one query instead, which gives the same scores",
    )


def _score(term: ScoreTerm, streams: Mapping[str, Tensor], spec: AttentionSpec) -> Line:
    keys = term.keys()
    name, as_cached = _source(term.stream, streams)
    why = f"the new query meets every token; {_heads(keys.shape[1], spec.n_heads)}"
    if not as_cached:
        why += "; the keys are rebuilt on read and not kept"
    for changed, how in ((term.gain, "times a learned gain"), (term.rotation, "rotated")):
        if changed is not None:
            why += f"; {how} on read"
    width = term.q.shape[-1]
    if width < term.stream.shape[-1]:
        why += f"; {width} of the stream's {term.stream.shape[-1]} elements"
    return Line(
        what=f"scores over {name}",
        shapes=product((1, width), (width, keys.shape[2])),
        count=spec.n_heads,
        each="query head",
        why=why,
    )


def _heads(shared: int, n_heads: int) -> str:
    if shared == n_heads:
        return "each head has its own"
    return f"{n_heads} query heads read {shared} shared head{'s' if shared > 1 else ''}"


def _softmax(spec: AttentionSpec, terms: int, tokens: int, tables: bool) -> Line:
    parts = ["scaled"]
    if terms > 1:
        parts.insert(0, f"{terms} score rows added")
    if tables:
        parts.append(f"weighed by distance ({spec.position.kind})")
    return Line(
        what="softmax",
        shapes=f"(1,{tokens}) -> (1,{tokens})",
        count=spec.n_heads,
        each="query head",
        why=f"{', '.join(parts)}; one row, as no earlier token is computed again",
    )


def _value(term: ValueTerm, streams: Mapping[str, Tensor], spec: AttentionSpec, tokens: int) -> list[Line]:
    values = term.values()
    name, as_cached = _source(term.stream, streams)
    why = "the flat sum over all heads' entries" if term.flat else _heads(values.shape[1], spec.n_heads)
    if not as_cached:
        why += "; the values are rebuilt on read and not kept"
    width = values.shape[-1]
    lines = [
        Line(
            what=f"values from {name}",
            shapes=product((1, tokens), (tokens, width)),
            count=spec.n_heads,
            each="query head",
            why=f"weighted sum; {why}",
        )
    ]
    if term.lift is not None:
        lines.append(
            Line(
                what="value factor",
                shapes=product((1, width), (term.lift.shape[1], term.lift.shape[2])),
                count=spec.n_heads,
                each="query head",
                why="applied to the one sum instead of to every token, which gives the same",
            )
        )
    return lines


def _output(spec: AttentionSpec, width: int, output: Any) -> Line:
    y = output(torch.empty(1, spec.n_heads, 1, width))
    return Line(
        what="output",
        shapes=product((1, spec.n_heads * width), (spec.n_heads * width, y.shape[-1])),
        count=1,
        each="layer",
        why="heads side by side, back to the model's width",
    )
