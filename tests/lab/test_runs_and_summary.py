"""Reading run directories, and the rows and tables made from them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from fakes import write_comparison, write_run

from qvattn.errors import UserError
from qvattn.lab.curves import difference_curve, learning_curve, pareto_front
from qvattn.lab.experiment import load_experiments
from qvattn.lab.provenance import common_and_own, shared_environment
from qvattn.lab.runs import find_runs, flatten, is_complete, last_value, read_history, read_run
from qvattn.lab.summary import summarise
from qvattn.lab.table import columns_of, markdown


def test_reads_a_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r", name="QV", seed=2, accuracy=0.47))
    assert (run.name, run.seed, run.complete) == ("QV", 2, True)
    assert run.number("valid", "accuracy") == 0.47
    assert run.number("valid", "nothing") is None
    assert last_value(run.history, "valid_accuracy") == pytest.approx(0.47)


def test_unfinished_run_is_known_by_its_recipe(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r", name="QV", seed=3, status="running"))
    assert (run.name, run.seed, run.complete) == ("QV", 3, False)


def test_half_written_history_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("step,train_loss,valid_accuracy\n100,2.5,0.3\n200,2.4,\n300,2.")
    points = read_history(path)
    assert [point.step for point in points] == [100, 200]
    assert points[1].get("valid_accuracy") is None
    assert read_history(tmp_path / "missing.csv") == []


def test_broken_results_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "r", name="QV", seed=1)
    (directory / "results.json").write_text("{")
    assert not is_complete(directory)
    with pytest.raises(UserError, match=r"results\.json is not valid JSON"):
        read_run(directory)


def test_find_runs(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a" / "one", name="QV", seed=1)
    two = write_run(tmp_path / "b" / "deep" / "two", name="QV", seed=2)
    write_run(one / "checkpoints", name="inner", seed=1)
    assert find_runs(tmp_path) == [one, two]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        find_runs(tmp_path / "empty")
    with pytest.raises(UserError, match="not a directory"):
        find_runs(tmp_path / "missing")


def test_rows(tmp_path: Path) -> None:
    accuracies = {("QKV", 1): 0.50, ("QKV", 2): 0.40, ("QV", 1): 0.49, ("QV", 2): 0.39}
    runs = [
        read_run(
            write_run(
                tmp_path / f"{name}{seed}", name=name, seed=seed, accuracy=value, cache=512 if name == "QV" else 1024,
                speed=1000.0 * seed,
            )
        )
        for (name, seed), value in accuracies.items()
    ]  # fmt: skip
    comparison = summarise(runs, title="t", baseline="QKV", names=["QKV", "QV"], side_by_side=2)
    base, row = comparison.rows
    assert base.is_baseline
    assert base.difference is None
    assert row.accuracy is not None
    assert row.accuracy.mean == pytest.approx(0.44)
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(-0.01)
    assert row.difference.half_width == pytest.approx(0.0, abs=1e-9)
    assert row.cache_share == 0.5
    assert row.cache_elements_per_token_layer == 512
    assert row.train_tokens_per_second == 1500.0
    assert row.decode_tokens_per_second == 3000.0
    assert row.perplexity is not None
    assert row.perplexity.mean == pytest.approx((math.exp(2.9 - 0.98) + math.exp(2.9 - 0.78)) / 2)
    assert comparison.complete
    assert any("side by side" in note for note in comparison.notes)
    assert any("teacher-forced" in note and "end-of-sentence" in note for note in comparison.notes)


def test_one_seed_is_said_so(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, name=name, seed=1)) for name in ("QKV", "QV")]
    comparison = summarise(runs, title="t", baseline="QKV")
    assert comparison.rows[1].accuracy is not None
    assert comparison.rows[1].accuracy.half_width is None
    assert any(note.startswith("One seed") for note in comparison.notes)
    assert "±" not in markdown(comparison).split("- Token accuracy")[0]


def test_unfinished_runs_and_missing_baseline_are_said_so(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / "a", name="QV", seed=1)),
        read_run(write_run(tmp_path / "b", name="QKV", seed=1, status="running")),
    ]
    comparison = summarise(runs, title="t", baseline="QKV", names=["QKV", "QV"])
    assert not comparison.complete
    assert comparison.rows[1].difference is None
    notes = " ".join(comparison.notes)
    assert "not finished" in notes
    assert "baseline QKV has no finished run" in notes
    assert "same seeds" not in notes  # a row without any seed shows it by itself
    runs.append(read_run(write_run(tmp_path / "c", name="QKV", seed=2)))
    assert "same seeds (QV: 1; QKV: 2), so" in " ".join(summarise(runs, title="t", baseline="QKV").notes)


def test_test_scores_and_bleu_get_columns_only_where_present(tmp_path: Path) -> None:
    plain = [read_run(write_run(tmp_path / "a", name="QV", seed=1))]
    titles = [column.title for column in columns_of(summarise(plain, title="t", baseline=None))]
    assert "BLEU" not in titles
    assert "test accuracy %" not in titles
    test = {"accuracy": 0.5, "perplexity": 9.0, "bleu": 31.25, "chrf": {"score": 55.5}}
    rich = [read_run(write_run(tmp_path / "b", name="QV", seed=1, test=test))]
    comparison = summarise(rich, title="t", baseline=None)
    assert {"BLEU", "chrF", "test accuracy %"} <= {column.title for column in columns_of(comparison)}
    assert "31.25" in markdown(comparison)
    assert "55.50" in markdown(comparison)


def test_markdown_escapes_names(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", name="a|b <script>*x*", seed=1))
    text = markdown(summarise([run], title="t", baseline=None))
    line = next(line for line in text.splitlines() if "script" in line)
    assert r"a\|b \<script\>\*x\*" in line
    assert line.replace(r"\|", "").count("|") == len(columns_of(summarise([run], title="t", baseline=None))) + 1


def test_experiments_keep_comparisons_apart(tmp_path: Path) -> None:
    write_comparison(tmp_path / "one", {"QKV": (0.5, 1024), "QV": (0.48, 512)}, baseline="QKV", title="first")
    write_comparison(tmp_path / "two", {"QKV": (0.3, 1024), "QV": (0.28, 512)}, baseline="QV", title="second")
    write_run(tmp_path / "single", name="alone", seed=1)
    experiments = load_experiments([tmp_path])
    titles = [e.comparison.title for e in experiments]
    assert titles == ["Comparison: first", "Comparison: second", "Run: alone"]
    assert [e.comparison.baseline for e in experiments] == ["QKV", "QV", None]
    assert experiments[0].comparison.seeds == (1, 2, 3)
    assert [e.comparison.baseline for e in load_experiments([tmp_path], baseline="QKV")] == ["QKV", "QKV", None]
    with pytest.raises(UserError, match="'nobody' is not a row"):
        load_experiments([tmp_path], baseline="nobody")


def test_single_runs_of_one_name_and_seed_do_not_hide_each_other(tmp_path: Path) -> None:
    for place in ("first", "second"):
        write_run(tmp_path / place, name="QV", seed=1)
    names = [row.name for row in load_experiments([tmp_path / "first", tmp_path / "second"])[0].comparison.rows]
    assert len(set(names)) == 2
    assert all(name.startswith("QV (") for name in names)


def test_curves(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / "a", name="QV", seed=1, accuracy=0.4)),
        read_run(write_run(tmp_path / "b", name="QV", seed=2, accuracy=0.5)),
        read_run(write_run(tmp_path / "c", name="QV", seed=3, steps=(100, 200), status="running")),
    ]
    curve = learning_curve("QV", runs, "valid_accuracy")
    assert curve is not None
    assert curve.seeds == 2  # the unfinished run would cut the curve off
    assert curve.steps == (100, 200, 300, 400, 500)
    assert (curve.low[-1], curve.mean[-1], curve.high[-1]) == pytest.approx((0.4, 0.45, 0.5))
    base = [read_run(write_run(tmp_path / "d", name="QKV", seed=2, accuracy=0.52))]
    difference = difference_curve("QV", runs, base, "valid_accuracy")
    assert difference is not None
    assert difference.seeds == 1
    assert difference.mean[-1] == pytest.approx(-0.02)
    assert learning_curve("QV", runs, "nothing") is None


def test_pareto_front() -> None:
    points = [(1024, 0.50), (512, 0.47), (512, 0.48), (576, 0.505), (544, 0.47)]
    assert pareto_front(points) == [2, 3]
    assert pareto_front([]) == []


def test_provenance_splits_and_joins(tmp_path: Path) -> None:
    common, own = common_and_own([{"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3, "d": 4}}])
    assert common == {"a": 1}
    assert own == [{"b.c": 2}, {"b.c": 3, "b.d": 4}]
    directory = write_run(tmp_path / "b", name="QV", seed=2)
    environment = json.loads((directory / "environment.json").read_text())
    environment["versions"]["torch"] = "2.14.0"
    (directory / "environment.json").write_text(json.dumps(environment))
    runs = [read_run(write_run(tmp_path / "a", name="QV", seed=1)), read_run(directory)]
    shared = shared_environment(runs)
    assert shared["versions"]["torch"] == "2.13.0 or 2.14.0"
    assert "seed" not in shared
    assert "started" not in shared


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
