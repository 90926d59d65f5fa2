"""Batch plans: every example once, within the budget, a function of seed and epoch, resumable."""

import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qvattn import UserError
from qvattn.data import BatchPlan, shard

LENGTHS = np.random.default_rng(0).integers(2, 40, size=(300, 2))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=80),
    budget=st.integers(30, 200),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 50),
)
def test_every_index_once_and_the_budget_kept(lengths, budget, seed, epoch):
    plan = BatchPlan(lengths, max_tokens=budget, seed=seed)
    batches = plan.epoch(epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        assert len(batch) * max(max(lengths[i]) for i in batch) <= budget
    assert BatchPlan(np.array(lengths), max_tokens=budget, seed=seed).epoch(epoch) == batches


def test_order_depends_on_seed_and_epoch():
    plan = BatchPlan(LENGTHS, max_tokens=200, seed=1)
    assert plan.epoch(0) != plan.epoch(1)
    assert {frozenset(b) for b in plan.epoch(0)} != {frozenset(b) for b in plan.epoch(1)}
    assert plan.epoch(0) != BatchPlan(LENGTHS, max_tokens=200, seed=2).epoch(0)


def test_asking_in_another_order_or_changing_an_answer_changes_nothing():
    plan, other = (BatchPlan(LENGTHS, max_tokens=200, seed=1) for _ in range(2))
    wanted = [plan.epoch(e) for e in (0, 1, 2)]
    np.random.seed(5)
    assert [other.epoch(e) for e in (2, 0, 1)] == [wanted[2], wanted[0], wanted[1]]
    other.epoch(1)[0].clear()
    assert other.epoch(1) == wanted[1]


def test_another_process_gets_the_same_order():
    code = (
        "import numpy as np; from qvattn.data import BatchPlan;"
        "print(BatchPlan(np.arange(1, 60), max_tokens=120, seed=7).epoch(3))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == str(BatchPlan(np.arange(1, 60), max_tokens=120, seed=7).epoch(3))


def test_batches_are_bucketed_by_length():
    plan = BatchPlan(LENGTHS, max_tokens=600, seed=1)
    spread = [np.ptp(LENGTHS[batch, 1]) for batch in plan.epoch(0)]
    assert np.mean(spread) < 8


@pytest.mark.parametrize("done", [0, 1, 5, 70])
def test_resuming_from_a_position_continues_the_same_sequence(done):
    plan = BatchPlan(LENGTHS, max_tokens=200, seed=1)
    whole = list(islice(plan.batches(), done + 10))
    epoch, batch, _ = whole[done]
    assert list(islice(BatchPlan(LENGTHS, max_tokens=200, seed=1).batches(epoch, batch), 10)) == whole[done:]


def test_resuming_at_the_end_of_an_epoch_goes_on_with_the_next():
    plan = BatchPlan(LENGTHS, max_tokens=200, seed=1)
    assert next(plan.batches(0, len(plan.epoch(0)))) == (1, 0, plan.epoch(1)[0])


def test_a_pair_over_the_budget_is_named():
    with pytest.raises(UserError, match=r"max_tokens=50: example 1 alone has 3 and 63 tokens; raise max_tokens to 63"):
        BatchPlan([[5, 5], [3, 63]], max_tokens=50, seed=0)


@pytest.mark.parametrize(("lengths", "seed", "says"), [([], 0, "N > 0"), ([3], -1, "seed=-1")])
def test_impossible_plans(lengths, seed, says):
    with pytest.raises(UserError, match=says):
        BatchPlan(lengths, max_tokens=50, seed=seed)


@given(batch=st.lists(st.integers(), max_size=20, unique=True), world=st.integers(1, 8))
def test_shards_cover_a_batch_once(batch, world):
    parts = [shard(batch, rank, world) for rank in range(world)]
    assert sorted(i for part in parts for i in part) == sorted(batch)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_shard_refuses_a_rank_outside():
    with pytest.raises(UserError, match="rank=2"):
        shard([1], 2, 2)


def test_fingerprints_follow_what_decides_the_order():
    same = BatchPlan(LENGTHS, max_tokens=200, seed=1).fingerprint
    assert same == BatchPlan(LENGTHS.tolist(), max_tokens=200, seed=1).fingerprint
    changed = LENGTHS.copy()
    changed[3, 0] += 1
    others = {
        BatchPlan(changed, max_tokens=200, seed=1).fingerprint,
        BatchPlan(LENGTHS, max_tokens=201, seed=1).fingerprint,
        BatchPlan(LENGTHS, max_tokens=200, seed=2).fingerprint,
    }
    assert len(others | {same}) == 4
