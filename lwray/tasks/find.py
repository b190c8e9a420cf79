"""From `task.name` to a Task class: a built-in name, or a class in a file of the user's."""

import importlib.util
import sys
from pathlib import Path

from lwray.errors import UserError
from lwray.tasks.task import Task

BUILT_IN = ("lm",)


def find_task(name: str, file: Path | None = None) -> type[Task]:
    """The class of `name`; `file` overrides where a `FILE.py:Class` is read from (a run keeps its own copy).

    Raises UserError for an unknown name, a missing file or class, a class that is no Task.
    """
    path, colon, class_name = name.rpartition(":")
    if colon:
        return _from_file(file or Path(path), class_name)
    if name == "lm":
        from lwray.tasks.lm import LanguageModel

        return LanguageModel
    raise UserError(f"There is no task {name!r}: task.name is {', '.join(BUILT_IN)} or path/to/file.py:Class.")


def _from_file(path: Path, class_name: str) -> type[Task]:
    if not path.is_file():
        raise UserError(f"task.name: there is no file {path}.")
    module_name = f"lwray_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"task.name: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # registered, so that classes of the file can be pickled by loader processes
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"task.name: {path} cannot be imported: {type(error).__name__}: {error}.") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(f"task.name: {path} has no class {class_name} that derives from lwray.tasks.task.Task.")
    if lacking := sorted(found.__abstractmethods__):
        raise UserError(f"task.name: {class_name} in {path} must define {', '.join(lacking)}.")
    return found
