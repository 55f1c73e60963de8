"""The grammar of schemes and options as text, with one parser. Errors name the position of the wrong character.

    scheme   name, or name:option=value,option=value
    layers   scheme+scheme*3: each for one layer, or for the number of layers after *; the pattern repeats
    schemes  layers,layers; a piece with "=" but without ":" is another option of the scheme before it
    sum      part+part: an option with several values, such as ring4+tree2 or 1+1.2+2.5
    entry    NAME=VALUE

No torch here, so that help is instant.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from isopos.catalog import CATALOG

MAX_LAYERS = 100_000


@dataclass(frozen=True)
class Piece:
    """A part of a text, with its position in the text.

    Examples:
        >>> first, second = read("parts", "ring4+ tre2").split("+")
        >>> first.text, second.text, second.start
        ('ring4', 'tre2', 7)
        >>> raise second.wrong("treeN")
        Traceback (most recent call last):
        ValueError: parts: expected treeN, got 'tre2' at character 8 of 'ring4+ tre2'
    """

    what: str  # name of the option or argument
    whole: str
    start: int
    stop: int

    @property
    def text(self) -> str:
        """The piece itself, stripped."""
        return self.whole[self.start : self.stop]

    def __bool__(self) -> bool:
        return self.start < self.stop

    def part(self, start: int, stop: int) -> "Piece":
        """The stripped piece between two positions of the whole text."""
        inner = self.whole[start:stop]
        start += len(inner) - len(inner.lstrip())
        return Piece(self.what, self.whole, start, start + len(inner.strip()))

    def split(self, sign: str) -> "list[Piece]":
        """The pieces between signs, including empty ones."""
        ends = [self.start - 1, *(n for n in range(self.start, self.stop) if self.whole[n] == sign), self.stop]
        return [self.part(start + 1, stop) for start, stop in itertools.pairwise(ends)]

    def cut(self, sign: str) -> "tuple[Piece, Piece | None]":
        """The pieces before and after the first sign; the second is None if there is no sign."""
        if (at := self.whole.find(sign, self.start, self.stop)) < 0:
            return self, None
        return self.part(self.start, at), self.part(at + 1, self.stop)

    def entry(self, expected: str = "option=value") -> "tuple[str, Piece]":
        """Name and value of NAME=VALUE."""
        name, value = self.cut("=")
        if not name or not value:
            raise self.wrong(expected)
        return name.text, value

    def whole_number(self, expected: str, least: int = 0, most: float = float("inf")) -> int:
        """The piece as an integer in decimal digits, from `least` to `most`."""
        digits = self.text.isascii() and self.text.isdigit() and len(self.text) < 20
        if not digits or not least <= int(self.text) <= most:
            raise self.wrong(expected)
        return int(self.text)

    def number(self, expected: str) -> float:
        """The piece as a float."""
        try:
            return float(self.text)
        except ValueError:
            raise self.wrong(expected) from None

    def wrong(self, expected: str) -> ValueError:
        """An error with the expected form, the piece, and its position."""
        where = "" if self.text == self.whole.strip() else f" at character {self.start + 1} of {self.whole!r}"
        return ValueError(f"{self.what}: expected {expected}, got {self.text!r}{where}")


def read(what: str, text: str) -> Piece:
    """The whole text of the option or argument `what` as a piece."""
    return Piece(what, text, 0, 0).part(0, len(text))


def parse_schemes(text: str) -> list[str]:
    """Split a comma list of schemes. A piece with "=" but without ":" is another option of the scheme before it.

    Examples:
        >>> parse_schemes("none,rope:decay=retnet,denominator=plain,retnet")
        ['none', 'rope:decay=retnet,denominator=plain', 'retnet']
    """
    specs: list[str] = []
    for piece in filter(None, read("schemes", text).split(",")):
        option = "=" in piece.text and ":" not in piece.text
        if option and not specs:
            raise piece.wrong("the name of a scheme before its options")
        if option:
            specs[-1] += ("," if ":" in specs[-1] else ":") + piece.text
        else:
            specs.append(piece.text)
    if not specs:
        raise ValueError("schemes: expected at least one name, got none; isopos list prints them")
    return specs


def of_layers(spec: str) -> list[str]:
    """The scheme of each layer of a pattern: schemes joined by +, each for one layer or for the number of layers after *.

    A + is part of an option's value if no name of a scheme follows it.

    Examples:
        >>> of_layers("rope:decay=retnet*2+none"), of_layers("ape-product:parts=ring4+tree2+none")
        (['rope:decay=retnet', 'rope:decay=retnet', 'none'], ['ape-product:parts=ring4+tree2', 'none'])
    """
    return [layer.text for layer, count in _layers(read("scheme", spec)) for _ in range(count)]


def _layers(pattern: Piece) -> list[tuple[Piece, int]]:
    """The schemes of a pattern, each with its number of layers."""
    joined: list[Piece] = []
    for piece in pattern.split("+"):
        if joined and _continues(joined[-1].text, piece.text):
            joined[-1] = piece.part(joined[-1].start, piece.stop)
        elif not piece and pattern:
            raise piece.wrong("the name of a scheme")
        else:
            joined.append(piece)
    counted = []
    for layer in joined:
        *schemes, count = layer.split("*")
        if schemes:
            number = count.whole_number(f"a number of layers after *, at most {MAX_LAYERS:,}", 1, MAX_LAYERS)
            counted.append((layer.part(layer.start, schemes[-1].stop), number))
        else:
            counted.append((layer, 1))
    return counted


def _continues(before: str, text: str) -> bool:
    """Whether the text after a + continues an option's value instead of naming another scheme."""
    if text and not (text[0].isalpha() or text[0] == "_"):
        return True
    name = text.partition(":")[0].partition("*")[0]
    return "=" in before and name not in CATALOG and "." not in name


def map_spec(spec: str, change: Callable[[str], str]) -> str:
    """Apply a function to each scheme of a pattern.

    Examples:
        >>> map_spec("rope*3+none", lambda scheme: scheme + ":attention=softmax")
        'rope:attention=softmax*3+none:attention=softmax'
    """
    runs = [(scheme, len([*same])) for scheme, same in itertools.groupby(of_layers(spec))]
    return "+".join(change(scheme) + f"*{count}" * (count > 1) for scheme, count in runs)


def split_spec(spec: str, what: str = "scheme") -> tuple[str, dict[str, str]]:
    """Split a text into name and options: a scheme, which must be the same in all layers, or another choice with options.

    Examples:
        >>> split_spec("rope:decay=retnet,base=500000")
        ('rope', {'decay': 'retnet', 'base': '500000'})
        >>> split_spec("rope:decay=retnet,base")
        Traceback (most recent call last):
        ValueError: scheme: expected option=value, got 'base' at character 19 of 'rope:decay=retnet,base'
    """
    layers = [layer for layer, _ in _layers(read(what, spec))]
    if more := dict.fromkeys(layer.text for layer in layers if layer.text != layers[0].text):
        raise ValueError(
            f"{what}: expected one, not one per layer as in {spec}; name each: {', '.join([layers[0].text, *more])}"
        )
    name, options = layers[0].cut(":")
    entries = [piece.entry() for piece in options.split(",") if piece] if options else []
    found: dict[str, str] = {}
    for option, value in entries:
        if (key := option.replace("-", "_")) in found:
            raise value.wrong(f"each option once, but {option} is there twice")
        found[key] = value.text
    return name.text, found


def join_spec(name: str, options: Mapping[str, str]) -> str:
    """The inverse of `split_spec`."""
    return name + (":" if options else "") + ",".join(f"{k}={v}" for k, v in options.items())
