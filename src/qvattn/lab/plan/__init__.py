"""The planner: bytes, operations and roofline speed of a model and of its conversions, before any training."""

from .costs import Workload
from .hardware import TABLE, Hardware, choose, quantity, table
from .layers import Layer, Shape, State, Weights
from .planning import Plan, PlanRow, plan
from .source import shape_of, shape_of_config

__all__ = [
    "TABLE",
    "Hardware",
    "Layer",
    "Plan",
    "PlanRow",
    "Shape",
    "State",
    "Weights",
    "Workload",
    "choose",
    "plan",
    "quantity",
    "shape_of",
    "shape_of_config",
    "table",
]
