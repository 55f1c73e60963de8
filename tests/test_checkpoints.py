import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from isopos.lab.recipes import Recipe
from isopos.lab.runs import checkpoints
from isopos.lab.runs.files import write_json


def _state(value):
    return {"model": {"weight": torch.full((100,), float(value))}, "optimizer": {}, "best": [value, 1.5], "step": value}


def _steps(run):
    return [checkpoint.step for checkpoint in checkpoints.complete(run)]


def test_what_is_saved_is_loaded(tmp_path):
    checkpoints.save_checkpoint(tmp_path, _state(3), 3, validation=2.5)
    found = checkpoints.newest(tmp_path)
    assert found[1:] == (3, 2.5, "lower", False)
    loaded = checkpoints.read_content(found)
    assert torch.equal(loaded["model"]["weight"], torch.full((100,), 3.0))
    assert loaded["best"] == [3, 1.5]


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.best(tmp_path) is None


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_the_last_ones_and_the_best_stay(tmp_path, better):
    sign = {"lower": 1, "higher": -1}[better]
    for step, validation in enumerate([3.0, 2.0, 2.0, None, 2.5, None], 1):
        value = None if validation is None else sign * validation
        checkpoints.save_checkpoint(tmp_path, _state(step), step, validation=value, better=better)
    assert _steps(tmp_path) == [2, 5, 6]
    assert checkpoints.best(tmp_path).step == 2


def test_other_files_and_folders_among_them_stay(tmp_path):
    checkpoints.save_checkpoint(tmp_path, _state(1), 1)
    shutil.copytree(tmp_path / "checkpoints" / "step-00000001", tmp_path / "checkpoints" / "x-backup")
    (tmp_path / "checkpoints" / ".DS_Store").write_text("")
    (tmp_path / "checkpoints" / "step-notes.txt").write_text("")
    for step in (2, 3, 4, 10**8):
        checkpoints.save_checkpoint(tmp_path, _state(step), step)
    assert checkpoints.newest(tmp_path).step == 10**8
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {"x-backup", ".DS_Store", "step-notes.txt"}


