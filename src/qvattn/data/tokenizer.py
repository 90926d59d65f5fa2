"""Byte-level BPE for small corpora, wrapped for transformers.

Trained on the training split only. Ids 0 to 3 are always pad, bos, eos, unk. Every text can be encoded (bytes
are in the vocabulary) and decodes to its NFC form, outer spaces apart. Words that look like special tokens
(`</s>`) in a text stay text: no input can end a sentence early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ..errors import UserError
from ..files import write_atomically
from ..untrusted import parse_json
from .spec import DataSpec
from .synthetic.controlled import ControlledSpec, controlled_words

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
SOURCE_FILE, TARGET_FILE = "tokenizer.json", "tokenizer_target.json"


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of a run; `source is target` when the vocabulary is shared.

    Calling one (`toks.source("text")`) yields ids that end in eos, without bos.
    """

    source: PreTrainedTokenizerFast
    target: PreTrainedTokenizerFast

    @property
    def shared(self) -> bool:
        """Whether both languages use one vocabulary."""
        return self.source is self.target

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json`, and `tokenizer_target.json` if the vocabularies differ."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write(self.source, folder / SOURCE_FILE)
        if not self.shared:
            _write(self.target, folder / TARGET_FILE)
        elif (folder / TARGET_FILE).exists():
            (folder / TARGET_FILE).unlink()

    @classmethod
    def load(cls, folder: str | Path, *, shared: bool | None = None) -> Tokenizers:
        """Read what `save` wrote; `shared` (the recipe's `shared_vocab`), if known, says which files must be there.

        Errors: a file missing, cut short, or without the four special tokens.
        """
        folder = Path(folder)
        source = load_tokenizer(folder / SOURCE_FILE)
        if shared or (shared is None and not (folder / TARGET_FILE).exists()):
            return cls(source, source)
        return cls(source, load_tokenizer(folder / TARGET_FILE))


def build_tokenizers(pairs: Sequence[tuple[str, str]], spec: DataSpec) -> Tokenizers:
    """Train on the pairs: one tokenizer on both sides (`shared_vocab`), or one a side.

    The words of the controlled language are known and stay whole, so nothing is trained for it.
    """
    if spec.corpus == "controlled":
        words = controlled_words(spec.controlled or ControlledSpec())
        if spec.shared_vocab:
            both = word_tokenizer([*words.source, *words.target])
            return Tokenizers(both, both)
        return Tokenizers(word_tokenizer(words.source), word_tokenizer(words.target))
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if spec.shared_vocab:
        shared = train_tokenizer([*sources, *targets], spec.vocab_size, lowercase=spec.lowercase)
        return Tokenizers(shared, shared)
    return Tokenizers(
        train_tokenizer(sources, spec.vocab_size, lowercase=spec.lowercase),
        train_tokenizer(targets, spec.vocab_size, lowercase=spec.lowercase),
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, lowercase: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE with at most `vocab_size` entries (fewer where the text offers no more merges)."""
    core = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS[UNK_ID]))
    steps = [normalizers.NFC(), normalizers.Strip()]
    core.normalizer = normalizers.Sequence([*steps, normalizers.Lowercase()] if lowercase else steps)
    # A word reads the same at the start of a sentence and inside it: a space is put before, and taken off.
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    _end_in_eos(core)
    return _wrap(core)


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token a word, words apart by spaces; ids from 4 on in the order given. Other words are unknown."""
    entries = [*SPECIAL_TOKENS, *words]
    if len(set(entries)) < len(entries):
        raise UserError("words: every word must occur once, and none may be a special token")
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(entries)}, unk_token=SPECIAL_TOKENS[UNK_ID]))
    core.add_special_tokens(list(SPECIAL_TOKENS))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    _end_in_eos(core)
    return _wrap(core)


def _end_in_eos(core: Tokenizer) -> None:
    eos = SPECIAL_TOKENS[EOS_ID]
    core.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B {eos}", special_tokens=[(eos, EOS_ID)]
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """One saved tokenizer. Errors name the file: missing, cut short, or with other special tokens."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is this a run directory?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    try:
        _refuse_strange_parts(parse_json(text))
        core = Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and its panics are not even that
        raise UserError(f"{path} is not a whole tokenizer file of this package ({error})") from None
    if sorted(core.get_vocab().values()) != list(range(core.get_vocab_size())):
        raise UserError(f"{path}: the ids of the vocabulary are not 0 to {core.get_vocab_size() - 1}, each once")
    found = tuple(core.id_to_token(i) for i in range(len(SPECIAL_TOKENS)))
    if found != SPECIAL_TOKENS:
        raise UserError(f"{path}: ids 0 to 3 are {found}, {SPECIAL_TOKENS} are needed")
    return _wrap(core)


PARTS = {
    "normalizer": ("Sequence", "NFC", "Strip", "Lowercase"),
    "pre_tokenizer": ("ByteLevel", "WhitespaceSplit"),
    "post_processor": ("TemplateProcessing",),
    "decoder": ("Sequence", "ByteLevel", "Strip"),
    "model": ("BPE", "WordLevel"),
}
"""The parts of the tokenizers made here. Others are refused: a regular expression from a file can take for ever."""


def _refuse_strange_parts(content: Any) -> None:
    if not isinstance(content, dict):
        raise ValueError("it is not a mapping")
    if len(content.get("added_tokens") or ()) > len(SPECIAL_TOKENS):
        raise ValueError("it adds tokens beyond the four special ones")
    for place, allowed in PARTS.items():
        part = content.get(place)
        inner: Any = part.get("normalizers", part.get("decoders", ())) if isinstance(part, dict) else ()
        for one in (part, *inner):
            kind = one.get("type") if isinstance(one, dict) else None
            if one is not None and kind not in allowed:
                raise ValueError(f"{place} of type {kind!r}: allowed are {', '.join(allowed)}")
    if (content.get("truncation"), content.get("padding")) != (None, None):
        raise ValueError("it truncates or pads")


def _wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    pad, bos, eos, unk = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    wrapped.backend_tokenizer.encode_special_tokens = True
    return wrapped


def _write(tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    write_atomically(path, tokenizer.backend_tokenizer.to_str(pretty=True))
