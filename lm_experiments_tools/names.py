"""Find Python objects by name: the public names of a package, imported on first use, and `module:name` strings."""

import ast
import difflib
import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from lm_experiments_tools.errors import UserError

_OWN_PACKAGES = ("lm_experiments_tools", "modeling_t5", "modeling_bert")
_INSTALLED = ("site-packages", "dist-packages")
_allowed_modules: set[str] = set()


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Create `__getattr__` and `__dir__` (PEP 562) and the list of public names of a package.

    Args:
        package: its `__name__`; public names are those that the `__init__.pyi` next to it imports.
    """
    module = sys.modules[package]
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {alias.name: line.module for line in stub.body if isinstance(line, ast.ImportFrom) for alias in line.names}

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *homes}), list(homes)


def resolve_name(text: str, base: type | None = None, said: str | None = None) -> Any:
    """Import the class or function `module:name`, e.g. `transformers:T5ForConditionalGeneration`. Raises UserError.

    Modules in the current folder are found too. Dots are allowed on both sides (`package.module:Outer.Inner`).

    Args:
        base: required base class; None for any callable.
        said: name in error messages, such as "--metric my_metrics:f1"; default: `text`.
    """
    said = said or f"'{text}'"
    module_name, _, path = text.partition(":")
    if not (module_name and path) or ":" in path or module_name.startswith("."):
        if base is None:
            raise UserError(f"{said} does not name a function: write module:function, e.g. my_metrics:f1.")
        raise UserError(
            f"{said} does not name a class: write module:Class, e.g. transformers:T5ForConditionalGeneration."
        )
    if (
        base not in (None, object) and module_name.partition(".")[0] in sys.stdlib_module_names
    ):  # some of which act when imported
        raise UserError(f"{said}: {module_name} is a module of Python itself, which has no {base.__name__}.")
    try:
        found: Any = _imported(module_name)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"{said}: module {module_name} cannot be imported ({error}).") from error
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise UserError(f"{said}: {module_name} has no {path}{nearest_names(part, dir(found))}.") from error
    if base is None:
        if not callable(found):
            raise UserError(f"{said} is {found!r}, which cannot be called.")
    elif not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{said} is {found!r}, not a subclass of {base.__module__}.{base.__qualname__}.")
    return found


def resolve_configured(text: str, base: type, said: str) -> Any:
    """Import a class that a model's configuration names, if its module is trusted; see `resolve_name`.

    Configurations may come with untrusted weights. Trusted are modules of this project, modules that are already
    imported, and those passed to `allow_modules`. UserError for others.
    """
    module = text.partition(":")[0]
    if module.partition(".")[0] not in _OWN_PACKAGES and module not in sys.modules and module not in _allowed_modules:
        raise UserError(
            f"{said}: module {module} is not imported, because files of weights run no code. If you trust it, name a "
            f"class of that module by --model_cls {module}:Class, the configuration by --model_cfg, or, in Python, "
            "import the module first."
        )
    return resolve_name(text, base, said)


def allow_modules(values: Iterable[object]) -> None:
    """Let `resolve_configured` import the modules of the `module:Class` strings in `values`."""
    _allowed_modules.update(text.partition(":")[0] for text in values if isinstance(text, str) and ":" in text)


def is_own(thing: Any) -> bool:
    """True for None, and for a class or function of this project's packages."""
    return thing is None or (getattr(thing, "__module__", None) or "").partition(".")[0] in _OWN_PACKAGES


def is_of_user(thing: Any) -> bool:
    """True for a class or function that is not part of Python, an installed package or this project."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "builtins")
    if module is None or module.__name__.partition(".")[0] in (*_OWN_PACKAGES, "megatron", "builtins"):
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return True
    library = sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"]
    return not (set(_INSTALLED) & set(Path(file).parts) or any(Path(file).is_relative_to(path) for path in library))


def _imported(module: str) -> ModuleType:
    """The module, of the current folder if it is found nowhere else; `sys.path` changes for those of users alone."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] or os.getcwd() in sys.path:
            raise
    # The name of the folder, not "": a worker process may be started from another one (--working_dir).
    sys.path.append(os.getcwd())
    return importlib.import_module(module)


@cache
def source_imports(module: str, pattern: str) -> bool:
    """True if a line of a module's source imports ("from" or "import") what a pattern matches; nothing is run."""
    folders: Iterable[str] | None = [*sys.path, ""]
    for part in module.split("."):  # without its package, which a namespace would look up in sys.modules
        spec = folders and PathFinder.find_spec(part, list(folders))
        if not spec:
            return False
        folders = spec.submodule_search_locations
    if not spec.has_location:
        return False
    source = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    return re.search(rf"^\s*(from|import)\s+{pattern}", source, re.MULTILINE) is not None


def nearest_names(word: str, known: Iterable[object]) -> str:
    """End of an error message about an unknown name: `; did you mean '...'` with the most similar known name.

    Empty if none is similar.
    """
    near = difflib.get_close_matches(word, [str(key) for key in known], n=1)
    return f"; did you mean '{near[0]}'" if near else ""
