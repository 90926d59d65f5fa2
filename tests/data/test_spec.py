"""A data spec refuses what no loader could make sense of, naming the field."""

import pytest
from pydantic import ValidationError

from qvattn.data import DataSpec, HubSpec

PAIR = {"train_source": "a", "train_target": "b"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"corpus": "files"}, "needs train_source"),
        ({"corpus": "files", **PAIR, "valid_source": "c"}, "valid_source and valid_target go together"),
        ({"corpus": "verses", "train_source": "a"}, "train_source is set, but corpus='verses'"),
        ({"corpus": "tsv", "train_tsv": "a", "hub": {"name": "x"}}, "hub is set, but corpus='tsv'"),
        ({"corpus": "tsv", "train_tsv": "a", "tsv_columns": (1, 1)}, "two different columns"),
        ({"corpus": "hub"}, "needs hub"),
        ({"corpus": "kjv", "valid_fraction": 0.1}, "holds out whole books"),
        ({"corpus": "files", **PAIR, "valid_source": "c", "valid_target": "d", "valid_fraction": 0.1}, "drop one"),
        ({"corpus": "verses", "vocab_size": 100}, "vocab_size"),
        ({"corpus": "verses", "unknown": 1}, "unknown"),
        ({"corpus": "poems"}, "'verses'"),
    ],
)
def test_impossible_specs_name_the_field(fields, says):
    with pytest.raises(ValidationError, match=says):
        DataSpec(**fields)


def test_specs_survive_a_round_trip_and_are_frozen():
    spec = DataSpec(corpus="hub", hub=HubSpec(name="wmt/wmt17", config="de-en"), valid_fraction=0.01)
    assert DataSpec.model_validate(spec.model_dump(mode="json")) == spec
    with pytest.raises(ValidationError):
        spec.vocab_size = 1000
