"""Turns pydantic's validation errors into one readable line each, with the nearest valid key for an unknown one."""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line per mistake: the dotted key, what is wrong, the value given and what is allowed."""
    lines: dict[str, None] = {}  # an ordered set: a union reports the same key once per member
    for problem in error.errors(include_url=False):
        lines["  " + _line(problem, root)] = None
    return list(lines)


def unknown_key(key: str, section: str, allowed: Sequence[str]) -> str:
    """`unknown key 'dmodel' in section 'model'; did you mean 'd_model'? ...`"""
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.0)
    hint = f"; nearest valid key: {near[0]!r}" if near else ""
    return f"unknown key {key!r} in section {section or 'top level'!r}{hint} (allowed: {', '.join(allowed)})"


def _line(problem: Any, root: type[BaseModel]) -> str:
    location = problem["loc"]
    where = ".".join(str(part) for part in _keys_only(location, root))
    kind = problem["type"]
    if kind == "extra_forbidden":
        *parent, key = _keys_only(location, root)
        model = _model_at(parent, root)
        return unknown_key(str(key), ".".join(map(str, parent)), list(model.model_fields) if model else [])
    if kind == "missing" and isinstance(location[-1], int):
        return f"{where.rpartition('.')[0]}: too few entries, got {_brief(problem['input'])}"
    if kind == "missing":
        return f"{where}: this key is required"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:] if message[1:2].islower() else message
    if kind == "value_error" and isinstance(problem["input"], dict | BaseModel):
        return f"{where}: {message}" if where else message
    return f"{where}: {message}, got {_brief(problem['input'])}"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _keys_only(location: Sequence[str | int], root: type[BaseModel]) -> list[str | int]:
    """The location without the names of union members that pydantic mixes in (`attention.str` -> `attention`)."""
    keys: list[str | int] = []
    annotation: Any = root
    for part in location:
        models, free = _members(annotation)
        if isinstance(part, int):
            keys.append(part)
            annotation = _element(annotation)
            continue
        field = next((model.model_fields[part] for model in models if part in model.model_fields), None)
        if field is not None:
            keys.append(part)
            annotation = field.annotation
        elif free or (models and part not in {model.__name__ for model in models}):
            if free and ("[" in part or part in ("str", "int", "float", "bool")):
                continue
            keys.append(part)
            annotation = Any
    return keys


def _members(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """The models a type may be, and whether it may also be something whose keys are not known here."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = [_members(argument) for argument in get_args(annotation)]
        return [model for models, _ in members for model in models], any(free for _, free in members)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    return [], annotation is not type(None)


def _element(annotation: Any) -> Any:
    for member in (annotation, *get_args(annotation)):
        if get_origin(member) in (list, tuple):
            return get_args(member)[0]
    return Any


def _model_at(path: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel] | None:
    annotation: Any = root
    for part in path:
        models, _ = _members(annotation)
        if isinstance(part, int):
            annotation = _element(annotation)
        else:
            annotation = next((m.model_fields[part].annotation for m in models if part in m.model_fields), Any)
    models, _ = _members(annotation)
    return models[0] if models else None
