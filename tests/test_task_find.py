"""From `task.name` to a class."""

import pickle
from pathlib import Path

import pytest

from lwray.errors import UserError
from lwray.tasks.find import find_task
from lwray.tasks.lm import LanguageModel
from lwray.tasks.task import Task

TOY = Path(__file__).parent / "tasks" / "toy.py"


def test_a_built_in_task_goes_by_its_name() -> None:
    assert find_task("lm") is LanguageModel


def test_a_task_of_the_users_own_goes_by_its_file_and_class() -> None:
    found = find_task(f"{TOY}:Toy")
    assert issubclass(found, Task)
    assert found.__name__ == "Toy"
    assert set(found.terms) == {"fit", "sign"}


def test_the_copy_that_a_run_keeps_is_read_instead_of_the_file(tmp_path: Path) -> None:
    copy = tmp_path / "task.py"
    copy.write_text(TOY.read_text().replace('"sign": 0.5', '"sign": 0.25'))
    assert find_task("gone/toy.py:Toy", file=copy).terms == {"fit": 1.0, "sign": 0.25}


def test_what_a_users_file_defines_can_be_pickled() -> None:
    rows = find_task(f"{TOY}:Toy").rows.__globals__["MadeRows"](3, 1)
    assert len(pickle.loads(pickle.dumps(rows))) == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lmm", r"There is no task 'lmm': task\.name is lm or path/to/file\.py:Class"),
        ("no/such/file.py:Toy", r"there is no file no/such/file\.py"),
        (f"{TOY.parent}:Toy", r"there is no file .*tasks"),
        (f"{TOY}:Missing", r"toy\.py has no class Missing that derives from lwray\.tasks\.task\.Task"),
        (f"{TOY}:MadeRows", r"toy\.py has no class MadeRows that derives from"),
        (f"{TOY}:np", r"has no class np "),
        (f"{TOY}:", r"has no class  that derives"),
        (f"{TOY.parents[2] / 'pyproject.toml'}:Toy", r"pyproject\.toml is not a Python file"),
    ],
)
def test_a_name_that_leads_to_no_task_is_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find_task(name)
