"""Recipes: precedence, complaints, comparison grids, the shipped ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from qvattn.errors import UserError
from qvattn.train.recipe import (
    Recipe,
    TrainSpec,
    changed_keys,
    dump_recipe,
    expand,
    load_recipe,
    pick_variant,
    read_recipe,
    shipped_recipes,
    slugify,
)
from qvattn.train.run import run_training
from qvattn.train.schedule import learning_rate

from .conftest import MakeRecipe

SMALL = """
name: small
data: {corpus: verses}
model: {d_model: 32, n_heads: 4, attention: qv}
train: {steps: 7}
"""


def read(*overrides: str, text: str = SMALL) -> Recipe:
    return read_recipe(text, origin="small.yaml", overrides=overrides)


def test_command_line_beats_file_beats_default() -> None:
    assert read().train.steps == 7
    assert read("train.steps=9").train.steps == 9
    assert read().train.clip == TrainSpec().clip == 1.0
    assert read("train.steps=8", "train.steps=9").train.steps == 9


def test_override_values_are_yaml() -> None:
    recipe = read("train.learning_rate=1e-4", "train.clip=null", "train.betas=[0.8, 0.9]", "train.tensorboard=false")
    assert (recipe.train.learning_rate, recipe.train.clip, recipe.train.betas) == (1e-4, None, (0.8, 0.9))
    assert recipe.train.tensorboard is False
    assert read("name=a=b").name == "a=b"


def test_override_reaches_inside_short_forms_and_lists() -> None:
    recipe = read("model.attention.variant=qv-ka", "model.attention.d_ctx=16")
    assert recipe.model.attention == {"variant": "qv-ka", "d_ctx": 16}
    assert read("model.attention.dropout=0.1").model.attention == {"variant": "qv", "dropout": 0.1}
    assert read("model.position=agf", "model.position.tau=2").model.position == {"kind": "agf", "tau": 2}
    demo = load_recipe("demo", ["compare.variants.1.name=Second"])
    assert demo.compare is not None
    assert demo.compare.variants[1].name == "Second"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dmodel=3", r"unknown key 'dmodel' in section 'model'; nearest valid key: 'd_model'"),
        ("train.stepz=3", r"unknown key 'stepz' in section 'train'; nearest valid key: 'steps'"),
        ("trian.steps=3", r"unknown key 'trian' in section 'top level'; nearest valid key: 'train'"),
        ("data.corpuss=3", r"unknown key 'corpuss' in section 'data'; nearest valid key: 'corpus'"),
        ("data.hub={name: x, confg: y}", r"unknown key 'confg' in section 'data.hub'; nearest valid key: 'config'"),
        ("model.attention.varient=qv", r"'varient' in section 'model.attention'; nearest valid key: 'variant'"),
        ("model.attention={encoder: qv, decodr: qv}", r"'decodr' in section 'model.attention'; .*'decoder'"),
        ("model.attention.cross.d_ctz=8", r"'d_ctz' in section 'model.attention.cross'; .*'d_ctx'"),
        ("model.attention.position={kind: agf, taau: 1}", r"'taau' in section 'model.attention.position'; .*'tau'"),
        ("model.position={kind: agf, taau: 1}", r"'taau' in section 'model.position'; nearest valid key: 'tau'"),
        ("compare={baseline: a, variants: [{name: a, atention: qv}]}", r"'atention' in section 'compare.variants.0'"),
        ("train.steps=many", r"train\.steps: input should be a valid integer.*got 'many'"),
        ("train.steps=0", r"train\.steps: input should be greater than 0, got 0"),
        ("train.precision=fp8", r"train\.precision: input should be 'fp32', 'bf16' or 'fp16', got 'fp8'"),
        ("train.betas=[0.9]", r"train\.betas: too few entries"),
        ("train.betas=[0.9, 1.5]", r"train\.betas: allowed: two numbers"),
        ("train=5", r"train: input should be a valid dictionary"),
        ("model.attention=7", r"model\.attention: .*got 7"),
        ("model.attention=qqv", r"model\.attention: variant='qqv': allowed are"),
        ("model.position=agff", r"model\.position: position='agff': allowed are"),
        ("model.n_heads=5", r"model\.attention: n_heads=5 does not divide d_model=32"),
        ("model.attention={variant: qv, d_ctx: 4}", r"model\.attention: d_ctx=4: variant 'qv' does not use it"),
        ("data.shared_vocab=false", r"model\.share_embeddings: true needs data\.shared_vocab: true"),
        ("task=causal-lm", r"data\.corpus: task 'causal-lm' cannot use 'verses'"),
        ("compare={baseline: b, variants: [{name: a}]}", r"baseline: 'b' is not a variant's name"),
        (
            "compare={baseline: a, variants: [{name: a, attention: x}]}",
            r"compare\.variants\[a\]\.attention: variant='x'",
        ),
        ("compare={baseline: A, variants: [{name: A}, {name: a}]}", r"names must differ"),
        ("train.steps", r"override 'train\.steps': expected section\.key=value"),
        ("name.x=1", r"override 'name\.x=1': name is not a section"),
        ("train.betas={a: [}", r"the value is not valid YAML"),
    ],
)
def test_complaints_name_the_place_and_the_way_out(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(override)


def test_all_mistakes_are_reported_at_once_one_line_each() -> None:
    with pytest.raises(UserError) as caught:
        read("model.dmodel=1", "train.steps=-1", "train.clipp=1")
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "a recipe is a mapping of sections, this is list"),
        ("", "this is NoneType"),
        ("a: [", "not valid YAML"),
        ("name: a\nname: b", "the key 'name' occurs twice"),
        ("name: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("name: x", "data: this key is required"),
    ],
)
def test_broken_files(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(text=text)


def test_unknown_recipe_lists_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither a file nor one of .*demo, .*multi30k_small, .*wmt17"):
        load_recipe("demoo")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert read_recipe(dump_recipe(recipe), origin="dump") == recipe
    plans = expand(recipe)
    assert recipe.compare is not None
    assert len(plans) == len(recipe.compare.variants) * len(recipe.compare.seeds)
    assert len({plan.slug for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.recipe.compare is None
        assert (plan.recipe.name, plan.recipe.train.seed) == (plan.name, plan.seed)
        assert read_recipe(dump_recipe(plan.recipe), origin="dump") == plan.recipe
        assert expand(plan.recipe)[0].recipe == plan.recipe


def test_published_rows() -> None:
    big = load_recipe("wmt17_en_de_big")
    assert (big.model.d_model, big.model.d_ff, big.model.n_heads) == (1024, 4096, 16)
    assert (big.model.encoder_layers, big.model.decoder_layers, big.train.precision) == (3, 3, "fp16")
    for name, widths in (("wmt17_en_de_big", (64, 128)), ("multi30k_small", (16, 32))):
        recipe = load_recipe(name)
        rows = {plan.name: plan.recipe.model for plan in expand(recipe)}
        assert [row.position for row in rows.values()] == ["sinusoidal"] * 2 + ["agf+pcm-v"] * 4
        assert rows["QV-Ka 1x AGF+PCM-V"].attention == {"variant": "qv-ka", "d_ctx": widths[0]}
        assert rows["QV-Ka 2x AGF+PCM-V"].attention == {"variant": "qv-ka", "d_ctx": widths[1]}
        assert widths[0] == recipe.model.d_model // recipe.model.n_heads


def test_variants_are_laid_over_the_model() -> None:
    grid = "compare={baseline: a, seeds: [5], threads: 1, variants: [{name: a}, {name: b, attention: {dropout: 0.5}}, "
    grid += "{name: c, attention: {variant: qv-ka}, position: agf}]}"
    recipe = read("model.attention={variant: qv, dropout: 0.1}", grid)
    a, b, c = (plan.recipe for plan in expand(recipe))
    assert a.model == recipe.model
    assert b.model.attention == {"variant": "qv", "dropout": 0.5}
    assert (c.model.attention, c.model.position) == ({"variant": "qv-ka"}, "agf")
    assert (a.train.seed, a.train.threads, a.model.position) == (5, 1, "sinusoidal")
    assert [plan.slug for plan in expand(recipe)] == ["a--seed5", "b--seed5", "c--seed5"]
    assert pick_variant(recipe, "c").model == c.model
    with pytest.raises(UserError, match="'d' is not in the recipe"):
        pick_variant(recipe, "d")


def test_slugs() -> None:
    assert slugify("QV-Ka 2x, AGF+PCM-V") == "qv-ka-2x-agf-pcm-v"
    assert slugify("+++") == "run"


def test_changed_keys_ignore_the_machine() -> None:
    assert changed_keys(read(), read("train.threads=2", "train.device=cpu")) == []
    assert changed_keys(read(), read("model.d_ff=9", "model.attention=mha")) == ["model.attention", "model.d_ff"]
    grid = "compare={baseline: a, variants: [{name: a}]}"
    assert changed_keys(read(), read(grid)) == []


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValidationError):
        read().train.steps = 3  # type: ignore[misc]


def test_effective_recipe_is_saved(toy: MakeRecipe, tmp_path: Path) -> None:
    recipe = toy("train.steps=2", "model.d_ff=48")
    run_training(recipe, tmp_path / "run", seed=7)
    saved = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())
    assert (saved["train"]["steps"], saved["model"]["d_ff"], saved["train"]["seed"]) == (2, 48, 7)
    assert saved["train"]["eps"] == 1e-9
    assert load_recipe(tmp_path / "run/recipe.yaml").train.seed == 7


def test_schedules() -> None:
    spec = TrainSpec(learning_rate=1.0, warmup_steps=100, steps=500)
    assert [learning_rate(spec, step) for step in (1, 50, 100, 400)] == pytest.approx([0.01, 0.5, 1.0, 0.5])
    cosine = spec.model_copy(update={"schedule": "cosine", "final_learning_rate": 0.2})
    assert [learning_rate(cosine, step) for step in (50, 100, 300, 500)] == pytest.approx([0.5, 1.0, 0.6, 0.2])
    flat = spec.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    assert [learning_rate(flat, step) for step in (1, 500)] == [1.0, 1.0]
