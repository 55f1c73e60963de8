"""Test the grammar of options and schemes as text: results, and locations in errors."""

import re

import pytest

from isopos.spec import join_spec, map_spec, of_layers, parse_schemes, read, split_spec


@pytest.mark.parametrize(
    ("parse", "text", "expected", "got", "at"),
    [
        (split_spec, "rope:decay", "scheme: expected option=value", "decay", 6),
        (split_spec, "rope:elu+1", "scheme: expected option=value", "elu+1", 6),
        (split_spec, "rope: a=1, =x", "scheme: expected option=value", "=x", 12),
        (lambda text: split_spec(text, "extend"), "yarn:fast", "extend: expected option=value", "fast", 6),
        (of_layers, "rope++none", "scheme: expected the name of a scheme", "", 6),
        (of_layers, "rope*2+", "scheme: expected the name of a scheme", "", 8),
        (of_layers, "none+rope*x", "scheme: expected a number of layers after *, at most 100,000", "x", 11),
        (parse_schemes, "a=b,rope", "schemes: expected the name of a scheme before its options", "a=b", 1),
        (lambda text: read("view", text).entry()[1].whole_number("digits"), "shift=-1", "view: expected digits", "-1", 7),
    ],
)
def test_an_error_says_where_it_is(parse, text, expected, got, at):
    with pytest.raises(ValueError, match=rf"^{re.escape(f'{expected}, got {got!r} at character {at} of {text!r}')}$"):
        parse(text)


def test_what_is_wrong_as_a_whole_stands_nowhere():
    with pytest.raises(ValueError, match=r"^view: expected NAME=NUMBER, got 'shift'$"):
        read("view", " shift ").entry("NAME=NUMBER")


@pytest.mark.parametrize("count", ["0", "-1", "100001", "1.5", "²", ""])
def test_a_number_of_layers(count):
    with pytest.raises(ValueError, match="expected a number of layers"):
        of_layers(f"rope*{count}+none")
    assert len(of_layers("rope*100000")) == 100_000


def test_what_follows_a_plus_within_a_value():
    assert of_layers("rope:a=x+y") == ["rope:a=x+y"]
    assert of_layers("rope:a=x+none") == ["rope:a=x", "none"]
    assert of_layers("rope:a=1+2.5+own.scheme:b=3*2") == ["rope:a=1+2.5", *["own.scheme:b=3"] * 2]
    assert of_layers("rope + none") == ["rope", "none"]
    assert map_spec("rope:a=1+2*2+none", lambda one: f"{one},b=1" if ":" in one else one) == "rope:a=1+2,b=1*2+none"


def test_options_keep_their_signs_of_equality():
    name, options = split_spec("rope:rotary-dim=8,note=a=b,")
    assert (name, options) == ("rope", {"rotary_dim": "8", "note": "a=b"})
    assert join_spec(name, options) == "rope:rotary_dim=8,note=a=b"


def test_an_option_that_is_there_twice_is_refused():
    with pytest.raises(
        ValueError, match=r"scheme: expected each option once, but base is there twice, got '2' at character"
    ):
        split_spec("rope:base=1,base=2")


def test_a_number_of_too_many_digits_is_refused():
    with pytest.raises(ValueError, match=r"scheme: expected a number of layers after \*, at most 100,000"):
        of_layers("rope*" + "9" * 5000)
