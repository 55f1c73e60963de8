"""What runs came to, and what runs came to before there were tasks."""

import json

import pytest

from isopos.lab.reports.comparison import about
from isopos.lab.runs.folders import recipe_of
from isopos.lab.runs.outcomes import Result, fingerprint

OLD = {"status": "finished", "bits_per_byte": {"1": 2.5, "2": 2.625, "4": None}, "tokens_per_second": 9.0}
MORE = {"parameters": 5, "choices": {"attention": "linear"}, "laws": "yes"}


def test_a_result_is_read_as_it_was_written(tmp_path):
    result = Result("finished", {"accuracy": 0.5, "loss": None}, 3.0, **MORE)
    assert Result.of(tmp_path) is None
    result.save(tmp_path)
    assert Result.of(tmp_path) == result


def test_a_run_of_before_there_were_tasks(tmp_path):
    (tmp_path / "recipe.json").write_text(
        json.dumps({"scheme": "rope", "steps": 3, "length": 16, "cutoffs": [], "clip": 0.5})
    )
    (tmp_path / "result.json").write_text(json.dumps(OLD | MORE))
    (tmp_path / "text.json").write_text(json.dumps({"name": "text", "sha256": "abc"}))
    (tmp_path / "comparison.json").write_text(json.dumps({"text": "mine", "bytes": 12_345, "sha256": "abc"}))
    recipe = recipe_of(tmp_path)
    assert (recipe.training.steps, recipe.training.clip, recipe.task.length) == (3, 0.5, 16)
    assert Result.of(tmp_path) == Result("finished", {"bits/byte": 2.5, "at 2x": 2.625, "at 4x": None}, 9.0, **MORE)
    assert fingerprint(tmp_path) == "abc"
    assert [about(tmp_path)[key] for key in ("task", "data", "summary")] == ["language", "mine", "12,345 bytes"]


@pytest.mark.parametrize("text", ["{", '{"status": "finished"}', json.dumps(OLD | MORE | {"bits_per_byte": {}})])
def test_a_damaged_result_is_named(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"result\.json: "):
        Result.of(tmp_path)
