"""Hub corpora: real `datasets` objects in both column conventions, from memory and from a local folder."""

import json

import datasets
import pytest

from qvattn import UserError
from qvattn.data import DataSpec, HubSpec, load_corpus, load_text

PAIRS = [("a house", "ein Haus"), ("", "leer"), ("two", "zwei")]


def translation_rows():
    return {"translation": [{"en": en, "de": de} for en, de in PAIRS]}


def column_rows():
    return {"en": [en for en, _ in PAIRS], "de": [de for _, de in PAIRS]}


def dataset_of(rows, valid="validation"):
    return datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows), valid: datasets.Dataset.from_dict(rows)})


@pytest.fixture
def loader(monkeypatch):
    calls = []

    def use(result):
        def load(name, config=None, *, streaming=False):
            calls.append((name, config, streaming))
            if isinstance(result, Exception):
                raise result
            if streaming:
                return datasets.IterableDatasetDict({k: v.to_iterable_dataset() for k, v in result.items()})
            return result

        monkeypatch.setattr(datasets, "load_dataset", load)
        return calls

    return use


def spec(**fields):
    more = {key: fields.pop(key) for key in ("max_train_pairs", "valid_fraction") if key in fields}
    return DataSpec(corpus="hub", hub=HubSpec(name="wmt/wmt17", config="de-en", **fields), **more)


@pytest.mark.parametrize("rows", [translation_rows, column_rows])
@pytest.mark.parametrize("streaming", [False, True])
def test_both_conventions(loader, rows, streaming):
    calls = loader(dataset_of(rows()))
    corpus = load_corpus(spec(streaming=streaming))
    assert calls == [("wmt/wmt17", "de-en", streaming)]
    assert corpus.train == [PAIRS[0], PAIRS[2]]
    assert corpus.notes["train_dropped_empty"] == 1
    assert corpus.name == "wmt/wmt17/de-en en-de"


def test_direction_and_streaming_limit(loader):
    loader(dataset_of(column_rows()))
    corpus = load_corpus(spec(source_language="de", target_language="en", streaming=True, max_train_pairs=2))
    assert corpus.train == [("ein Haus", "a house")]


def test_missing_language_split_or_validation(loader):
    loader(dataset_of(translation_rows(), valid="dev"))
    with pytest.raises(UserError, match=r"no language 'fr'; a row has \['de', 'en'\]"):
        load_corpus(spec(target_language="fr"))
    with pytest.raises(UserError, match=r"train_split='all'.*\['dev', 'train'\]"):
        load_corpus(spec(train_split="all"))
    with pytest.raises(UserError, match="no validation data"):
        load_corpus(spec())
    with pytest.raises(UserError, match=r"valid_split='val'.*\['dev', 'train'\]"):
        load_corpus(spec(valid_split="val"))
    assert load_corpus(spec(valid_split="dev")).valid


def test_valid_fraction_and_a_validation_split_exclude_each_other(loader):
    rows = {"en": [f"s{i}" for i in range(8)], "de": [f"t{i}" for i in range(8)]}
    loader(dataset_of(rows))
    with pytest.raises(UserError, match="valid_fraction"):
        load_corpus(spec(valid_fraction=0.25))
    corpus = load_corpus(spec(valid_fraction=0.25, valid_split=None))
    assert (len(corpus.train), len(corpus.valid)) == (6, 2)


def test_unreachable_hub_is_a_user_error(loader):
    loader(ConnectionError("could not reach the hub"))
    with pytest.raises(UserError, match=r"wmt/wmt17.*de-en.*cannot be loaded.*could not reach"):
        load_corpus(spec())


def test_local_folder_through_the_real_load_dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split in ("train", "validation"):
        rows = [json.dumps({"en": en, "de": de}) for en, de in PAIRS]
        (folder / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    corpus = load_corpus(DataSpec(corpus="hub", hub=HubSpec(name=str(folder))))
    assert corpus.train == [PAIRS[0], PAIRS[2]]
    assert corpus.valid == corpus.train


def test_hub_text(loader):
    rows = {"text": ["one", "", " two "]}
    loader(dataset_of(rows))
    text = load_text(DataSpec(corpus="hub-text", hub=HubSpec(name="wikitext")))
    assert text.train == ["one", "two"]
    assert text.notes["train_blank_lines"] == 1
    with pytest.raises(UserError, match=r"text_column='body'.*\['text'\]"):
        load_text(DataSpec(corpus="hub-text", hub=HubSpec(name="wikitext", text_column="body")))


def test_an_effective_recipe_may_name_the_default_splits(loader):
    """What `dump_recipe` writes holds every default; a corpus without a test split is then still one."""
    loader(dataset_of(translation_rows()))
    hub = HubSpec.model_validate(HubSpec(name="wmt/wmt17", config="de-en").model_dump())
    assert load_corpus(DataSpec(corpus="hub", hub=hub)).test == []
