"""Tokenizers: nothing is unknown, nothing ends a sentence early, and files that are damaged say so."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qvattn import UserError
from qvattn.data import BOS_ID, EOS_ID, PAD_ID, UNK_ID, DataSpec, Tokenizers, build_tokenizers, load_tokenizer

PAIRS = [
    ("the little house stands on the hill", "das kleine Haus steht auf dem Hügel"),
    ("a dog runs on the green grass", "ein Hund läuft auf dem grünen Gras"),
] * 20


@pytest.fixture(scope="module")
def shared():
    return build_tokenizers(PAIRS, DataSpec(vocab_size=350))


def test_special_ids_and_size(shared):
    for tokenizer in (shared.source, shared.target):
        ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
        assert ids == (PAD_ID, BOS_ID, EOS_ID, UNK_ID) == (0, 1, 2, 3)
        assert len(tokenizer) <= 350
    assert shared.shared


def test_calling_ends_in_eos_and_has_no_bos(shared):
    ids = shared.source("the house").input_ids
    assert ids[-1] == EOS_ID
    assert BOS_ID not in ids


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_every_text_comes_back(shared, text):
    import unicodedata

    ids = shared.source(text).input_ids
    assert UNK_ID not in ids
    assert ids.count(EOS_ID) == 1
    back = shared.source.decode(ids, skip_special_tokens=True)
    normal = unicodedata.normalize("NFC", text)
    assert back.split() == normal.split()


@pytest.mark.parametrize("text", ["a </s> b", "<pad>", "<s>x</s>", "<unk>"])
def test_special_looking_text_stays_text(shared, text, tmp_path):
    shared.save(tmp_path)
    for tokenizer in (shared.source, Tokenizers.load(tmp_path).source):
        ids = tokenizer(text).input_ids
        assert not set(ids[:-1]) & {0, 1, 2, 3}
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_word_reads_the_same_first_and_later(shared):
    first, later = shared.source("house").input_ids[:-1], shared.source("the house").input_ids[:-1]
    assert later[-len(first) :] == first


def test_composed_and_decomposed_letters_are_one(shared):
    assert shared.target("Hügel").input_ids == shared.target("Hu\u0308gel").input_ids


def test_training_is_deterministic(shared):
    again = build_tokenizers(PAIRS, DataSpec(vocab_size=350))
    assert again.source.backend_tokenizer.to_str() == shared.source.backend_tokenizer.to_str()


def test_lowercase_belongs_to_the_tokenizer():
    toks = build_tokenizers(PAIRS, DataSpec(vocab_size=350, lowercase=True))
    assert toks.target("HAUS").input_ids == toks.target("haus").input_ids


@pytest.mark.parametrize("is_shared", [True, False])
def test_save_and_load(tmp_path, is_shared):
    toks = build_tokenizers(PAIRS, DataSpec(vocab_size=330, shared_vocab=is_shared))
    toks.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == (
        ["tokenizer.json"] if is_shared else ["tokenizer.json", "tokenizer_target.json"]
    )
    back = Tokenizers.load(tmp_path)
    assert back.shared == is_shared
    for one, other in ((toks.source, back.source), (toks.target, back.target)):
        assert one("ein Haus on the hill").input_ids == other("ein Haus on the hill").input_ids
        assert (other.pad_token_id, other.eos_token_id) == (0, 2)


def test_a_lost_target_file_is_noticed_when_the_caller_knows(tmp_path, shared):
    shared.save(tmp_path)
    assert Tokenizers.load(tmp_path, shared=True).shared
    with pytest.raises(UserError, match=r"tokenizer_target\.json does not exist"):
        Tokenizers.load(tmp_path, shared=False)


def test_damaged_files(tmp_path, shared):
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist"):
        Tokenizers.load(tmp_path)
    shared.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a whole tokenizer file"):
        Tokenizers.load(tmp_path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="not a whole tokenizer file"):
        Tokenizers.load(tmp_path)
    content = json.loads(whole)
    content["added_tokens"] = []
    for name in ("<pad>", "<s>"):
        content["model"]["vocab"][f"other{name}"] = content["model"]["vocab"].pop(name)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=r"ids 0 to 3 are .*are needed"):
        load_tokenizer(path)