def test_one_without_its_mark_does_not_count_and_goes_with_the_next(tmp_path):
    checkpoints.save_checkpoint(tmp_path, _state(1), 1)
    torn = checkpoints.save_checkpoint(tmp_path, _state(2), 2)
    (torn / "complete.json").unlink()
    (torn / "state.pt").write_bytes(b"half")
    assert checkpoints.newest(tmp_path).step == 1
    checkpoints.save_checkpoint(tmp_path, _state(3), 3)
    assert not torn.exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_one_is_refused_and_the_one_before_offered(tmp_path, damage):
    before, last = (checkpoints.save_checkpoint(tmp_path, _state(step), step) for step in (1, 2))
    content = bytearray((last / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        (last / "state.pt").unlink()
    else:
        (last / "state.pt").write_bytes(content if damage == "flip" else content[:-7])
    with pytest.raises(
        ValueError, match=f"{last / 'state.pt'}: .*remove {last}, and --resume goes on from step 1, {before}$"
    ):
        checkpoints.read_content(checkpoints.newest(tmp_path))


def test_a_damaged_mark_is_named(tmp_path):
    folder = checkpoints.save_checkpoint(tmp_path, _state(1), 1)
    (folder / "complete.json").write_text("{")
    with pytest.raises(ValueError, match=f"{folder / 'complete.json'}: expected JSON, .*remove {folder}"):
        checkpoints.newest(tmp_path)


def test_nothing_but_tensors_and_plain_values_is_unpickled(tmp_path):
    folder = checkpoints.save_checkpoint(tmp_path, {"model": 1}, 1)
    torch.save({"model": slice(1)}, folder / "state.pt")
    mark = json.loads((folder / "complete.json").read_text())
    mark["sha256"] = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
    (folder / "complete.json").write_text(json.dumps(mark))
    with pytest.raises(ValueError, match=r"state\.pt: it holds more than tensors and plain values"):
        checkpoints.read_content(checkpoints.newest(tmp_path))


FULL = """
import resource, sys, torch
from pathlib import Path
from isopos.lab.runs import checkpoints
run = Path(sys.argv[1])
def state(step, size):
    return {"model": {"weight": torch.zeros(size)}, "optimizer": {}, "best": [0, 1.5], "step": step}
checkpoints.save_checkpoint(run, state(1, 10), 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # as a disk that is full after 1 MiB
try:
    checkpoints.save_checkpoint(run, state(2, 1 << 20), 2)
except OSError as error:
    print(error)
"""


def _process(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="limits of file sizes are a matter of POSIX")
def test_a_full_disk_leaves_the_one_before(tmp_path):
    out, _ = _process(FULL, str(tmp_path)).communicate(timeout=240)
    assert "cannot write" in out
    assert "step-00000001 is complete: make room and continue from it with --resume" in out
    assert _steps(tmp_path) == [1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    checkpoints.read_content(checkpoints.newest(tmp_path))


ENDLESS = """
import sys, torch
from pathlib import Path
from isopos.lab.runs import checkpoints
for step in range(1, 10_000):
    state = {"model": {"weight": torch.full((200_000,), float(step))}, "optimizer": {}, "best": [0, 1.5], "step": step}
    checkpoints.save_checkpoint(Path(sys.argv[1]), state, step)
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_ones(tmp_path):
    for n in range(4):
        run = tmp_path / str(n)
        process = _process(ENDLESS, str(run))
        said = process.stdout.readline()
        time.sleep(0.005 + 0.017 * n)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=240)
        said = [said, *process.stdout.readlines()][-1]
        process.stdout.close()
        found = checkpoints.complete(run)
        assert found[-1].step >= int(said)
        for checkpoint in found:
            assert checkpoints.read_content(checkpoint)["model"]["weight"][0] == checkpoint.step


def test_last_weights_are_a_file_as_others_and_the_same_bytes_each_time(tmp_path):
    model = torch.nn.Module()
    model.a = torch.nn.Linear(2, 3)
    for name in "bcdefgh":  # shared, which the metadata say
        setattr(model, name, model.a)
    written = set()
    for n in range(8):
        folder = tmp_path / str(n)
        folder.mkdir()
        checkpoints.save_weights(model, folder)
        (folder / "other.json").write_text("{}")
        found, other = folder / checkpoints.WEIGHTS, folder / "other.json"
        assert found.stat().st_mode == other.stat().st_mode
        written.add(found.read_bytes())
    assert len(written) == 1
    before = model.a.weight.detach().clone()
    torch.nn.init.zeros_(model.a.weight)
    checkpoints.read_weights(model, found)
    assert torch.equal(model.a.weight, before)


def test_a_checkpoint_in_full(tmp_path):
    """Saving removes an unfinished checkpoint of the same step. The mark contains all metadata of the new one."""
    torn = tmp_path / "checkpoints" / "step-00000005"
    torn.mkdir(parents=True)
    (torn / "left.pt").write_bytes(b"half")
    assert checkpoints.save_checkpoint(tmp_path, _state(5), 5, validation=1.5, better="higher", ended=True) == torn
    assert sorted(path.name for path in torn.iterdir()) == ["complete.json", "state.pt"]
    assert json.loads((torn / "complete.json").read_text()) == {
        "step": 5,
        "sha256": hashlib.sha256((torn / "state.pt").read_bytes()).hexdigest(),
        "validation": 1.5,
        "better": "higher",
        "ended": True,
    }
    assert checkpoints.complete(tmp_path) == [checkpoints.Checkpoint(torn, 5, 1.5, "higher", True)]
    for value in ("Infinity", "-Infinity", "NaN"):
        (torn / "complete.json").write_text((torn / "complete.json").read_text().replace("1.5", value))
        with pytest.raises(
            ValueError, match=f"validation: expected a finite number, got .*; remove {torn} to go on without"
        ):
            checkpoints.complete(tmp_path)
        (torn / "complete.json").write_text((torn / "complete.json").read_text().replace(value, "1.5"))


def test_the_oldest_is_what_a_damaged_first_one_goes_back_to(tmp_path):
    """The remedy is to restart if there is no earlier checkpoint. It never names a later one."""
    for step in (1, 2, 3):
        checkpoints.save_checkpoint(tmp_path, _state(step), step, validation=4.0 - step if step < 3 else 9.0)
    found = checkpoints.complete(tmp_path)
    assert [c.step for c in found] == [2, 3]
    (found[0].folder / "state.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=f"remove {found[0].folder}, and --resume goes on from the start$"):
        checkpoints.read_content(found[0])


def _layers():
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    return model


def test_weights_that_changed_places_are_not_what_was_written(tmp_path):
    model = _layers()
    checkpoints.save_weights(model, tmp_path)
    path = tmp_path / checkpoints.WEIGHTS
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    swapped = tensors | {"a.weight": tensors["b.weight"], "b.weight": tensors["a.weight"]}
    for content, about in ((swapped, metadata), (tensors, metadata | {"sha256": "0"})):
        save_file(content, path, metadata=about)
        with pytest.raises(ValueError, match=r"model\.safetensors: its content is not what was written; put it right, or"):
            checkpoints.read_weights(_layers(), path)
    save_file(tensors, path)  # as version 0.1 wrote them
    checkpoints.read_weights(_layers(), path)


def test_a_default_of_the_scheme_that_changed_is_told_from_damage(tmp_path):
    model = torch.nn.Module()
    model.scheme = torch.nn.Linear(2, 2)
    checkpoints.save_weights(_layers(), tmp_path)
    with pytest.raises(ValueError, match=r"if a default of its scheme has changed, name the option in recipe\.json, or"):
        checkpoints.read_weights(model, tmp_path / checkpoints.WEIGHTS)


def test_a_run_is_read_on_the_cpu_in_evaluation(tmp_path):
    recipe = Recipe().edit(layers=1, model_dim=16, heads=2, device="cuda", dropout=0.5)
    write_json(tmp_path / "recipe.json", recipe.as_dict())
    built, model = checkpoints.untrained_model(tmp_path)
    assert built == recipe.edit(device="cpu")
    with pytest.raises(ValueError, match="which are written when a run ends; continue it by its command with --resume"):
        checkpoints.load_run(tmp_path)
    checkpoints.save_weights(model, tmp_path)
    loaded, again = checkpoints.load_run(tmp_path)
    assert loaded == built
    assert not any(module.training for module in again.modules())
    other = recipe.task.model(recipe.edit(device="cpu", seed=1))
    before = other.head.weight.detach().clone()
    checkpoints.warm_start(other, tmp_path)
    found = other.state_dict()
    assert found["head.weight"].equal(before)
    assert all(value.equal(found[name]) for name, value in again.state_dict().items() if not name.startswith("head."))
    checkpoints.warm_start(other, tmp_path, ("tokens.",))
    assert other.head.weight.equal(again.head.weight)
    for changes in ({"layers": 2}, {"model_dim": 32}, {"tied": True}):
        edited = recipe.edit(device="cpu", **changes)
        with pytest.raises(ValueError, match=r"start: expected weights of the model's shapes in .*; choose another run"):
            checkpoints.warm_start(edited.task.model(edited), tmp_path, ())
