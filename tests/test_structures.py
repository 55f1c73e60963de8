"""Test that the list of structures is complete for all rows and classes, and adds new structures automatically."""

from cases import COMPOSED, HEADS, SCHEMES, SchemeCase, named, over_rows, perturb
from structures import ENCODINGS_ALONE, STRUCTURES, covering, isometries, structure, structures

from isopos import maps, phases, schemes, terms
from isopos.encodings import Identity
from isopos.maps import TokenMap
from isopos.phases import ContentPhase
from isopos.positions import Line

LISTED = {structure(own.case.build(attention=own.kind)) for own in STRUCTURES}


def types_in(value):
    """Names of classes anywhere in a structure."""
    if isinstance(value, tuple):
        return set().union(*map(types_in, value)) if value else set()
    return {value} if isinstance(value, str) else set()


def final_under(cls, module):
    own = [sub for sub in cls.__subclasses__() if vars(module).get(sub.__name__) is sub]
    return {cls.__name__} if not own else set().union(*(final_under(sub, module) for sub in own))


@over_rows([*SCHEMES, *ENCODINGS_ALONE])
def test_every_row_has_a_listed_structure(case):
    """Also with perturbed parameters."""
    for kind in case.kinds:
        scheme = perturb(case.build(attention=kind))
        assert structure(scheme) in LISTED
        name = f"{case.id}-{kind}"
        assert sum(name in own.rows for own in STRUCTURES) == 1


def test_each_structure_stands_once_and_its_row_is_one_of_those_that_have_it():
    assert len(LISTED) == len(STRUCTURES)
    for own in STRUCTURES:
        with named(own.case.id):
            assert f"{own.case.id}-{own.kind}" in own.rows
    assert {name for own in STRUCTURES for name in own.rows} == {
        f"{case.id}-{kind}" for case in [*SCHEMES, *ENCODINGS_ALONE] for kind in case.kinds
    }
    assert {case.id for case in ENCODINGS_ALONE} == {case.id for case in COMPOSED}


def test_every_class_that_attention_can_see_is_in_a_structure():
    """Tests over structures would not cover a class of maps, terms or phases without a row."""
    seen = types_in(tuple(LISTED))
    assert final_under(TokenMap, maps) - seen == {"Factor"}  # of extensions: tests/test_lengths.py
    assert {name for name in terms.__all__ if name != "Term"} - seen <= {"Indexed", "Offsets", "Numbers", "DistanceKernel"}
    assert {"Indexed", "Offsets"} & seen
    assert {"Numbers", "DistanceKernel"} & seen
    assert (final_under(ContentPhase, phases) | {"HouseholderProduct"}) - seen == set()
    assert {"plain", "encoded", "complex", "linear", "softmax", "locality", "transport", "phases"} <= seen
    assert {own.case.id for own in STRUCTURES if own.case.outside}
    assert any(own.case.group.refers_to_rows for own in STRUCTURES)


class Doubled(maps.Isometry):
    """A map that no row has."""

    def apply(self, x):
        return x


class Own(Identity):
    def forward(self, x, dtype=None):
        return Doubled()


class OwnCase(SchemeCase):
    def build(self, head_dim=8, heads=HEADS, **more):
        return schemes.compose(Own(head_dim, Line()), heads, {"attention": "linear"} | more)


def test_a_new_structure_appears_by_itself_and_a_row_like_another_adds_none():
    rows = [OwnCase("own", ""), OwnCase("again", ""), SchemeCase("like-rope", "rope", {"base": 3.0})]
    found = structures([*SCHEMES, *rows])
    new = [own for own in found if own.case.id == "own"]
    assert [own.rows for own in new] == [["own-linear", "again-linear"], ["own-softmax", "again-softmax"]]
    assert len(found) == len(structures(SCHEMES)) + len(new)


def test_few_rows_have_every_class_of_encodings_and_every_argument():
    others, more = covering()
    rows = [*others, *more]
    assert len(rows) == len({(case.id, kind) for case, kind in rows}) < 0.7 * len(STRUCTURES)
    built = [case.build(attention=kind) for case, kind in rows]
    classes = {type(module) for scheme in built for module in scheme.encoding.modules()}
    assert classes == {type(x) for case in [*SCHEMES, *ENCODINGS_ALONE] for x in case.build().encoding.modules()}
    assert types_in(tuple(map(structure, built))) == types_in(tuple(LISTED))


def test_rows_of_a_part_have_what_the_part_has():
    few = [own for rows in covering(SchemeCase.streams) for own in rows]
    whole = [(own.case, own.kind) for own in STRUCTURES if own.case.streams(own.kind)]
    assert all(case.streams(kind) for case, kind in few)
    seen = [types_in(tuple(structure(case.build(attention=kind)) for case, kind in rows)) for rows in (few, whole)]
    assert seen[0] == seen[1]
    built = [[case.build() for case in rows] for rows in (isometries(SCHEMES, []), SCHEMES)]
    classes = [{type(module) for scheme in schemes for module in scheme.encoding.modules()} for schemes in built]
    assert classes[0] == classes[1]
    assert len(built[0]) < len(built[1]) / 2


def test_rows_that_learn_stand_for_their_structures():
    """Their gradients are compared, too."""
    rows = [case for case in [*SCHEMES, *ENCODINGS_ALONE] if list(case.build().encoding.parameters())]
    learning = {f"{case.id}-{kind}" for case in rows for kind in case.kinds}
    for own in STRUCTURES:
        assert f"{own.case.id}-{own.kind}" in learning or not learning & set(own.rows)
