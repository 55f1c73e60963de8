"""Schemes as text: a name, then options; and comma lists of them."""

__all__ = ["join_spec", "parse_schemes", "split_spec"]


def parse_schemes(text: str) -> list[str]:
    """The schemes of a comma list. A piece with "=" and no ":" is another option of the scheme before it.

    Example:
        >>> parse_schemes("none,rope:decay=retnet,denominator=plain,retnet")
        ['none', 'rope:decay=retnet,denominator=plain', 'retnet']
    """
    specs: list[str] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        if "=" in piece and ":" not in piece and specs:
            specs[-1] += ("," if ":" in specs[-1] else ":") + piece
        else:
            specs.append(piece)
    if not specs:
        raise ValueError("schemes: expected at least one name, got none; isopos list shows them")
    return specs


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options of a scheme.

    Example:
        >>> split_spec("rope:decay=retnet,base=500000")
        ('rope', {'decay': 'retnet', 'base': '500000'})
    """
    name, _, rest = spec.partition(":")
    options = {}
    for piece in filter(None, rest.split(",")):
        option, equals, value = piece.partition("=")
        if not equals or not option or not value:
            raise ValueError(f"scheme {spec!r}: expected option=value, got {piece!r}")
        options[option.strip().replace("-", "_")] = value.strip()
    return name, options


def join_spec(name: str, options: dict[str, str]) -> str:
    """The inverse of `split_spec`."""
    return name + (":" if options else "") + ",".join(f"{k}={v}" for k, v in options.items())
