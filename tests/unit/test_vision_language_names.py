"""Names to ids and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dd_lightning.tasks.vision_language.names import BYTES, END, Tokenizer

pytestmark = pytest.mark.unit

NAMES = ["waving hand", "waving hand light skin tone", "hand light skin tone", "Réunion"]


@given(st.text(st.characters(exclude_characters="\0"), max_size=40))
def test_any_text_comes_back(text):
    if any(0xD800 <= ord(c) < 0xE000 for c in text):
        return  # no UTF-8 has it
    tokenizer = Tokenizer.learn([*NAMES, text, text], 300)
    ids = tokenizer.encode(text, 200)
    assert ids[-1] == END and tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())


def test_frequent_words_come_first_and_rare_ones_stay_bytes():
    tokenizer = Tokenizer.learn(NAMES, 260)
    assert tokenizer.words == (" hand", " light", " skin", " tone")
    assert Tokenizer.learn(NAMES, 1000).words == (" hand", " light", " skin", " tone", "waving")
    assert Tokenizer.learn(NAMES, BYTES).words == ()
    assert tokenizer.encode("hand light", 9) == [*b"hand", BYTES + 1, END]


def test_what_is_too_long_is_cut_off_and_still_ends():
    ids = Tokenizer([]).encode("abcdef", 4)
    assert ids == [*b"abc", END]
    assert Tokenizer([]).num_bytes(ids) == 3


def test_an_end_inside_a_name_is_a_space():
    assert Tokenizer([]).decode(Tokenizer([]).encode("a\0b", 9)) == "a b"
